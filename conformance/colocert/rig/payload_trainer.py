"""The trainer side of the sync-payload profile: real tensors, frozen base and fused adapters, that can be asleep.

Knows what is on the device, what has a host copy and what is lost, and what each tensor truly holds. Does not know
engines, rules or how a framework exports. Memory that is released holds NaN (poison): reading it is possible, as on a
device that has been given to somebody else, and what is read is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from colocert.rig import payload_model as model
from colocert.rig.faults import Faults
from colocert.trace.events import Event, Move

BASE, OUTSIDE = "base", "outside"
DEVICE, HOST, LOST = "device", "host", "lost"


class MemoryLost(RuntimeError):
    """Released memory without a host copy was asked for."""


class FusedAdapter:
    """One adapter: a flat FP32 `buffer` that holds all its tensors, and `tensors`, views of it by name.

    `slots` says where each lies: name to (offset, shape) in elements. `lora_a` is [rank, in], `lora_b` [out, rank].
    """

    def __init__(self, name: str, buffer: Any) -> None:
        self.name, self.buffer = name, buffer
        self.slots = model.slots()
        self.tensors: dict[str, Any] = model.views(buffer)


class PayloadTrainer:
    """What is trained. `base`: its tensors by name, in the trainer's layout (`colocert.rig.payload_model`), frozen
    under LoRA. `adapters`: by name; empty without LoRA, where `base` trains. `shape`: sizes.

    `where(owner)` tells whether "base" or an adapter is on the device, on the host or lost; `host_copy(owner)` gives
    its tensors by name where there is a copy. `frozen`: the engine's names of what does not train.
    `trainable_outside`: names in `base` that train beside the adapters. `export_*` stand in for a framework's bridge
    between the layouts.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        *,
        emit: Callable[[Event], None],
        faults: Faults,
        resident: bool = False,
        outside: bool = False,
    ) -> None:
        import torch

        self._torch, self._emit, self._faults = torch, emit, faults
        self._random = torch.Generator().manual_seed(20)
        self.shape = model.SHAPE
        self._resident, self.outside = resident, outside
        self.trainable_outside: tuple[str, ...] = (model.OUTSIDE,) if outside else ()
        self.base = {name: self._draw(*dims) for name, dims in model.base_shapes().items()}
        self.adapters = {name: FusedAdapter(name, self._draw(model.buffer_length())) for name in names}
        self._kept: dict[str, dict[str, Any]] = {}
        self._state = dict.fromkeys((BASE, *names), DEVICE)
        beside = {"model.norm.weight"} if outside else set()
        self.frozen = [n for n in model.to_engine(self.base) if n not in beside] if names else []

    def _draw(self, *dims: int) -> Any:
        return self._torch.randn(*dims, generator=self._random) * 0.2

    # ---- what a framework asks and does

    def where(self, owner: str = BASE) -> str:
        """Whether "base" or an adapter is on the `device`, on the `host` or `lost`."""
        return self._state[owner]

    def host_copy(self, owner: str = BASE) -> Mapping[str, Any] | None:
        """The host copy of the base, by name, or of an adapter: its `buffer`. None while it is on the device."""
        return self._kept.get(owner)

    def backload(self, *, frozen: bool = True) -> None:
        """Brings adapters, and with `frozen` the base, back to the device. Raises `MemoryLost` if nothing is left."""
        for owner in (*((BASE,) if frozen else ()), *self.adapters):
            if self._state[owner] == LOST:
                raise MemoryLost(f"{owner} has no memory and no host copy to bring back")
            if self._state[owner] == HOST:
                with self._faults.point("trainer.backload"):
                    kept = self._kept.pop(owner)
                    for name, tensor in self._held(owner).items():
                        tensor.copy_(kept[name])
                    self._moved(owner, DEVICE)

    def offload(self) -> None:
        """Takes what sleeps off the device, with a host copy: the base, and adapters unless they stay by claim."""
        for owner in (BASE, *(() if self._resident else self.adapters)):
            if self._state[owner] == DEVICE:
                self._kept[owner] = {name: tensor.clone() for name, tensor in self._held(owner).items()}
                self._poison(owner)
                self._moved(owner, HOST)

    def step(self, adapter: str | None = None) -> None:
        """One optimizer step on an adapter, on all of them, or on the base where there is none. Wakes what it needs."""
        self.backload()
        trained = [self.adapters[adapter]] if adapter else list(self.adapters.values())
        for one in trained:
            one.buffer.add_(self._draw(one.buffer.numel()) * 0.3)
        if not self.adapters:
            for tensor in self.base.values():
                tensor.add_(self._draw(*tensor.shape) * 0.3)
        elif self.outside:
            tensor = self.base[model.OUTSIDE]
            tensor.add_(self._draw(*tensor.shape) * 0.3)

    def export_base(self, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The base under the engine's names."""
        return model.to_engine(self.base if base is None else base)

    def export_adapter(self, name: str, buffer: Any = None) -> dict[str, Any]:
        """An adapter under PEFT's names; parts that keep their layout are views."""
        return model.to_peft(model.views(self.adapters[name].buffer if buffer is None else buffer))

    def export_merged(self, name: str) -> dict[str, Any]:
        """The base with an adapter's delta added, under the engine's names, in new memory."""
        return model.to_engine(model.merged(self.base, self.adapters[name].tensors))

    def peft_config(self) -> dict[str, Any]:
        """What PEFT writes beside an adapter: `r`, `lora_alpha`, `target_modules`."""
        modules = sorted({part.rpartition(".")[2] for linear, *_ in model.linears() for part in model.parts(linear)})
        return {
            "peft_type": "LORA",
            "r": self.shape.rank,
            "lora_alpha": self.shape.alpha,
            "target_modules": modules,
        }

    # ---- the rig's own side

    def lose(self) -> None:
        """Memory of base and adapters is released, and no copy is kept of the adapters."""
        self.offload()
        for owner in self.adapters:
            self._kept.pop(owner, None)
            self._poison(owner)
            self._moved(owner, LOST)

    def regain(self) -> None:
        """The adapters come back from outside, a checkpoint say."""
        for owner, adapter in self.adapters.items():
            if self._state[owner] == LOST:
                adapter.buffer.copy_(self._draw(adapter.buffer.numel()))
                self._moved(owner, DEVICE)

    def truth(self, owner: str) -> dict[str, Any] | None:
        """What an owner holds by rights, wherever it lies; None if it is lost."""
        if self._state[owner] == LOST:
            return None
        return self._kept.get(owner) or self._held(owner)

    def expected(self, adapter: str | None) -> dict[str, Any] | None:
        """The effective weights in the engine's layout: the base plus one delta. None if something is lost."""
        base = self.truth(BASE)
        assert base is not None, "the base is never lost"
        if adapter is None:
            return model.to_engine(base)
        held = self.truth(adapter)
        return None if held is None else model.to_engine(model.merged(base, model.views(held["buffer"])))

    def storages(self) -> set[int]:
        """Addresses of all storages of the trainer."""
        held = [*self.base.values(), *(a.buffer for a in self.adapters.values())]
        held += [t for kept in self._kept.values() for t in kept.values()]
        return {t.untyped_storage().data_ptr() for t in held}

    def _held(self, owner: str) -> dict[str, Any]:
        return self.base if owner == BASE else {"buffer": self.adapters[owner].buffer}

    def _poison(self, owner: str) -> None:
        for tensor in self._held(owner).values():
            tensor.fill_(float("nan"))

    def _moved(self, owner: str, to: str) -> None:
        self._state[owner] = to
        held = self._held(owner)
        kind = "base" if owner == BASE else "adapter"
        self._emit(Move(owner, kind, sorted(held), to, sum(t.nbytes for t in held.values())))

"""A weight sync that knows what the engine has: base validity, export, a strict manifest, versions, retry.

Knows the order of a sync and what must be true after it. Does not know torch (it calls methods of tensors), engines'
protocols or colocert: those are behind two ports. The layouts are megatron-core's fused linears on one side, Hugging
Face and PEFT names on the other.

    sync:  refuse what cannot be sent  ->  find valid memory  ->  base, if the engine's is not valid  ->  adapter
           every step raises before the next one starts; a retry finds out by itself what is due

Adapter-only sync after the second seed, SkyRL#2157; the orders and checks after the reports that the rules SP-01 …
SP-07 name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Tensor = Any
Named = Mapping[str, Tensor]
PEFT = "base_model.model."
WHOLE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
"""Tensors whose rows stay together, and their Hugging Face names."""


class NoSource(RuntimeError):
    """What is to be sent has neither memory nor a host copy. Raised before any tensor is touched."""


class NotSynced(RuntimeError):
    """Something that trains did not arrive, or would not. `names`: which tensors."""

    def __init__(self, told: str, names: Iterable[str]) -> None:
        self.names = tuple(sorted(names))
        super().__init__(f"{told}: {', '.join(self.names)}")


@dataclass(frozen=True)
class Adapter:
    """One adapter in its fused, flat buffer; `slots` are name to (offset, (rows, columns)), in elements."""

    buffer: Tensor
    slots: Mapping[str, tuple[int, tuple[int, int]]]
    rank: int
    alpha: float

    def tensors(self) -> dict[str, Tensor]:
        """Views of the buffer by name: `LINEAR.lora_a` [rank, in], `LINEAR.lora_b` [out, rank]."""
        return {
            name: self.buffer[at : at + rows * columns].view(rows, columns)
            for name, (at, (rows, columns)) in self.slots.items()
        }


class Source(Protocol):
    """Where the trainer's weights can be read: the device, or a host copy while they are asleep."""

    def base(self) -> Named:
        """The base by name. Raises `NoSource`."""

    def adapter(self, name: str) -> Adapter:
        """Raises `NoSource`."""

    def outside(self) -> tuple[str, ...]:
        """What trains and belongs neither to an adapter nor to a base that is sent with every sync."""


class Engine(Protocol):
    """The engine's side of a sync. Each load returns the names that the engine took."""

    def base_valid(self) -> bool:
        """Whether its base is complete: loaded or received, not lost since, not in the middle of an update."""

    def load_base(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterable[str]: ...

    def load_adapter(self, name: str, tensors: dict[str, Tensor], adapter: Adapter, version: int) -> Iterable[str]: ...

    def withdraw(self, name: str) -> None:
        """No request may use this adapter any more."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What splitting a fused linear needs: key/value groups, and rows of one head.

    `copies`: what is exported lies in memory of its own. Without, parts that keep their order are views of the
    source: for an engine that copies out before it acknowledges, and only for one.
    """

    groups: int
    head: int
    copies: bool = True

    def split(self, linear: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The engine's modules in a fused linear, each with its rows of `weight` [rows, columns]."""
        _, _, layer, owner, kind = linear.split(".")
        at = f"model.layers.{layer}." + ("self_attn" if owner == "self_attention" else "mlp")
        if kind == "linear_qkv":
            # For each group: the rows of its query heads, then its key head, then its value head.
            grouped = weight.reshape(self.groups, -1, self.head, weight.shape[-1])
            for module, part in (("q", grouped[:, :-2]), ("k", grouped[:, -2]), ("v", grouped[:, -1])):
                yield f"{at}.{module}_proj", self._own(part.reshape(-1, weight.shape[-1]))
        elif kind == "linear_fc1":
            for module, part in zip(("gate", "up"), weight.chunk(2), strict=True):
                yield f"{at}.{module}_proj", self._own(part)
        else:
            yield f"{at}.{'o' if kind == 'linear_proj' else 'down'}_proj", self._own(weight)

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor.clone() if self.copies else tensor

    def base(self, base: Named) -> Iterator[tuple[str, Tensor]]:
        """The base under Hugging Face names, one tensor at a time."""
        for name, tensor in base.items():
            if name in WHOLE:
                yield WHOLE[name], self._own(tensor)
            else:
                for module, part in self.split(name.removesuffix(".weight"), tensor):
                    yield f"{module}.weight", part

    def merged(self, base: Named, adapter: Adapter) -> Iterator[tuple[str, Tensor]]:
        """The same with the adapter's delta added; the base itself is only read."""
        parts, scale = adapter.tensors(), adapter.alpha / adapter.rank
        for name, tensor in base.items():
            linear = name.removesuffix(".weight")
            lora_a, lora_b = parts.get(f"{linear}.lora_a"), parts.get(f"{linear}.lora_b")
            yield from self.base({name: tensor if lora_b is None else tensor + scale * (lora_b @ lora_a)})

    def adapter(self, adapter: Adapter) -> dict[str, Tensor]:
        """An adapter under PEFT's names: modules of one fused linear share their `lora_A`'s values.

        Raises `NotSynced` for a tensor of the buffer that is not a half of a pair.
        """
        parts = adapter.tensors()
        linears = {n.removesuffix(".lora_b") for n in parts if n.endswith(".lora_b")}
        pairs = {f"{linear}.{half}" for linear in linears for half in ("lora_a", "lora_b")}
        if odd := pairs ^ set(parts):
            raise NotSynced("every tensor of an adapter has its other half", odd)
        found: dict[str, Tensor] = {}
        for linear in sorted(linears):
            for module, rows in self.split(linear, parts[f"{linear}.lora_b"]):
                found[f"{PEFT}{module}.lora_A.weight"] = self._own(parts[f"{linear}.lora_a"])
                found[f"{PEFT}{module}.lora_B.weight"] = rows
        return found


class PayloadSync:
    """Syncs one trainer to one engine. `versions`: the last version of each adapter that the engine acknowledged.

    `doubt`: an update of the base failed here, so that the engine's own word on its base is not enough.
    """

    def __init__(self, source: Source, engine: Engine, layout: Layout) -> None:
        self.source, self.engine, self.layout = source, engine, layout
        self.versions: dict[str, int] = {}
        self.doubt = False

    def sync_adapter(self, name: str) -> None:
        """Adapter-only: the base once, then adapters. Raises `NoSource`, `NotSynced`, or what the engine raises."""
        if outside := self.source.outside():
            raise NotSynced("an adapter sync does not deliver what trains beside adapters", outside)
        adapter = self.source.adapter(name)
        if self.doubt or not self.engine.base_valid():
            self._send_base(self.layout.base(self.source.base()))
        sent = self.layout.adapter(adapter)
        version = self.versions.get(name, 0) + 1
        taken = set(self.engine.load_adapter(name, sent, adapter, version))
        if lost := sent.keys() ^ taken:
            self.engine.withdraw(name)
            raise NotSynced(f"the engine must take every tensor of adapter {name}, and no other", lost)
        self.versions[name] = version

    def sync_merged(self, name: str) -> None:
        """The base with one adapter's delta in it; the engine serves no adapter."""
        adapter = self.source.adapter(name)
        self._send_base(self.layout.merged(self.source.base(), adapter))
        self.versions[name] = self.versions.get(name, 0) + 1

    def sync_full(self) -> None:
        """Every parameter."""
        self._send_base(self.layout.base(self.source.base()))

    def _send_base(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """One base update, complete or `NotSynced`; until it is complete the engine's base is in doubt."""
        sent: list[str] = []

        def told() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors:
                sent.append(name)
                yield name, tensor

        self.doubt = True
        taken = set(self.engine.load_base(told()))
        if lost := set(sent) ^ taken:
            raise NotSynced("the engine must take every tensor of the base, and no other", lost)
        self.doubt = False

"""The engine double of the sync-payload profile: a base and adapters of real tensors, and how they arrive.

Knows names and shapes of the engine's layout, what it was given and what became of it. Does not know trainers or
rules. It is as lenient as engines are: what it has no place for, and what does not arrive, it leaves out and says so
in the `LoadReport` that every load returns; no load raises for that.

`rig.config.transport` is how tensors in memory arrive: `copy`, or `alias`, where the engine keeps the very memory it
is given and folds an adapter's scale into `lora_B` in place, as zero-copy and IPC transports with vLLM do. Files are
always read into new memory.

    update_base(tensors)       begin_base(), load_base() for them all, end_base(): one base session
    load_adapter(...)          replaces the adapter of that name; the one before is served until then
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colocert.rig import payload_model as model
from colocert.rig.faults import Faults
from colocert.rig.payload_files import read_adapter
from colocert.trace.events import (
    Change,
    EngineFlush,
    EngineLoad,
    EngineRelease,
    EngineResume,
    EngineSession,
    Event,
)

BREAKS = ("names", "slot", "transport")
"""How the world can be broken: the engine's modules have other names; one of them has no place for an adapter; a
tensor is lost on the way, of which nobody hears."""

SLOT = "model.layers.1.mlp.down_proj"
LOST = 1
"""The place, in the order of sending, of the tensor that a broken transport loses."""


class EngineAsleep(RuntimeError):
    """Weights came while the engine's are released."""


@dataclass(frozen=True)
class LoadReport:
    """What became of a load: names `loaded`, names it had no place for, and names that an adapter of this
    configuration has but did not bring."""

    loaded: tuple[str, ...]
    unknown: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass
class Served:
    """An adapter as the engine holds it: tensors by module and part (`lora_A`, `lora_B`), the scale left to apply."""

    tensors: dict[tuple[str, str], Any] = field(default_factory=dict)
    scale: float = 1.0
    version: int = 0


class PayloadEngine:
    """One engine. `base_valid`: its base is complete and not in the middle of a session. `incarnation`: how often it
    was replaced. `adapters`: what is loaded, by name. `released`: its weights have no memory.
    """

    def __init__(
        self,
        base: Mapping[str, Any],
        *,
        loaded: bool,
        mirror: bool,
        transport: str,
        emit: Callable[[Event], None],
        faults: Faults,
    ) -> None:
        import torch

        self._torch, self._emit, self._faults = torch, emit, faults
        self._mirror, self.transport = mirror, transport
        self.base: dict[str, Any] = {name: t.clone() if loaded else torch.zeros_like(t) for name, t in base.items()}
        self.base_valid = loaded
        self.incarnation = self._arrived = 0
        self.released = self.in_session = False
        self.adapters: dict[str, Served] = {}
        self.broken = self.last_loaded = ""
        self._kept: dict[str, Any] | None = None

    # ---- memory

    def release(self, backup: bool | None = None) -> None:
        """Gives the weights' memory back, with a host copy of the base if `backup` (None: as the scenario says).

        Adapters stay, as they lie outside the weights' memory.
        """
        if self.released:
            return
        keep = self._mirror if backup is None else backup
        self._kept = {n: t.clone() for n, t in self.base.items()} if keep else None
        for tensor in self.base.values():
            tensor.fill_(float("nan"))
        self.released = True
        self.base_valid = self.base_valid and keep
        self._emit(EngineRelease(["weights"]))

    def resume(self) -> None:
        """Takes the weights' memory again; nothing happens where it was not released."""
        if not self.released:
            return
        with self._faults.point("engine.resume"):
            self.released = False
            for name, tensor in (self._kept or {}).items():
                self.base[name].copy_(tensor)
            self._kept = None
            self._emit(EngineResume(["weights"]))

    def replace(self) -> None:
        """The suite puts a new server in this one's place: other weights, no adapters, nothing open."""
        for tensor in self.base.values():
            tensor.zero_()
        self.adapters.clear()
        self.incarnation += 1
        self.released = self.in_session = self.base_valid = False
        self._kept = None
        self._emit(Change("engine.replaced"))

    # ---- the base

    def begin_base(self) -> None:
        """Opens a base session. Until it is closed the base is not valid."""
        self._awake()
        with self._faults.point("engine.base.open"):
            self.base_valid = False
            self.in_session = True
            self._arrived = 0
            self._emit(EngineSession("open"))

    def load_base(self, tensors: Iterable[tuple[str, Any]] | Mapping[str, Any]) -> LoadReport:
        """Takes base tensors by name, as they come out of the iterable. Raises `RuntimeError` outside a session."""
        if not self.in_session:
            raise RuntimeError("load_base() needs a base session: begin_base() first")
        loaded: list[str] = []
        unknown: list[str] = []
        try:
            for name, tensor in _items(tensors):
                self._awake()
                with self._faults.point("engine.base.load"):
                    held = None if self.broken == "names" else self.base.get(name)
                    if held is None or held.shape != tensor.shape:
                        unknown.append(name)
                    elif not self._loses(self._arrived):
                        held.copy_(tensor.detach())
                        loaded.append(name)
                    self._arrived += 1
        finally:
            taken = [self.base[n] for n in loaded]
            total = sum(t.nbytes for t in taken)
            self._emit(EngineLoad("base", "", 0, loaded, unknown, total, self._poisoned(taken)))
        return LoadReport(tuple(loaded), tuple(unknown), tuple(n for n in self.base if n not in loaded))

    def end_base(self) -> None:
        """Closes the base session: the engine takes its base for valid from here on."""
        with self._faults.point("engine.base.close"):
            self.in_session = False
            self.base_valid = True
            self._emit(EngineSession("close"))

    def update_base(self, tensors: Iterable[tuple[str, Any]] | Mapping[str, Any]) -> LoadReport:
        """One whole base session."""
        self.begin_base()
        report = self.load_base(tensors)
        self.end_base()
        return report

    # ---- adapters

    def load_adapter(
        self,
        name: str,
        tensors: Iterable[tuple[str, Any]] | Mapping[str, Any],
        config: Mapping[str, Any],
        version: int = 0,
    ) -> LoadReport:
        """Takes an adapter from memory, under PEFT's names; `config` holds `r` and `lora_alpha`. Served on return.

        Raises `EngineAsleep` while the weights are released.
        """
        return self._load(name, dict(_items(tensors)), config, version, keep=self.transport == "alias")

    def load_adapter_files(self, name: str, folder: str | Path, version: int = 0) -> LoadReport:
        """The same from a folder as PEFT writes it. Raises `BadAdapterFile`."""
        tensors, config = read_adapter(folder)
        return self._load(name, tensors, config, version, keep=True)

    def unload_adapter(self, name: str) -> None:
        """Drops an adapter. Raises `KeyError` for a name that is not loaded."""
        if name not in self.adapters:
            raise KeyError(f"{name} must be loaded to be unloaded (got {', '.join(self.adapters) or 'no adapter'})")
        with self._faults.point("engine.adapter.unload"):
            del self.adapters[name]

    def flush(self) -> None:
        """Drops cached prefixes."""
        self._emit(EngineFlush())

    # ---- the double's own side

    def effective(self, adapter: str | None, times: float = 1.0) -> dict[str, Any]:
        """The weights that a request with this adapter meets: the base, plus its delta `times` over."""
        found, held = dict(self.base), self.adapters.get(adapter or "")
        if held is None:
            return found
        for module in {m for m, part in held.tensors if part == "lora_B" and (m, "lora_A") in held.tensors}:
            delta = held.tensors[module, "lora_B"] @ held.tensors[module, "lora_A"]
            found[f"{module}.weight"] = found[f"{module}.weight"] + times * held.scale * delta
        return found

    def _load(
        self, name: str, tensors: Mapping[str, Any], config: Mapping[str, Any], version: int, *, keep: bool
    ) -> LoadReport:
        self._awake()
        with self._faults.point("engine.adapter.load"):
            new, loaded, unknown = Served(version=version), [], []
            total, poisoned = sum(t.nbytes for t in tensors.values()), self._poisoned(tensors.values())
            for at, (key, tensor) in enumerate(tensors.items()):
                place = self._place(key, tensor)
                if place is None:
                    unknown.append(key)
                elif not self._loses(at):
                    new.tensors[place] = tensor.detach() if keep else tensor.detach().clone()
                    loaded.append(key)
            new.scale = config["lora_alpha"] / config["r"]
            if keep:
                for (_, part), tensor in new.tensors.items():
                    if part == "lora_B":
                        tensor.mul_(new.scale)
                new.scale = 1.0
            self.adapters[name] = new
            self.last_loaded = name
            self._emit(EngineLoad("adapter", name, version, loaded, unknown, total, poisoned))
        wanted = self._targets(config.get("target_modules", ()))
        return LoadReport(tuple(loaded), tuple(unknown), tuple(w for w in wanted if w not in _names(new)))

    def _place(self, key: str, tensor: Any) -> tuple[str, str] | None:
        """The module and part that a PEFT name means, if the engine has one of that shape."""
        module, _, rest = key.removeprefix(model.PEFT_PREFIX).partition(".lora_")
        part = "lora_" + rest.removesuffix(".weight")
        weight = self.base.get(f"{module}.weight")
        axis = {"lora_A": 1, "lora_B": 0}.get(part)
        if weight is None or weight.dim() != 2 or axis is None or tensor.shape[axis] != weight.shape[axis]:
            return None
        closed = self.broken == "names" or (self.broken == "slot" and module == SLOT)
        return None if closed else (module, part)

    def _targets(self, modules: Iterable[str]) -> list[str]:
        leaves = set(modules)
        names = [n.removesuffix(".weight") for n in self.base]
        return [f"{n}.{p}" for n in names if n.rpartition(".")[2] in leaves for p in ("lora_A", "lora_B")]

    def _loses(self, place: int) -> bool:
        return self.broken == "transport" and place == LOST

    def _awake(self) -> None:
        if self.released:
            raise EngineAsleep("weights must be resident to be updated (got released): resume() first")

    def _poisoned(self, tensors: Iterable[Any]) -> bool:
        return any(bool(self._torch.isnan(t).any()) for t in tensors)


def _names(served: Served) -> set[str]:
    return {f"{module}.{part}" for module, part in served.tensors}


def _items(tensors: Iterable[tuple[str, Any]] | Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    return tensors.items() if isinstance(tensors, Mapping) else tensors

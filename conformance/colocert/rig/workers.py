"""The worker groups of a weight sync: who holds what where, one storage at a time.

Knows storages, their contents and where they are, and what reading a storage does that is not there. Does not know who
decides to move them, nor engines.

A group is one role's workers taken together (policy, critic, ref). What it holds, by kind: `model`, `adapters`,
`optimizer`, `grads`. Under LoRA `model` is the frozen base and each adapter is a storage of its own; with the strategy
`fsdp` the adapters are in the model's flat parameters and move with it; without LoRA `model` is everything that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from colocert.rig.faults import Faults
from colocert.trace.events import POISON, Data, Event, Move, SaverAlloc, SaverTouch, Send

DEVICE, HOST = "device", "host"
MODEL, ADAPTERS, OPTIMIZER, GRADS = "model", "adapters", "optimizer", "grads"
KINDS = (MODEL, ADAPTERS, OPTIMIZER, GRADS)
PAYLOADS = ("adapter", "merged", "base")


class StorageReleased(RuntimeError):
    """A storage that is not on the device was read or written there."""


@dataclass
class Storage:
    """One storage: `kind` is what moves it, `adapter` whether it is one. `host` is the token of its host copy.

    A copy stays on the host when the storage comes back; it is then as old as that move. Gradients have none.
    """

    name: str
    kind: str
    nbytes: int
    content: str
    adapter: bool = False
    on_device: bool = True
    host: str | None = None


class WorkerGroup:
    """One role's workers. Everything starts on the device, where it was built.

    `active` is the adapter that is live: the one that `send("adapter")` exports where none is named.
    """

    def __init__(
        self, role: str, storages: Iterable[Storage], write: Callable[[Event], None], faults: Faults, first: str = ""
    ) -> None:
        self.role, self.active = role, first
        self._write, self._faults = write, faults
        self._storages = {s.name: s for s in storages}
        self._written = 0
        for s in self._storages.values():
            self._emit(SaverAlloc(s.kind, s.name, s.nbytes, s.kind != GRADS, s.kind, content=s.content))

    # ---- where things are

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that this group has storages of."""
        held = {s.kind for s in self._storages.values()}
        return tuple(kind for kind in KINDS if kind in held)

    def resident(self, kind: str) -> bool:
        """Whether something of the kind is on the device. Asks the storages; not a fault point."""
        return any(s.on_device for s in self._of(kind))

    def contents(self, kind: str) -> dict[str, str]:
        """Name to content token of a kind as it is, wherever it is: for the suite, no reading of memory."""
        return {s.name: s.content for s in self._of(kind)}

    def move(self, kind: str, to: str) -> None:
        """Moves what is not there yet: `to` is device or host. A fault point `worker.ROLE.KIND.TO`.

        Raises `ValueError` for a kind that no group has, or another place. A kind that this group lacks moves nothing.
        """
        if kind not in KINDS or to not in (DEVICE, HOST):
            raise ValueError(f"move takes a kind of {', '.join(KINDS)}, to device or host (got {kind}, {to})")
        with self._faults.point(f"worker.{self.role}.{kind}.{to}"):
            moved = [s for s in self._of(kind) if s.on_device is not (to == DEVICE)]
            for s in moved:
                s.on_device = to == DEVICE
                if s.on_device:
                    s.content = POISON if s.host is None else s.host
                elif kind != GRADS:
                    s.host = s.content
            self._emit(Move(self.role, kind, [s.name for s in moved], to, sum(s.nbytes for s in moved)))

    # ---- what is done with them

    def read(self, kind: str, source: str = DEVICE) -> dict[str, str]:
        """Name to content token of a kind, from the device or from the host copies.

        Raises `StorageReleased` for the device where the storage is not there, `ValueError` for a host copy that does
        not exist.
        """
        return self._contents(self._of(kind), source)

    def send(self, what: str, adapter: str | None = None, *, source: str = DEVICE, version: int = 0) -> dict[str, str]:
        """Reads what a sync sends and gives it as name to content token, for `engine.load`. A fault point `send`.

        `what` is adapter (the named one, else the active one), merged (model and adapter together) or base (the
        model). Raises as `read` does, and `KeyError` for an adapter that this group does not have.
        """
        if what not in PAYLOADS or source not in (DEVICE, HOST):
            raise ValueError(f"send takes {', '.join(PAYLOADS)}, from device or host (got {what}, {source})")
        wanted = [] if what == "base" else [self._adapter(adapter or self.active)]
        if what != "adapter":
            wanted += [s for s in self._of(MODEL) if not s.adapter]
        with self._faults.point("send"):
            contents = self._contents(wanted, source)
            size = sum(s.nbytes for s in wanted)
            self._emit(Send(what, size, source, version, list(contents), list(contents.values())))
        return contents

    def activate(self, adapter: str) -> None:
        """Makes an adapter the live one. A fault point `worker.ROLE.activate`."""
        with self._faults.point(f"worker.{self.role}.activate"):
            self.active = self._adapter(adapter).name

    def forward(self) -> None:
        """The work of a forward pass: reads the model and the adapters on the device."""
        with self._faults.point(f"worker.{self.role}.forward"):
            self._contents([s for s in self._storages.values() if s.kind in (MODEL, ADAPTERS)], DEVICE)

    def train(self, adapter: str | None = None) -> None:
        """The work of one step: reads model, adapters and optimizer on the device, and writes what trains.

        Under LoRA that is the named adapter, or all of them; else the model. Gradients are written, not read.
        """
        with self._faults.point(f"worker.{self.role}.train"):
            self._contents([s for s in self._storages.values() if s.kind != GRADS], DEVICE)
            adapters = [s for s in self._storages.values() if s.adapter and adapter in (None, s.name)]
            for s in [*(adapters or self._of(MODEL)), *self._of(OPTIMIZER), *self._of(GRADS)]:
                self._there(s, "overwrite")
                self._written += 1
                s.content = f"#{self.role}.{s.name}.{self._written}"
                self._emit(Data(s.kind, s.name, "overwrite", s.kind, s.content))

    def _contents(self, storages: list[Storage], source: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for s in storages:
            if source == HOST:
                if s.host is None:
                    raise ValueError(f"{self.role}'s {s.name} has no host copy to read: it was never offloaded")
                found[s.name] = s.host
                continue
            self._there(s, "read")
            self._emit(Data(s.kind, s.name, "read", s.kind, s.content))
            found[s.name] = s.content
        return found

    def _there(self, s: Storage, how: str) -> None:
        if not s.on_device:
            self._emit(SaverTouch(s.kind, s.name, how))
            raise StorageReleased(f"{self.role}'s {s.name} must be on the device for {how} (got released)")

    def _of(self, kind: str) -> list[Storage]:
        return [s for s in self._storages.values() if s.kind == kind]

    def _adapter(self, name: str) -> Storage:
        found = self._storages.get(name)
        if found is None or not found.adapter:
            have = ", ".join(s.name for s in self._storages.values() if s.adapter) or "none"
            raise KeyError(f"{self.role} has the adapters {have} (got {name})")
        return found

    def _emit(self, event: Event) -> None:
        event.owner = self.role
        self._write(event)

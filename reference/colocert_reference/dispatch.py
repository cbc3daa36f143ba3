"""The dispatch of a weight sync: who is on the device, and what a sync brings there.

Knows roles, kinds and the order of a sync. Does not know ranks, tensors or transports: `Worker` and `Engine` are ports
whose calls return once every rank has acknowledged, and raise what any of them raised.

    after_build()       colocated: everything goes to the host
    train_step()        the policy comes, the others go
    forward("ref")      that role's model comes, the others go
    sync()              the others go, and the optimizer; the model comes only for a sync that sends it; the engine
                        takes the weights, drops its caches, and serves the next version once all else has succeeded
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

POLICY, DEVICE, HOST = "policy", "device", "host"
MODEL, ADAPTERS, OPTIMIZER, GRADS = "model", "adapters", "optimizer", "grads"
WEIGHTS = "weights"
PAYLOADS: Mapping[str, str] = {"adapter": "adapter", "merged": "merged", "full": "base", "fsdp": "adapter"}
"""What each kind of sync sends. With FSDP the adapter is taken out of the flat parameters, which it lives in."""


class Worker(Protocol):
    """One role's workers. `kinds` are what it holds; a move of what is there already copies nothing."""

    @property
    def kinds(self) -> tuple[str, ...]: ...
    def resident(self, kind: str) -> bool:
        """Where the storage is, asked of the workers: dear, and the truth."""

    def move(self, kind: str, to: str) -> None: ...
    def activate(self, adapter: str) -> None: ...
    def forward(self) -> None: ...
    def train(self) -> None: ...
    def send(self, what: str, *, source: str) -> Any:
        """What the engine's `load` takes, read from the device or from the host copies."""


class Engine(Protocol):
    """The engine. `serve` is the version that requests are told from then on."""

    @property
    def released(self) -> Collection[str]: ...
    def resume(self, tags: Collection[str]) -> None: ...
    def load(self, kind: str, contents: Any, name: str) -> None: ...
    def flush(self) -> None: ...
    def serve(self, name: str, version: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class SyncSettings:
    """`sends` is adapter, merged, full or fsdp; `adapters` are the policy's, the first of them where none is named."""

    colocated: bool
    sends: str
    adapters: tuple[str, ...] = ()

    @property
    def needs_model(self) -> bool:
        """Whether a sync reads the model on the device. An adapter of its own is read where it is."""
        return self.sends != "adapter"


class Dispatch:
    """Timeline: built with everything on the device, `after_build()` once, then any order of the other calls.

    `on_device` is what it believes: role and kind, written after each effect and read anew from the workers after an
    error.
    """

    def __init__(self, workers: Mapping[str, Worker], engine: Engine, settings: SyncSettings) -> None:
        self.workers, self.engine, self.settings = workers, engine, settings
        self.on_device = {(role, kind): True for role, worker in workers.items() for kind in worker.kinds}
        self.versions: dict[str, int] = {}

    # ---- the calls

    def after_build(self) -> None:
        """Clears the device for the engine."""
        if self.settings.colocated:
            for role in self.workers:
                self._put_away(role)

    def train_step(self) -> None:
        """One step of the policy."""
        self._bring(POLICY, self.workers[POLICY].kinds)
        self.workers[POLICY].train()

    def forward(self, role: str) -> None:
        """One forward pass of a role."""
        self._bring(role, (MODEL, ADAPTERS))
        self.workers[role].forward()

    def sync(self, adapter: str | None = None) -> None:
        """Gives the engine the policy's weights, or one adapter by name. After an error, call it again."""
        name = self._name(adapter)
        try:
            self._prepare()
            self._transfer(name, adapter)
        finally:
            self._finish()
        self._wake(*sorted(self.engine.released))
        self._serve(name)

    def believed(self) -> dict[tuple[str, str], bool]:
        """Role and kind to released."""
        return {place: not there for place, there in self.on_device.items()}

    # ---- the parts of a sync

    def _prepare(self) -> None:
        """Makes room, and brings the model for a sync that reads it there."""
        if not self.settings.colocated:
            return
        self._put_others_away(POLICY)
        self._put_away(POLICY, (OPTIMIZER, GRADS))
        if self.settings.needs_model:
            self._bring(POLICY, (MODEL, ADAPTERS))
        self._wake(WEIGHTS)

    def _transfer(self, name: str, adapter: str | None) -> None:
        """Sends, loads, and drops what the engine computed with the weights before."""
        worker = self.workers[POLICY]
        if adapter is not None:
            worker.activate(adapter)
        what = PAYLOADS[self.settings.sends]
        self.engine.load(what, worker.send(what, source=self._source()), name)
        self.engine.flush()

    def _finish(self) -> None:
        """Leaves the device to the engine, also after an error; an error of its own does not leave it half done."""
        if not self.settings.colocated:
            return
        try:
            self._put_away(POLICY)
        except Exception:
            self._put_away(POLICY)
            raise

    def _serve(self, name: str) -> None:
        """Last: nothing can fail any more."""
        version = self.versions.get(name, 0) + 1
        self.engine.serve(name, version)
        self.versions[name] = version

    def _name(self, adapter: str | None) -> str:
        """What the engine serves the weights as: an adapter's name, or "" for its base."""
        return (adapter or self.settings.adapters[0]) if PAYLOADS[self.settings.sends] == "adapter" else ""

    def _source(self) -> str:
        """An adapter of its own is read from the host copy while it is off the device."""
        return DEVICE if self.settings.needs_model or self.on_device[POLICY, ADAPTERS] else HOST

    def _wake(self, *tags: str) -> None:
        if released := [tag for tag in tags if tag in self.engine.released]:
            self.engine.resume(released)

    # ---- who is on the device

    def _bring(self, role: str, kinds: Collection[str]) -> None:
        """Brings what is missing of a role. Where the roles share a device the others make room first."""
        if not self.settings.colocated:
            return
        self._put_others_away(role)
        for kind in kinds:
            if self.on_device.get((role, kind)) is False:
                self._move(role, kind, DEVICE)

    def _put_others_away(self, role: str) -> None:
        for other in self.workers:
            if other != role:
                self._put_away(other)

    def _put_away(self, role: str, kinds: Collection[str] = (MODEL, ADAPTERS, OPTIMIZER, GRADS)) -> None:
        for kind in kinds:
            if self.on_device.get((role, kind)):
                self._move(role, kind, HOST)

    def _move(self, role: str, kind: str, to: str) -> None:
        worker = self.workers[role]
        try:
            worker.move(kind, to)
        except Exception:
            self.on_device[role, kind] = worker.resident(kind)
            raise
        self.on_device[role, kind] = to == DEVICE

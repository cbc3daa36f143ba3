"""The engine double: memory by tag, requests, versions, and whether its base is valid.

Knows what an inference engine of the colocated kind keeps and refuses, in the two manners that are met: `strict` as
SGLang (a resume of what is not released is an error), `lenient` as vLLM (it is a no-op). Does not know trainers.

Its weights have a host mirror where `rig.config.engine_mirror` says so; without one a release loses them and the base
is invalid until `update_base()`. KV cache and graphs have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from colocert.rig.contract import Config
from colocert.rig.faults import Faults
from colocert.rig.remote_call import Callee
from colocert.rig.saver import StrictSaver
from colocert.trace.events import (
    Change,
    EngineAdmit,
    EngineDrain,
    EngineFlush,
    EngineRelease,
    EngineResume,
    EngineServe,
    Event,
    RequestBegin,
    RequestEnd,
)

ENGINE_OWNER = "engine"


class EngineTagError(KeyError):
    """A strict server was asked to resume what is not released, or to release what is."""


class EngineNotReady(RuntimeError):
    """A request, or new weights, came while memory it needs is released."""


class EngineDouble(Callee):
    """One engine. `served` is (adapter, version) and `base_valid` whether its base weights are what was last sent."""

    owner = ENGINE_OWNER

    def __init__(self, index: int, config: Config, write: Callable[[Event], None], faults: Faults) -> None:
        self.index, self.config = index, config
        self._write = write
        self._faults = faults
        self.saver = StrictSaver(self.emit, faults=Faults(self.emit))
        super().__init__()
        self.base_valid = True
        self.version = self.base_version = 0
        self.admitting = True
        self.in_flight = 0
        for tag, nbytes in config.engine_sizes.items():
            with self.saver.region(tag, enable_cpu_backup=tag == "weights" and config.engine_mirror):
                self.saver.alloc(nbytes, name=f"engine.{tag}", kind=tag)

    def emit(self, event: Event) -> None:
        """Writes an event of this engine."""
        event.rank, event.owner = self.index, ENGINE_OWNER
        self._write(event)

    @property
    def released(self) -> set[str]:
        """The tags that are released now."""
        return {a.tag for a in self.saver.allocations.values() if a.paused}

    def release(self, tags: Iterable[str] | None = None) -> None:
        """Gives the memory of these tags (none: of all that it can release) back."""
        wanted = self._wanted(tags)
        redundant = [t for t in wanted if t in self.released]
        self.emit(EngineRelease([t for t in wanted if t not in redundant], redundant))
        if redundant and self.config.engine_server == "strict":
            raise EngineTagError(f"{', '.join(redundant)} must be resident to be released (got released)")
        for tag in wanted:
            if tag not in redundant:
                with self._faults.point(f"engine.release.{tag}"):
                    self.saver.pause(tag)
        if "weights" in wanted and not self.config.engine_mirror:
            self.base_valid = False

    def resume(self, tags: Iterable[str] | None = None) -> None:
        """Takes the memory of these tags (none: of all) again."""
        wanted = self._wanted(tags)
        redundant = [t for t in wanted if t not in self.released]
        self.emit(EngineResume([t for t in wanted if t not in redundant], redundant))
        if redundant and self.config.engine_server == "strict":
            raise EngineTagError(f"{', '.join(redundant)} must be released to be resumed (got resident)")
        for tag in wanted:
            if tag not in redundant:
                with self._faults.point(f"engine.resume.{tag}"):
                    self.saver.resume(tag)

    def update(self, kind: str, version: int) -> None:
        """Takes weights: base, adapter or merged. Raises `EngineNotReady` while its own weights are released."""
        if "weights" in self.released:
            raise EngineNotReady("weights must be resident to be updated (got released): resume them first")
        with self._faults.point("engine.update"):
            if kind in ("base", "merged"):
                self.base_valid = True
                self.base_version = version
            self.version = version
            self.emit(EngineServe("adapter" if kind == "adapter" else "", version, self.base_version))

    def flush(self) -> None:
        """Drops cached prefixes."""
        self.emit(EngineFlush())

    def drain(self) -> None:
        """Finishes what is in flight and admits nothing more."""
        with self._faults.point("engine.drain"):
            self.admitting = False
            while self.in_flight:
                self._answer()
            self.emit(EngineDrain())

    def admit(self) -> None:
        """Admits requests again."""
        with self._faults.point("engine.admit"):
            self.admitting = True
            self.emit(EngineAdmit())

    def generate(self, requests: int = 2) -> int:
        """Serves that many requests and returns the version they saw. Raises `EngineNotReady` while memory is out.

        A fault leaves its request in flight, as a client does that gave up; `drain()` ends it.
        """
        ready = not self.released
        for _ in range(requests):
            self.emit(RequestBegin("adapter", self.version, ready=ready, valid=self.base_valid))
            if not ready:
                raise EngineNotReady(f"{', '.join(sorted(self.released))} must be resident to generate (got released)")
            self.in_flight += 1
            with self._faults.point("engine.generate"):
                self._answer()
        return self.version

    def relaunch(self) -> None:
        """A new server takes this one's place: as loaded, nothing released, nothing in flight."""
        while self.in_flight:
            self._answer()
        for tag in sorted(self.released):
            self.saver.resume(tag)
        self.base_valid = self.admitting = True
        self.version = self.base_version = 0
        self.emit(Change("engine.launched"))

    def _answer(self) -> None:
        self.in_flight -= 1
        self.emit(RequestEnd("adapter", self.version))

    def _wanted(self, tags: Iterable[str] | None) -> list[str]:
        sizes = self.config.engine_sizes
        can = [t for t in sizes if t in self.config.engine_releases]
        wanted = can if tags is None else list(tags)
        unknown = [t for t in wanted if t not in sizes]
        if unknown:
            raise EngineTagError(f"tags must be of {', '.join(sizes)} (got {', '.join(map(str, unknown))})")
        return wanted

    def fingerprint(self) -> tuple[Any, ...]:
        """The state as a hashable value."""
        return (self.saver.fingerprint(), self.base_valid, self.version, self.base_version, self.admitting)

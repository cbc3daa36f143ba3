"""The rig: everything an adapter is given for one scenario, built fresh and undone afterwards.

Knows the doubles and how an adapter reaches them. Does not know the rules or which scenario is running.
"""

from __future__ import annotations

import importlib
import inspect
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from colocert.rig.clock import Remote, VirtualClock
from colocert.rig.contract import Claims, Config
from colocert.rig.engine import EngineDouble
from colocert.rig.rank import RankRig
from colocert.rig.trainers import TrainerDouble, TrainerHandle
from colocert.trace.events import AnyEvent, ClaimsStated, Event, Note
from colocert.trace.events import Config as ConfigEvent

_ABSENT = object()


class Rig(RankRig):
    """One scenario's world, and its rank 0.

    `config`: what this scenario is. `saver`: the strict saver, already holding the allocations of `config.regions`
    (unless the adapter calls `start_empty()` before it builds a real model). `process_groups`: the group double.

    For drivers: `trainers`, one handle a rank over a double or over the framework's own trainer (`chain`), `engines`,
    and with `config.use_critic` as many `critics`, numbered after the trainers. They allocate when the driver calls
    `init()`.
    """

    def __init__(
        self,
        config: Config,
        claims: Claims,
        sink: Callable[[AnyEvent], None],
        *,
        capacity: int | None = None,
        directory: Path | None = None,
        started: bool = True,
        seed: int = 0,
    ) -> None:
        self.claims = claims
        self._sink = sink
        self._seq = 0
        self._directory = directory
        self._undo: list[Callable[[], None]] = []
        self._clock: VirtualClock | None = None
        self._seed = seed
        super().__init__(0, config, self._stamp, capacity=capacity)
        self.ranks: list[RankRig] = [
            self,
            *(RankRig(r, config, self._stamp, self.faults, capacity=capacity) for r in range(1, config.ranks)),
        ]
        self.emit(ConfigEvent(config.facts()))
        self.emit(ClaimsStated(claims.facts()))
        self.engines: list[EngineDouble] = []
        self.trainers: list[TrainerHandle] = []
        self.critics: list[TrainerHandle] = []
        if started:
            self.start()
        else:
            self.engines = [EngineDouble(i, config, self._stamp, self.faults) for i in range(config.engines)]
            self.trainers = [TrainerHandle(rank, TrainerDouble(rank, self.engines)) for rank in self.ranks]
            if config.use_critic:
                self.critics = self._make_critics(replace(config, role="critic"), capacity)

    def _make_critics(self, config: Config, capacity: int | None) -> list[TrainerHandle]:
        numbers = range(config.ranks, 2 * config.ranks)
        ranks = [RankRig(n, config, self._stamp, self.faults, capacity=capacity) for n in numbers]
        return [TrainerHandle(rank, TrainerDouble(rank, ())) for rank in ranks]

    def _stamp(self, event: Event) -> None:
        self._seq += 1
        event.seq = self._seq
        self._sink(event)  # type: ignore[arg-type]

    def state(self, event: Event) -> None:
        """Writes an event of the run itself, whatever became of its ranks."""
        self._stamp(event)

    def chain(self, trainers: Iterable[Any]) -> list[TrainerHandle]:
        """Puts the framework's own trainer objects, one a rank, under the handles that the driver calls."""
        self.trainers = [TrainerHandle(rank, trainer) for rank, trainer in zip(self.ranks, trainers, strict=True)]
        return self.trainers

    def chain_critics(self, critics: Iterable[Any]) -> list[TrainerHandle]:
        """The same for `critics`."""
        ranks = [handle.rank for handle in self.critics]
        self.critics = [TrainerHandle(rank, critic) for rank, critic in zip(ranks, critics, strict=True)]
        return self.critics

    # ---- statements, patches

    def record(self, op: str, **facts: Any) -> None:
        """Writes a statement into the trace, for people; no rule passes on it."""
        self.emit(Note(op, facts, statement=True))

    def patch(self, target: str | tuple[Any, str], value: Any) -> None:
        """Sets an attribute for this scenario: `"package.module.attr"`, or an object and an attribute's name."""
        if isinstance(target, str):
            module, _, attribute = target.rpartition(".")
            owner: Any = importlib.import_module(module)
        else:
            owner, attribute = target
        before = (
            inspect.getattr_static(owner, attribute, _ABSENT)
            if inspect.isclass(owner)
            else getattr(owner, attribute, _ABSENT)
        )
        setattr(owner, attribute, value)
        self._undo.append(lambda: delattr(owner, attribute) if before is _ABSENT else setattr(owner, attribute, before))

    def stubs(self, names: Iterable[str]) -> None:
        """Puts stand-ins for absent modules that a framework imports unguarded; see `colocert.rig.stubs`.

        Stays for the process: an implementation is imported once.
        """
        from colocert.rig.stubs import install

        install(names)

    @property
    def directory(self) -> Path:
        """A folder of this scenario's own for files; removed at its end."""
        if self._directory is None:
            folder = tempfile.TemporaryDirectory(prefix="colocert-")
            self._undo.append(folder.cleanup)
            self._directory = Path(folder.name)
        return self._directory

    # ---- coroutines and remote handles

    @property
    def clock(self) -> VirtualClock:
        """The event loop of this scenario, whose time is virtual."""
        if self._clock is None:
            self._clock = VirtualClock(self._seed)
            self._undo.append(self._clock.close)
        return self._clock

    def run(self, value: Any) -> Any:
        """Runs a coroutine to its end on the rig's own loop; passes any other value through."""
        return self.clock.run(value) if inspect.isawaitable(value) else value

    def get(self, value: Any) -> Any:
        """Stands where `ray.get` would: the result of a handle's call, or of a list of them."""
        if isinstance(value, (list, tuple)):
            return [self.run(v) for v in value]
        return self.run(value)

    def remote(self, obj: object) -> Remote:
        """A handle whose methods are called as `handle.method.remote(...)`, giving an awaitable.

        As with Ray the call is under way once issued. It takes effect and is acknowledged after delays of virtual
        time, drawn from the scenario's seed.
        """
        return Remote(obj, self.clock)

    def close(self) -> None:
        """Undoes patches, last first, and removes the scenario's files."""
        while self._undo:
            self._undo.pop()()

    def fingerprint(self) -> tuple[object, ...]:
        """The state of every double, as a hashable value."""
        return (self.saver.fingerprint(), self.process_groups.fingerprint())

"""HO-09 … HO-15: what a rollout sees, what is left at the end and after an error, and what the engine is asked.

Knows the sentences of these rules as folds over a whole run. Does not know which driver or scenario produced a trace.
"""

from __future__ import annotations

from types import MappingProxyType

from colocert.rules.fold import RunFold
from colocert.rules.run import Held, RunView
from colocert.trace.events import (
    AnyEvent,
    CallBegin,
    CallEnd,
    CallRaise,
    EngineRelease,
    EngineResume,
    Fault,
    RequestBegin,
    SaverFatal,
)

UNSENT = "weights were trained and not sent"


class SeesTheLastSync(RunFold):
    """HO-09: rollouts see the last synced version; at the end no sync is owed and no owner is half released."""

    rule = "HO-09"
    sees = (RequestBegin, CallEnd)
    actors = frozenset({"driver"})

    def on(self, event: AnyEvent) -> None:
        view = self.view
        if view.faults:
            return
        if isinstance(event, RequestBegin) and view.started:
            self.met("stale-version")
            if why := self._stale(event):
                self.found(event, "stale-version", "a rollout sees the last synced version", why)
        elif isinstance(event, CallEnd) and event.actor == "driver" and event.method == "run" and view.steps:
            self.met("sync-owed")
            self.met("half-released")
            if view.trained:
                self.found(event, "sync-owed", "no sync is owed after the last iteration", UNSENT)
            if half := view.half_released():
                self.found(
                    event, "half-released", "no owner is half released after the last iteration", "; ".join(half)
                )

    def _stale(self, event: RequestBegin) -> str:
        if not event.valid:
            return "the engine's base is invalid"
        if self.view.trained:
            return UNSENT
        last = self.view.version
        return "" if last in (None, event.version) else f"version {event.version}, and {last} was synced"


class RecoversFromErrors(RunFold):
    """HO-10: after an error a fresh run or `close()` ends with nothing half released; a death is reported.

    An error is one that the suite injected, or one that the driver raised by itself.
    """

    rule = "HO-10"
    sees = (Fault, SaverFatal, CallEnd, CallRaise)
    actors = frozenset({"driver"})

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.failed = False
        self.died = False

    def on(self, event: AnyEvent) -> None:
        if isinstance(event, Fault):
            self.failed = True
        elif isinstance(event, SaverFatal):
            if not event.owner:
                self.died = True
        elif isinstance(event, (CallEnd, CallRaise)) and event.actor == "driver":
            self._closed(event)

    def _closed(self, event: CallEnd | CallRaise) -> None:
        view = self.view
        if self.died:
            self.died = False
            self.met("death-swallowed")
            if isinstance(event, CallEnd) and event.method == "run":
                self.found(event, "death-swallowed", "a rank that ended is reported", "run() returned")
            return
        if self.failed and not view.faulted_run and event.method in ("run", "close") and not view.dead:
            self._judge(event)
            self.failed = event.method != "run"
        if isinstance(event, CallRaise) and event.method == "run":
            self.failed = True

    def _judge(self, event: CallEnd | CallRaise) -> None:
        view = self.view
        self.met("not-recovered")
        self.met("left-half-released")
        if isinstance(event, CallRaise):
            self.found(event, "not-recovered", f"{event.method}() after an error succeeds", f"it raised {event.error}")
        elif half := view.half_released():
            self.found(event, "left-half-released", "nothing is half released", "; ".join(half))
        elif view.in_flight:
            self.found(event, "left-half-released", "no request is left in flight", f"{view.in_flight} are")


class RolloutHasTheDevice(RunFold):
    """HO-11: during generation the trainer holds its declared resident set and nothing else on the device."""

    rule = "HO-11"
    sees = (RequestBegin,)

    def on(self, event: AnyEvent) -> None:
        view = self.view
        if view.faults or not view.started or not view.config.get("offload_train", True):
            return
        self.met("trainer-resident")
        if held := [*view.trainer_holds(), *view.transport_held()]:
            self.found(
                event,
                "trainer-resident",
                "the trainer holds its declared resident set during generation",
                f"{view.tags_of(held)} is resident",
            )


class NoRequestIsCut(RunFold):
    """HO-12: no request is in flight when engine memory is released; none is admitted before the last resume."""

    rule = "HO-12"
    sees = (EngineRelease, RequestBegin)

    def on(self, event: AnyEvent) -> None:
        view = self.view
        if isinstance(event, EngineRelease):
            self.met("released-in-flight")
            if view.in_flight:
                self.found(event, "released-in-flight", "no request is in flight", f"{view.in_flight} are in flight")
        elif isinstance(event, RequestBegin):
            self.met("admitted-early")
            if not event.ready:
                self.found(
                    event, "admitted-early", "no request is admitted before the last resume", "memory is released"
                )


class TransportIsCollected(RunFold):
    """HO-13: trainer device bytes are no higher than before the sync by its next `wake_up()`.

    A trainer that synced while awake and slept since holds less, whatever it keeps: there, what it has taken since the
    sync began counts against what it freed.
    """

    rule = "HO-13"
    by_kind = MappingProxyType({CallBegin: "_begun"})
    actors = frozenset({"trainer"})

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.before: dict[int, dict[Held, int]] = {}

    def _begun(self, event: CallBegin) -> None:
        method = event.method
        if event.actor != "trainer" or self.view.faults:
            return
        if method == "update_weights":
            self.before[event.rank] = self._resident(event.rank)
        elif event.rank in self.before and method in ("wake_up", "train"):
            self.met("transport-kept")
            before, now = self.before.pop(event.rank), self._resident(event.rank)
            taken = sum(n for held, n in now.items() if held not in before)
            freed = sum(n for held, n in before.items() if held not in self.view.allocations)
            higher = sum(now.values()) - sum(before.values())
            if higher > 0 or taken > freed:
                self.found(
                    event,
                    "transport-kept",
                    f"{sum(before.values())} bytes of the trainer on the device, as before the sync",
                    f"{sum(now.values())} bytes, {taken} of them taken since",
                )

    def _resident(self, rank: int) -> dict[Held, int]:
        view = self.view
        return {h: a.nbytes for h, a in view.allocations.items() if h[:2] == ("", rank) and h not in view.out}


class NoRedundantResume(RunFold):
    """HO-15: the driver never resumes an engine tag that is not released.

    Judged under the strict server; under the lenient one it is counted.
    """

    rule = "HO-15"
    sees = (EngineResume,)

    def on(self, event: AnyEvent) -> None:
        if not isinstance(event, EngineResume) or self.view.faults:
            return
        if event.tags:
            self.met("redundant-resume")
        if event.redundant and self.view.config.get("engine_server") == "strict":
            what = ", ".join(event.redundant)
            self.found(event, "redundant-resume", "only released tags are resumed", f"{what} is not released")

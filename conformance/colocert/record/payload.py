"""Driving a payload sync: its calls on a rig of real tensors, and what the rig sees before and after each.

Knows how to build a sync and take a scenario's steps. Does not know rules or processes.

    sync [ADAPTER]         the call that is judged; without a name where there is one adapter or none
    train [ADAPTER]        an optimizer step
    sleep, wake            the trainer's memory leaves the device with a host copy, and comes back
    lose, regain           adapters leave the device without a copy, and are loaded from elsewhere
    release, resume        the engine's weights leave the device (a host copy stays where the scenario says so)
    replace                a new server takes the engine's place
    break WHAT, mend       the engine's names differ, a slot is missing, or the transport loses a tensor
    fault POINT WHEN [N]   for the next sync

An implementation may offer `train_step(adapter)`, `release_engine()`, `resume_engine()` and `engine_replaced()`: they
are called in place of the rig's own, or, for the last, after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from colocert.record.drive import ProcessGone, TrainerShapeError
from colocert.record.scenarios import Scenario
from colocert.rig.contract import Claims
from colocert.rig.payload_engine import BREAKS
from colocert.rig.payload_measure import settle
from colocert.rig.payload_rig import PayloadConfig, PayloadRig, TorchMissing, require_torch
from colocert.trace.events import AnyEvent, CallBegin, CallEnd, CallRaise, Change, Measured

SYNCS_FOR_LEVELS = 6


class PayloadSession:
    """A payload sync on a rig. `sync` never raises what the implementation raises: it is in the trace."""

    def __init__(self, rig: PayloadRig) -> None:
        self.rig = rig
        self.made: Any = None
        self._calls = 0

    def build(self, implementation: Any) -> bool:
        """The factory. Raises what it raises, and `TrainerShapeError` for an object without `sync`.

        A factory may refuse to train anything beside adapters: that is written, and false is returned.
        """
        if self.rig.config.outside:
            self._guard("build", lambda: self._make(implementation))
        else:
            self._make(implementation)
        return self.made is not None

    def _make(self, implementation: Any) -> None:
        made = self.rig.run(implementation.payload_sync(self.rig))
        if not callable(getattr(made, "sync", None)):
            raise TrainerShapeError(f"payload_sync(rig) must return an object with sync(adapter=None) (got {made!r})")
        self.made = made
        self.rig.faults.passed.clear()

    def sync(self, *names: str) -> None:
        """One sync, with what the rig sees before and after."""
        rig, measure = self.rig, self.rig.measure
        asked = names[0] if names else next(iter(rig.config.adapters), None)
        rig.look(asked, after=False)
        rig.engine.last_loaded = ""
        with measure.around_sync():
            self._guard("sync", lambda: self._watched(names))
        rig.faults.disarm()
        if asked and (loaded := rig.engine.last_loaded):
            measure.served_as[asked] = asked if asked in rig.engine.adapters else loaded
        rig.look(asked, after=True)
        rig.emit(Measured("levels", measure.levels()))

    def _watched(self, names: tuple[str, ...]) -> None:
        with self.rig.watch():
            self.rig.run(self.made.sync(*names))

    def _guard(self, method: str, work: Callable[[], Any]) -> None:
        rig = self.rig
        self._calls += 1
        rig.emit(CallBegin("payload", method, self._calls))
        try:
            work()
        except TrainerShapeError:
            raise
        except Exception as error:
            raised = CallRaise("payload", method, self._calls, type(error).__name__, str(error)[:300])
            del error
            rig.emit(raised)
        except BaseException as error:
            raise ProcessGone(f"{method}() ended the process with {type(error).__name__}: {error}") from error
        else:
            rig.emit(CallEnd("payload", method, self._calls))

    def own(self, method: str, instead: Callable[..., Any] | None, *args: Any) -> None:
        """The implementation's method if it has one, else the rig's."""
        call = getattr(self.made, method, None)
        if callable(call):
            self.rig.run(call(*args))
        elif instead is not None:
            instead(*args)

    def close(self) -> None:
        """Ends the implementation's side, if it has an end."""
        if callable(getattr(self.made, "close", None)):
            self._guard("close", lambda: self.rig.run(self.made.close()))


def run_payload(implementation: Any, claims: Claims, scenario: Scenario, sink: Callable[[AnyEvent], None]) -> None:
    """Builds the rig and the sync, and takes every step; events go to `sink` as they happen.

    Raises `TrainerShapeError` where torch is missing: no tensors, no judgement.
    """
    if not hasattr(implementation, "payload_sync"):
        return
    try:
        require_torch()
        settle()
        rig = PayloadRig(PayloadConfig(**{"regions": {}, **scenario.config}), claims, sink)
    except TorchMissing as error:
        raise TrainerShapeError(str(error)) from error
    try:
        rig.measure.begin(levels=sum(s.startswith("sync") for s in scenario.steps) >= SYNCS_FOR_LEVELS)
        try:
            session = PayloadSession(rig)
            if session.build(implementation):
                for step in scenario.steps:
                    _take(session, step)
                session.close()
        finally:
            rig.measure.end()
    finally:
        rig.close()


def _take(session: PayloadSession, step: str) -> None:
    rig, (word, *rest) = session.rig, step.split()
    if word == "sync":
        session.sync(*rest)
    elif word == "train":
        session.own("train_step", rig.trainer.step, *rest)
    elif word == "fault":
        rig.faults.arm(rest[0], rest[1], int(rest[2]) if len(rest) > 2 else 1)
    elif word == "release":
        session.own("release_engine", rig.engine.release)
    elif word == "resume":
        session.own("resume_engine", rig.engine.resume)
    elif word == "replace":
        rig.engine.replace()
        session.own("engine_replaced", None)
    elif word == "break":
        if rest[0] not in BREAKS:
            raise ValueError(f"break takes one of {', '.join(BREAKS)} (got {rest[0]})")
        rig.engine.broken = rest[0]
        rig.emit(Change("world.broken", {"how": rest[0]}))
    elif word == "mend":
        rig.engine.broken = ""
        rig.emit(Change("world.mended"))
    else:
        {
            "sleep": rig.trainer.offload,
            "wake": rig.trainer.backload,
            "lose": rig.trainer.lose,
            "regain": rig.trainer.regain,
        }[word]()

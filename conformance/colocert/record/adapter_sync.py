"""Driving a weight sync: after building, through steps, forwards and syncs, with faults, and requests in between.

Knows how to build one and take a scenario's steps. Does not know rules or processes.

    after_build, train_step, forward ROLE, sync [ADAPTER]    calls; after each, what it believes
    fault N before|after     the N-th effect of the next call fails; the scenario ends with a call that has fewer
    engine sleeps            the engine gives back what it can, as a driver does before training
    rollout                  requests to everything the engine serves; none while its memory is out
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from colocert.record.drive import ProcessGone, TrainerShapeError
from colocert.record.scenarios import Scenario
from colocert.rig.contract import Claims
from colocert.rig.sync_rig import SYNC_METHODS, SyncConfig, SyncRig
from colocert.trace.events import AnyEvent, Believed, CallBegin, CallEnd, CallRaise

ACTOR = "weight_sync"


class SyncSession:
    """A weight sync on a rig. `call` never raises what the implementation raises: it is in the trace.

    `spent`: a fault was armed beyond the last effect of a call, so that no later one would go off either.
    """

    def __init__(self, rig: SyncRig) -> None:
        self.rig = rig
        self.made: Any = None
        self.spent = False
        self._calls = 0

    def build(self, implementation: Any) -> None:
        """The factory. Raises what it raises, and `TrainerShapeError` for an object without the calls of one."""
        made = self.rig.run(implementation.weight_sync(self.rig))
        missing = [m for m in SYNC_METHODS if not callable(getattr(made, m, None))]
        if missing:
            raise TrainerShapeError(
                f"weight_sync(rig) must return an object with {', '.join(m + '()' for m in SYNC_METHODS)} (got "
                f"{type(made).__name__} without {', '.join(m + '()' for m in missing)})"
            )
        self.made = made
        self.rig.faults.passed.clear()

    def call(self, method: str, *args: str) -> bool:
        """Makes one call, writes what is believed after it, and returns whether it returned normally."""
        self._calls += 1
        call, state = self._calls, self.rig.state
        state(CallBegin(ACTOR, method, call, " ".join(args)))
        try:
            self.rig.run(getattr(self.made, method)(*args))
        except Exception as error:
            state(CallRaise(ACTOR, method, call, type(error).__name__, str(error)[:300]))
            ok = False
        except BaseException as error:
            state(CallRaise(ACTOR, method, call, type(error).__name__, str(error)[:300]))
            raise ProcessGone(f"{method}() ended the process with {type(error).__name__}: {error}") from error
        else:
            state(CallEnd(ACTOR, method, call))
            ok = True
        self.spent = self.rig.faults.disarm()
        self._believed()
        return ok

    def _believed(self) -> None:
        stated = self.rig.run(self.made.believed()) or {}
        if wrong := [key for key in stated if not (isinstance(key, tuple) and len(key) == 2)]:
            raise TrainerShapeError(f"believed() must return (role, kind) to released (got the key {wrong[0]!r})")
        released = {f"{role}.{kind}": bool(out) for (role, kind), out in stated.items()}
        self.rig.state(Believed(released, statement=True))


def sync_config(scenario: Scenario, claims: Claims) -> SyncConfig:
    """The configuration that the implementation sees: with an engine that releases what the claims say."""
    engine = {"engine_server": "lenient", "engine_releases": claims.engine_releases}
    return SyncConfig(**{"lora": False, "regions": {}, **engine, **scenario.config})


def run_adapter_sync(implementation: Any, claims: Claims, scenario: Scenario, sink: Callable[[AnyEvent], None]) -> None:
    """Builds the rig and the weight sync, and takes every step; events go to `sink` as they happen."""
    if not hasattr(implementation, "weight_sync"):
        return
    rig = SyncRig(sync_config(scenario, claims), claims, sink, seed=scenario.seed)
    try:
        session = SyncSession(rig)
        session.build(implementation)
        for step in scenario.steps:
            if session.spent:
                break
            _take(session, step)
    finally:
        rig.close()


def _take(session: SyncSession, step: str) -> None:
    rig, (word, *rest) = session.rig, step.split()
    if word == "fault":
        rig.faults.arm("*", rest[1], int(rest[0]))
    elif step == "engine sleeps":
        rig.engine.release()
    elif step == "rollout":
        for name in rig.engine.names() if not rig.engine.released else ():
            rig.engine.request(name)
    else:
        session.call(word, *rest)

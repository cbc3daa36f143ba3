"""Driving a driver: the framework's own loop over the rig's trainers and engines, and what happened around each run.

Knows how to build a driver and take a hand-off scenario's steps. Does not know rules or processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from colocert.record.drive import ProcessGone, TrainerShapeError
from colocert.record.scenarios import LEFT_WHEN_FILLED, Scenario
from colocert.rig.contract import Claims
from colocert.rig.rig import Rig
from colocert.rig.saver import SaverFatal
from colocert.trace.events import AnyEvent, CallBegin, CallEnd, CallRaise

ROOM_ON_DEVICE = 1 << 30


class DriverSession:
    """A driver on a rig. `call` never raises what the driver raises: it is in the trace."""

    def __init__(self, rig: Rig, implementation: Any) -> None:
        self.rig = rig
        self.driver: Any = None
        self._calls = 0
        self._implementation = implementation

    def build(self) -> bool:
        """The factory; a driver may refuse its configuration here."""
        return self._guard("build", self._make)

    def _make(self) -> None:
        made = self.rig.run(self._implementation.driver(self.rig))
        missing = [m for m in ("run", "close") if not callable(getattr(made, m, None))]
        if missing:
            raise TrainerShapeError(f"driver(rig) must return an object with run() and close() (got {made!r})")
        self.driver = made

    def call(self, method: str, *args: Any) -> bool:
        """Makes one call and returns whether it returned normally."""
        return self._guard(method, lambda: self.rig.run(getattr(self.driver, method)(*args)))

    def _guard(self, method: str, work: Callable[[], Any]) -> bool:
        self._calls += 1
        call = self._calls
        self.rig.state(CallBegin("driver", method, call))
        try:
            work()
        except TrainerShapeError:
            raise
        except (Exception, SaverFatal) as error:
            self.rig.state(CallRaise("driver", method, call, type(error).__name__, str(error)[:300]))
            return False
        except BaseException as error:
            raise ProcessGone(f"{method}() ended the process with {type(error).__name__}: {error}") from error
        self.rig.state(CallEnd("driver", method, call))
        return True


def run_handoff(implementation: Any, claims: Claims, scenario: Scenario, sink: Callable[[AnyEvent], None]) -> None:
    """Builds the rig and the driver, and takes every step; events go to `sink` as they happen."""
    config = scenario.build_config()
    rig = Rig(config, claims, sink, capacity=ROOM_ON_DEVICE, started=False, seed=scenario.seed)
    try:
        session = DriverSession(rig, implementation)
        if session.build():
            for step in scenario.steps:
                _take(session, step)
    finally:
        rig.close()


def _take(session: DriverSession, step: str) -> None:
    rig, words = session.rig, step.split()
    if words[0] == "fault":
        rig.faults.arm(words[1], words[2], int(words[3]) if len(words) > 3 else 1)
    elif words[0] == "run":
        session.call("run", int(words[1]))
        rig.faults.disarm()
    elif step == "fill device":
        rig.fill_device(LEFT_WHEN_FILLED)
    elif step == "relieve device":
        rig.relieve_device()
    else:
        session.call(step)
        rig.faults.disarm()

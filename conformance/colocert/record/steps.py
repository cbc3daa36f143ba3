"""Taking a scenario's steps on a freshly built trainer.

Knows what each step does to the rig or the trainer. Does not know processes, deadlines or files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from colocert.record.drive import Session, build
from colocert.record.scenarios import LEFT_WHEN_FILLED, Scenario
from colocert.rig.contract import Claims
from colocert.rig.rig import Rig
from colocert.trace.events import AnyEvent

DEVICE_CAPACITY = 1 << 30
"""Bytes of the device in every scenario: far more than the regions need, unless the suite fills it."""


def run_scenario(implementation: Any, claims: Claims, scenario: Scenario, sink: Callable[[AnyEvent], None]) -> Session:
    """Builds what the scenario's profile needs, takes every step and closes it; events go to `sink` as they happen.

    Raises what the factory raises, `TrainerShapeError`, or `ProcessGone` where the implementation exits.
    """
    rig = Rig(scenario.build_config(), claims, sink, capacity=DEVICE_CAPACITY)
    try:
        session = build(implementation, rig)
        for step in (*scenario.steps, "close"):
            if session.over:
                break
            take_step(session, step)
        return session
    finally:
        rig.close()


def take_step(session: Session, step: str) -> None:
    """One step: a change of the world, a fault for the next call, or a call (left out if the trainer lacks it)."""
    rig = session.rig
    if step.startswith("fault "):
        _, point, when, *nth = step.split()
        rig.faults.arm(point, when, int(nth[0]) if nth else 1)
    elif step == "groups gone":
        rig.process_groups.take_away()
    elif step == "fill device":
        rig.fill_device(LEFT_WHEN_FILLED)
    elif step == "relieve device":
        rig.relieve_device()
    elif session.has(step):
        session.call(step)
        rig.faults.disarm()

"""Recording, as a real run is, what the suite records of a driver and a trainer: the same run seen by both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import colocert
from colocert.live import Recording
from colocert.record.drive import build
from colocert.record.handoff import ROOM_ON_DEVICE, DriverSession, _take
from colocert.record.scenarios import Scenario
from colocert.record.steps import take_step
from colocert.rig.contract import Claims
from colocert.rig.rig import Rig
from colocert.trace import AnyEvent

ENGINE_METHODS = {m: m for m in ("release", "resume", "update", "generate", "drain", "admit", "flush")}
CALLS = ("init", "sleep", "wake_up", "train", "update_weights", "offload_grad_buffer", "clear_memory", "close")


def _methods(target: Any) -> dict[str, str]:
    return {m: m for m in CALLS if callable(getattr(target, m, None))}


def _paths(recordings: list[Recording]) -> list[Path]:
    for recording in recordings:
        recording.close()
        assert not recording.problem, recording.problem
    return [r.path for r in recordings if r.path is not None]


def of_a_driver(implementation: Any, scenario: Scenario, folder: Path) -> tuple[list[AnyEvent], list[Path]]:
    """The suite's events of a hand-off scenario, and the files of a recording a rank."""
    claims, events = Claims.of(implementation.claims), list[AnyEvent]()
    rig = Rig(
        scenario.build_config(), claims, events.append, capacity=ROOM_ON_DEVICE, started=False, seed=scenario.seed
    )

    def recording(rank: int) -> Recording:
        return colocert.record(folder, rank=rank, claims=claims, config=rig.config, from_start=True)  # type: ignore[operator]

    ranks = [h.rank for h in (*rig.trainers, *rig.critics)]
    made = [recording(rank.rank) for rank in ranks]
    try:
        for mine, rank in zip(made, ranks, strict=True):
            mine.saver(rank.saver)
        for engine in rig.engines:
            made[0].engine(engine, number=engine.index, tags=tuple(rig.config.engine_sizes), **ENGINE_METHODS)
        session = DriverSession(rig, implementation)
        if session.build():
            made[0].driver(session.driver, run="run", close="close")
            for mine, handle in zip(made, (*rig.trainers, *rig.critics), strict=True):
                role = "critic" if handle.rank.config.role == "critic" else "trainer"
                mine.trainer(handle, role=role, **_methods(handle))
            for step in scenario.steps:
                _take(session, step)
    finally:
        rig.close()
    return events, _paths(made)


def of_a_trainer(implementation: Any, scenario: Scenario, folder: Path) -> tuple[list[AnyEvent], list[Path]]:
    """The suite's events of a lifecycle scenario, and the file of a recording of the same trainer."""
    claims, events = Claims.of(implementation.claims), list[AnyEvent]()
    rig = Rig(scenario.build_config(), claims, events.append, capacity=ROOM_ON_DEVICE)
    made = colocert.record(folder, rank=0, claims=claims, config=rig.config, from_start=True)  # type: ignore[operator]
    made.saver(rig.saver, regions={tag: regions[0].backup for tag, regions in rig.config.regions.items()})
    try:
        session = build(implementation, rig)
        made.trainer(session.trainer, **_methods(session.trainer))
        for step in (*scenario.steps, "close"):
            if not session.over:
                take_step(session, step)
    finally:
        rig.close()
    return events, _paths([made])

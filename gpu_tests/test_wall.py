"""The wall from both sides: beside the same ballast a wake fails with the gradients resident and succeeds without.

The wall is placed midway, half of the gradients' bytes from either verdict, which is more than anything a context or a
page table takes. Success alone could mean that there was no wall.
"""

from __future__ import annotations

import pytest

from colocert.device import Child
from gpu_tests.harness.checks import Check, check
from gpu_tests.harness.child import ended, last_lines, measured
from gpu_tests.harness.faults import seeded
from gpu_tests.harness.row import Row
from gpu_tests.scenarios import g07

GRANULE = 2 << 20
SLACK = {"host": 0, "cuda": 64 << 20}


def _stage(row: Row) -> tuple[Child, Child, int, Check]:
    """An engine asleep, a trainer with everything resident, and the ballast: free is the need less half the grads."""
    row.shaped(capacity=256 << 20)
    engine = row.start(g07.engine)
    needs = engine.listen()["needs"]
    trainer = row.start(g07.trainer)
    gradients = trainer.listen()["gradients"]
    wanted = needs - gradients // 2
    ballast = row.ballast(wanted)
    return engine, trainer, gradients, check("wall", wanted, ballast.free, GRANULE + SLACK[row.device])


@pytest.mark.row("G07")
@seeded({"gradients-gone": "wake"})
def test_an_engine_cannot_wake_beside_resident_gradients(row: Row) -> None:
    """With the gradients resident the engine's wake ends as out of memory in resume; the trainer stays whole."""
    engine, trainer, _, wall = _stage(row)
    if row.fault == "gradients-gone":
        trainer.tell("release gradients")
        trainer.listen()
    engine.tell("wake")
    woken, outcome = ended(engine)
    trainer.tell("done")
    row.record("last words", last_lines(outcome))
    row.judge(
        wall,
        check("wake", "oom in resume", woken),
        check("trainer", ("ok", True), _value(trainer)),
    )


@pytest.mark.row("G08")
@seeded({"gradients-after-the-wake": "wake"})
def test_the_same_engine_wakes_once_the_gradients_are_gone(row: Row) -> None:
    """Beside the same ballast the wake succeeds after the gradients' release; half of their bytes are left."""
    engine, trainer, gradients, wall = _stage(row)
    steps = [(trainer, "release gradients"), (engine, "wake")]
    if row.fault == "gradients-after-the-wake":
        steps.reverse()
    for actor, call in steps:
        actor.tell(call)
        if actor is trainer:
            trainer.listen()
    woken, seen = measured(engine)
    trainer.tell("done")
    row.judge(
        wall,
        check("wake", "ok", woken),
        check("free after the wake", gradients // 2, seen["free"], GRANULE + SLACK[row.device]),
        check("tokens", seen["before"] or "those from before the sleep", seen["after"]),
        check("trainer", ("ok", True), _value(trainer)),
    )


def _value(trainer: Child) -> tuple[str, object]:
    how, outcome = ended(trainer)
    return how, outcome.value if outcome else None

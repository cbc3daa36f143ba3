"""What hand-offs must not change: a training's bits, an engine's tokens and logits."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_tests.harness.checks import check
from gpu_tests.harness.child import ended, measured
from gpu_tests.harness.faults import seeded
from gpu_tests.harness.row import Row
from gpu_tests.scenarios import g11, g12

STEPS = 10
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@pytest.mark.torch
@pytest.mark.row("G11")
@seeded({"optimizer-without-backup": "bits", "gradient-not-zeroed": "bits"})
def test_training_is_the_same_with_a_hand_off_after_every_step(row: Row) -> None:
    """Ten steps of AdamW on a low-rank adapter with a hand-off after each equal ten without, bit for bit."""
    with_them = row.start(g11.train, env=DETERMINISTIC, hand_offs=True, steps=STEPS)
    if not row.on_host:
        with_them.wait()  # one process on a GPU at a time
    without = row.start(g11.train, env=DETERMINISTIC, hand_offs=False, steps=STEPS)
    one, other = with_them.wait().expect(), without.wait().expect()
    row.judge(
        check("losses", other["losses"], one["losses"]),
        check("bits", other["hashes"], one["hashes"]),
        check("hand-offs that released memory", STEPS, sum(freed >= one["held"] for freed in one["released"])),
        check("training moved", STEPS, len(set(other["hashes"]))),
    )


@pytest.mark.torch
@pytest.mark.row("G12")
@seeded({"stale-cache": "logits", "weights-last": "wake"})
def test_an_engine_answers_the_same_after_a_wake(row: Row) -> None:
    """Greedy tokens and logits before a sleep, after the wake and in an engine that never slept are bitwise equal."""
    sleeper = row.start(g12.serve, env=DETERMINISTIC, sleeps=True)
    if not row.on_host:
        ended(sleeper)  # one process on a GPU at a time
    never = row.run(g12.serve, env=DETERMINISTIC, sleeps=False)
    how, slept = measured(sleeper)
    row.judge(
        check("wake", "ok", how),
        check("released", True, how == "ok" and slept["released"] >= slept["held"]),
        *(check(name, [never["first"][name]] * 2, _both(slept, name)) for name in ("tokens", "logits")),
        check("the engine that never slept", never["first"], never["second"]),
        check("tokens differ from each other", True, len(set(never["first"]["tokens"])) > 3),
    )


def _both(slept: dict[str, Any], name: str) -> list[Any]:
    """What an engine answered before its sleep and after its wake."""
    return [(slept[turn] or {}).get(name) for turn in ("first", "second")]

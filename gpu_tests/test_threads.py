"""Who allocates and who is still at work: threads, blocks outside of a region, kernels under way."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_tests.harness.checks import at_most, bytes_moved, check
from gpu_tests.harness.faults import seeded
from gpu_tests.harness.row import Row
from gpu_tests.scenarios import g20, g22, g24


@pytest.mark.row("G20")
@seeded({"region-in-the-main-thread-only": "gradients released"})
def test_gradients_of_another_thread_are_released(row: Row) -> None:
    """Gradients made where their thread entered the region, or made before the backward, are released to the byte."""
    seen = row.run(g20.backward)
    row.record("gradients that autograd allocated itself", seen["by autograd"])
    row.judge(
        bytes_moved("gradients released", seen["expected"], seen["released"]),
        bytes_moved("gradients taken", -seen["expected"], seen["taken"]),
    )


@pytest.mark.row("G22")
@seeded({"kept-after-the-block": "left after the block", "still-in-the-region": "released"})
def test_memory_of_a_disabled_block_is_ordinary(row: Row) -> None:
    """What a `disable()` block allocates is not released with the region around it, and is gone with the block."""
    ended, outcome = row.end(g22.disabled)
    seen: dict[str, Any] = g22.NOTHING
    if outcome and ended == "ok":
        seen = outcome.value
    row.judge(
        check("end", "ok", ended),
        bytes_moved("released", seen["expected"], seen["released"]),
        check("readable while the region is released", True, seen["readable"]),
        at_most("left after the block", 0 if row.on_host else row.calibrated("left of a disabled block"), seen["left"]),
    )


@pytest.mark.row("G24")
@seeded({"no-synchronise": "end"})
def test_a_release_waits_for_work_under_way(row: Row) -> None:
    """A release returns after the event behind the work that writes the buffer; the writing is whole after the wake."""
    ended, outcome = row.end(g24.release_under_work)
    seen = outcome.value if outcome and ended == "ok" else {}
    row.record("waited", seen.get("waited"))
    row.judge(
        check("end", "ok", ended),
        check("work done before the release returned", True, seen.get("done")),
        check("work under way when it began", True, seen.get("under way")),
        check("contents", seen.get("expected", "those of the finished work"), seen.get("contents")),
    )

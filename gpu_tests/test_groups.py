"""Process groups over hand-offs: destroyed before a release, rebuilt after the resume, right at once."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from gpu_tests.harness.checks import Check, check
from gpu_tests.harness.child import ended
from gpu_tests.harness.faults import seeded
from gpu_tests.harness.row import Row
from gpu_tests.scenarios import g14

DEADLINE = 180.0


@pytest.mark.torch
@pytest.mark.row("G14")
@seeded({"destroy-forgotten": "groups alive at a release", "rebuilt-before-the-resume": "released at a rebuild"})
def test_two_ranks_rebuild_their_group_five_times(row: Row) -> None:
    """No group lives while memory is released, none is built before it is back, and each computes right at once."""
    row.judge(*_judged(row, _ranks(row, 2, late=None)))


@pytest.mark.torch
@pytest.mark.row("G15")
@seeded({"one-rank-pauses-another-tag": "released by rank"})
def test_all_ranks_with_sub_groups_and_one_late(row: Row) -> None:
    """The same over every device of a node, with tensor and data sub-groups, one rank five seconds late in a round."""
    ranks = 4 if row.on_host else min(8, int(os.environ.get("COLOCERT_WORLD", "8")))
    seen = _ranks(row, ranks, late=1)
    freed = [one["freed"] for one in seen.values()] if all(isinstance(one, dict) for one in seen.values()) else seen
    expected = [one["expected"] for one in seen.values()] if isinstance(freed, list) else "one list a rank"
    row.judge(*_judged(row, seen), check("released by rank", expected, freed))


def _ranks(row: Row, count: int, late: int | None) -> dict[int, Any]:
    """What each rank saw, or how it ended. Each has a device of its own."""
    children = [
        row.start(
            g14.rank,
            machine=replace(row.machine, ledger=row.folder / f"ledger{rank}"),
            env={"LOCAL_RANK": str(rank)},
            deadline=DEADLINE,
            number=rank,
            count=count,
            folder=str(row.folder),
            late=late,
        )
        for rank in range(count)
    ]
    ends = [ended(child) for child in children]
    return {n: outcome.value if outcome and how == "ok" else how for n, (how, outcome) in enumerate(ends)}


def _judged(row: Row, seen: dict[int, Any]) -> list[Check]:
    whole = {n: one for n, one in seen.items() if isinstance(one, dict)}
    checks = [
        check("ends", "all ok", "all ok" if len(whole) == len(seen) else seen),
        check("groups alive at a release", 0, sum(sum(one["alive"]) for one in whole.values())),
        check("released at a rebuild", 0, sum(sum(one["released"]) for one in whole.values())),
        check("sums", {n: one["wanted"] for n, one in whole.items()}, {n: one["sums"] for n, one in whole.items()}),
        check("rounds", [g14.ROUNDS] * len(seen), [one["rounds"] for one in whole.values()]),
        check("contents", [True] * len(whole), [one["same"] for one in whole.values()]),
    ]
    row.record("free bytes without and with groups", {n: (one["down"], one["up"]) for n, one in whole.items()})
    if row.on_host:
        return checks
    # The first round settles NCCL and its communicator's memory; the others must be alike.
    for name in ("down", "up"):
        spread = max((max(one[name][1:]) - min(one[name][1:]) for one in whole.values()), default=-1)
        checks.append(
            check(f"spread of free bytes, groups {name}", 0, spread, tolerance=row.calibrated("spread of groups"))
        )
    returned = min(
        (d - u for one in whole.values() for d, u in zip(one["down"][1:], one["up"][1:], strict=True)), default=-1
    )
    checks.append(check("groups hold device bytes that a destroy returns", True, returned > 0))
    return checks

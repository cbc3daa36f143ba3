"""Two sides of one device: strict turns, and the peak of a wake."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from colocert.device import Child
from gpu_tests.harness.checks import Check, at_most, bytes_taken, check
from gpu_tests.harness.faults import seeded
from gpu_tests.harness.row import Row
from gpu_tests.scenarios import g19, g25

MIB = 1 << 20
TURNS = 10


@pytest.mark.row("G19")
@seeded({"wakes-before-the-ack": "never both resident"})
def test_two_processes_take_turns_and_are_never_both_resident(row: Row) -> None:
    """A trainer and an engine alternate ten times; a third process sees no more than the larger of them resident."""
    row.shaped(capacity=256 * MIB)
    sides: dict[str, Child] = {}
    nbytes: dict[str, int] = {}
    for role in ("trainer", "engine"):  # one after the other: a starting process counts the device's bytes
        sides[role] = row.start(g19.side, role=role, deadline=180)
        nbytes[role] = sides[role].listen()["nbytes"]
    watcher = row.start(g19.watch)
    watcher.listen()
    order = ["trainer", "engine"] * (TURNS // 2)
    _ask(sides[order[0]], "wake")
    for leaving, coming in itertools.pairwise(order):
        first, second = (leaving, "sleep"), (coming, "wake")
        if row.fault == "wakes-before-the-ack":
            first, second = second, first
        _ask(sides[first[0]], first[1])
        _ask(sides[second[0]], second[1])
    _ask(sides[order[-1]], "sleep")
    watcher.tell("stop")
    seen = watcher.wait().expect()
    resident = {role: _end(child)["resident"] for role, child in sides.items()}
    limit = max(nbytes.values()) + (0 if row.on_host else 64 * MIB)
    row.record("samples", seen["samples"])
    row.judge(
        _apart(resident),
        at_most("peak seen from outside", limit, seen["above"]),
        check("turns", TURNS, sum(len(spans) for spans in resident.values())),
    )


@pytest.mark.row("G25")
@seeded({"second-copy": "peak"})
def test_a_wake_needs_no_more_than_it_ends_with(row: Row) -> None:
    """While an engine with a host backup wakes, the device holds no more than at the wake's end."""
    seen = row.run(g25.wake)
    slack = 0 if row.on_host else seen["largest"] + 64 * MIB
    row.judge(
        bytes_taken("taken", seen["nbytes"], seen["taken"]),
        at_most("peak", seen["nbytes"] + slack, seen["peak"]),
        check("tokens", True, seen["same"]),
    )


def _apart(resident: dict[str, list[Any]]) -> Check:
    """No span of one side overlaps one of the other; on a machine the monotonic clock is the same for both."""
    overlaps = [
        (one, other)
        for one in resident["trainer"]
        for other in resident["engine"]
        if one[0] < other[1] and other[0] < one[1]
    ]
    return check("never both resident", [], overlaps)


def _ask(child: Child, call: str) -> Any:
    child.tell(call)
    return child.listen()


def _end(child: Child) -> Any:
    child.tell(None)
    return child.wait().expect()

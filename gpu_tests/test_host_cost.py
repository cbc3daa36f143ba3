"""What a backup costs the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpu_tests.harness.checks import Check, at_most, check
from gpu_tests.harness.faults import seeded
from gpu_tests.harness.row import Row
from gpu_tests.scenarios import g10

MIB = 1 << 20
KINDS = ("pinned", "mmap", "disk", "none")


@pytest.mark.row("G10")
@seeded({"sticky-taken-for-returned": "pinned: after the wake", "keeps-a-second-copy": "mmap: released"})
def test_a_backup_costs_the_host_what_it_holds(row: Row) -> None:
    """A pinned or mmap copy costs its payload while released and a wake returns it; disk costs a staging buffer."""
    row.shaped(capacity=256 * MIB)
    sticky = replace(row.machine, sticky_pinned=True)
    machines = dict.fromkeys(KINDS, row.machine)
    if row.fault == "sticky-taken-for-returned":
        machines["pinned"] = sticky
    elif row.on_host:  # the other model of a driver: one that keeps pinned pages
        machines["sticky"] = sticky
    seen = {kind: _cost(row, kind, machine) for kind, machine in machines.items()}
    for kind, one in seen.items():
        row.record(f"host cost of {kind}", one)
    pinned = "returned" if row.on_host else row.calibrated("pinned host memory after a wake")
    row.judge(
        *_held("pinned", seen["pinned"], pinned),
        *_held("mmap", seen["mmap"], "returned"),
        *(_held("sticky", seen["sticky"], "retained") if "sticky" in seen else ()),
        *_on_disk(seen["disk"]),
        at_most("none: released", seen["none"]["tolerance"], seen["none"]["paused"]["bytes"]),
        at_most("none: in the end", seen["none"]["tolerance"], seen["none"]["in the end"]["bytes"]),
    )


def _cost(row: Row, kind: str, machine: Any) -> dict[str, Any]:
    argument = {"none": False, "sticky": "pinned"}.get(kind, kind)
    child = row.start(
        g10.cost,
        machine=machine,
        env={"TMS_DISK_BACKUP_CHUNK_MB": str(g10.STAGING_MIB)},
        kind=argument,
        folder=str(row.folder / kind),
    )
    seen: dict[str, Any] = child.wait().expect()
    return seen


def _held(kind: str, seen: dict[str, Any], after: str | None) -> list[Check]:
    payload, tolerance = seen["payload"], seen["tolerance"]
    found = "returned" if seen["resumed"]["bytes"] <= 8 * MIB else "retained"
    end = "returned" if seen["in the end"]["bytes"] <= 8 * MIB else "retained"
    checks = [
        check(f"{kind}: released", payload, seen["paused"]["bytes"], tolerance),
        check(f"{kind}: after {g10.CYCLES} cycles as after one", found, end),
    ]
    if after is not None:
        checks.append(check(f"{kind}: after the wake", after, found))
    if found == "returned":
        checks.append(check(f"{kind}: released again", payload, seen["later"]["bytes"], tolerance))
    return checks


def _on_disk(seen: dict[str, Any]) -> list[Check]:
    staging, tolerance = g10.STAGING_MIB * MIB, seen["tolerance"]
    return [
        check("disk: host memory while released", staging, seen["paused"]["bytes"], tolerance),
        check("disk: host memory in the end", staging, seen["in the end"]["bytes"], tolerance),
        check("disk: bytes in files", seen["payload"], seen["files"]),
        check("disk: bytes in files later", seen["files"], seen["files later"]),
    ]

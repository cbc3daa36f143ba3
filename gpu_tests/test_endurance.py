"""What many hand-offs leave behind."""

from __future__ import annotations

import pytest

from gpu_tests.harness.checks import at_most, check
from gpu_tests.harness.faults import seeded
from gpu_tests.harness.row import Row
from gpu_tests.scenarios import g17

MIB = 1 << 20


@pytest.mark.row("G17")
@seeded({"file-not-unlinked": "files", "handle-not-released": "free bytes", "descriptor-not-closed": "descriptors"})
def test_a_hundred_hand_offs_leave_nothing_behind(row: Row) -> None:
    """After a hundred hand-offs free bytes, host memory, descriptors, mappings and files are where they were at 20."""
    row.shaped(capacity=512 * MIB)
    seen = row.run(
        g17.cycles, env={"TMS_DISK_BACKUP_CHUNK_MB": "1"}, deadline=180, folder=str(row.folder / "disk"), count=100
    )
    drift = seen["drift"]
    row.record("drift", drift)
    row.record("span", seen["span"])
    row.judge(
        check("free bytes", 0, drift["free"], 0 if row.on_host else 2 * MIB),
        at_most("host memory", 8 * MIB, drift["host"]),
        check("descriptors", 0, drift["descriptors"]),
        check("mappings", 0, drift["mappings"]),
        check("files", 0, drift["files"]),
        check("contents", True, seen["same"]),
    )

"""What a release does to contents: kept bit for bit with a backup, lost and known to be lost without one."""

from __future__ import annotations

import pytest

from gpu_tests.harness.checks import check
from gpu_tests.harness.faults import seeded
from gpu_tests.harness.row import Row
from gpu_tests.scenarios import g05, g06

MIB = 1 << 20


@pytest.mark.row("G05")
@seeded({"rounds-down": "pinned", "copies-too-early": "mmap"})
def test_a_backup_keeps_every_bit(row: Row) -> None:
    """Bytes of every type's awkward values, in odd sizes, are the same after three cycles in pinned, mmap and disk."""
    cycles = 3
    chunk = {"TMS_DISK_BACKUP_CHUNK_MB": "1"}  # so that a block takes several chunks
    seen = row.run(g05.contents, env=chunk, folder=str(row.folder / "disk"), cycles=cycles)
    row.judge(*(check(kind, [True] * cycles, seen[kind]) for kind in g05.KINDS))


@pytest.mark.row("G06")
@seeded({"no-refill": "first read"})
def test_contents_without_a_backup_are_refilled_before_they_are_read(row: Row) -> None:
    """Weights without a backup hold a sentinel after a wake; an early read is caught, the first real one is right."""
    row.shaped(capacity=160 * MIB)
    seen = row.run(g06.cycle)
    row.judge(
        check("a neighbour had the freed memory", True, seen["neighbour"]),
        check("sentinel after the wake", seen["sentinel"], seen["after_wake"]),
        check("early read", "caught", seen["early"]),
        check("first read", seen["expected"], seen["first_read"]),
    )

"""What a release gives back and a resume takes: bytes, tags, addresses."""

from __future__ import annotations

import pytest

from gpu_tests.harness.checks import bytes_moved, check
from gpu_tests.harness.faults import seeded
from gpu_tests.harness.row import Row
from gpu_tests.scenarios import g02

MIB = 1 << 20


@pytest.mark.row("G02")
@seeded({"pauses-one-tag": "released", "unrounded": "raw blocks end"})
def test_release_returns_every_byte(row: Row) -> None:
    """Releasing an engine frees all bytes of both tags and a wake takes them again; raw blocks free whole granules."""
    seen = row.run(g02.engine)
    ended, outcome = row.end(g02.raw)
    raw = outcome.value if outcome and ended == "ok" else {"freed": None, "same": None}
    row.record("release lag", seen["released"]["lag"])
    row.record("own bytes", "absent" if seen["released"]["own"] is None else "present")
    row.judge(
        bytes_moved("released", seen["expected"], seen["released"]),
        bytes_moved("taken", -seen["expected"], seen["taken"]),
        check("contents", True, seen["same"]),
        check("raw blocks end", "ok", ended),
        check("raw blocks freed", [2 * MIB, 2 * MIB, 2 * MIB, 4 * MIB, 102 * MIB], raw["freed"]),
        check("raw contents", [True] * len(g02.RAW), raw["same"]),
    )

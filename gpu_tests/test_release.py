"""What a release gives back and a resume takes: bytes, tags, addresses."""

from __future__ import annotations

import pytest

from gpu_tests.harness.checks import bytes_moved, bytes_taken, check
from gpu_tests.harness.child import last_lines, measured
from gpu_tests.harness.faults import seeded
from gpu_tests.harness.row import Row
from gpu_tests.scenarios import g02, g03

MIB = 1 << 20


@pytest.mark.row("G02")
@seeded({"pauses-one-tag": "released", "unrounded": "raw blocks end"})
def test_release_returns_every_byte(row: Row) -> None:
    """Releasing an engine frees all bytes of both tags and a wake takes them again; raw blocks free whole granules."""
    how, seen = measured(row.start(g02.engine))
    blocks = row.start(g02.raw)
    ended, raw = measured(blocks)
    if seen["released"]:
        row.record("release lag", seen["released"]["lag"])
        row.record("own bytes", "absent" if seen["released"]["own"] is None else "present")
    row.record("last words", last_lines(blocks.wait()))
    row.judge(
        check("engine end", "ok", how),
        bytes_moved("released", seen["expected"], seen["released"]),
        bytes_taken("taken", seen["expected"], seen["taken"]),
        check("contents", True, seen["same"]),
        check("raw blocks end", "ok", ended),
        check("raw blocks freed", [2 * MIB, 2 * MIB, 2 * MIB, 4 * MIB, 102 * MIB], raw["freed"]),
        check("raw contents", [True] * len(g02.RAW), raw["same"]),
    )


@pytest.mark.row("G03")
@seeded({"grads-under-default": "released"})
def test_gradients_are_released_alone(row: Row) -> None:
    """Releasing `grad_buffer` frees exactly its bytes while weights and optimizer state stay readable and equal."""
    seen = row.run(g03.gradients_alone)
    row.record("release lag", seen["released"]["lag"])
    row.judge(
        bytes_moved("released", seen["expected"], seen["released"]),
        bytes_taken("taken", seen["expected"], seen["taken"]),
        check("readable while released", seen["before"], seen["during"]),
        check("contents after", seen["before"], seen["after"]),
    )


@pytest.mark.row("G04")
@seeded({"reallocates-on-wake": "addresses"})
def test_addresses_hold_over_hand_offs(row: Row) -> None:
    """Weights, optimizer state and gradients are at the addresses of the start after each of three hand-offs."""
    seen = row.run(g03.addresses, cycles=3)
    row.judge(
        check("addresses", [seen["tables"][0]] * 4, seen["tables"]),
        check("contents", [seen["contents"][0]] * 4, seen["contents"]),
    )

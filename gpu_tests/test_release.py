"""What a release gives back and a resume takes: bytes, tags, addresses."""

from __future__ import annotations

from typing import Any

import pytest

from colocert.device.hook import GRANULE
from gpu_tests.harness.checks import Check, bytes_moved, bytes_taken, check
from gpu_tests.harness.child import last_lines, measured
from gpu_tests.harness.faults import seeded
from gpu_tests.harness.row import Row
from gpu_tests.scenarios import g02, g03


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
    freed = raw["freed"] or [None] * len(g02.RAW)
    sizes = [(n, _whole(n) * count) for n, count in zip(g02.RAW, raw["counts"] or [1] * len(g02.RAW), strict=True)]
    row.judge(
        check("engine end", "ok", how),
        bytes_moved("released", seen["expected"], seen["released"]),
        bytes_taken("taken", seen["expected"], seen["taken"]),
        check("the allocator's own count", 0, (seen["released"] or {}).get("allocator")),
        check("contents", True, seen["same"]),
        check("raw blocks end", "ok", ended),
        *(bytes_moved(f"raw block of {n}", whole, moved) for (n, whole), moved in zip(sizes, freed, strict=True)),
        *_granules(row, freed),
        check("raw contents", [True] * len(g02.RAW), raw["same"]),
    )


def _whole(nbytes: int) -> int:
    return -(-nbytes // GRANULE) * GRANULE


def _granules(row: Row, freed: list[Any]) -> list[Check]:
    """On `host` to the byte; a GPU's free bytes hold the driver's own, and the tolerance is less than what is freed."""
    rests = [_rest(moved) for moved in freed]
    row.record("bytes of raw blocks beside whole granules", rests)
    return [check("raw blocks are whole granules", [0] * len(rests), rests)] if row.on_host else []


def _rest(moved: dict[str, Any] | None) -> int | None:
    """What is left over of whole granules; None where nothing was measured."""
    return moved["bytes"] % GRANULE if moved and moved["bytes"] is not None else None


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

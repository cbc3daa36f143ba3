"""G02: an engine of two tags is released and taken again; raw blocks around a granule's size."""

from __future__ import annotations

import os
from typing import Any

from colocert.device.hook import GRANULE
from gpu_tests.harness.port import Port

MIB = 1 << 20
RAW = (6_912, GRANULE - 1, GRANULE, GRANULE + 1, 100 * MIB + 5)
SMALL, COPIES = 3 * GRANULE, {"host": 1, "cuda": 32}
"""On a GPU so many of each small block at once, that their bytes are more than what page tables may blur."""


def engine(port: Port, fault: str | None) -> dict[str, Any]:
    """Weights and cache out and in again."""
    port.settle()
    blocks = [port.alloc("weights", n * port.unit, backup=True, fill=n) for n in (7, 3, 1)]
    blocks += [port.alloc("kv_cache", 8 * port.unit + 6_912)]
    before = [port.device.checksum(block) for block in blocks[:3]]

    def each(call: Any) -> None:
        call("kv_cache")
        if fault != "pauses-one-tag":
            call("weights")

    released = port.moved(lambda: each(port.pause))
    taken = port.moved(lambda: each(port.resume))
    return {
        "expected": port.device.footprint(*blocks),
        "released": released,
        "taken": taken,
        "same": before == [port.device.checksum(block) for block in blocks[:3]],
    }


def raw(port: Port, fault: str | None) -> dict[str, Any]:
    """What a pause of each raw block freed, of how many, and their contents after."""
    if fault == "unrounded":
        _ask_for_what_is_needed(port)
    port.settle()
    freed, same, counts = [], [], []
    for nbytes in RAW:
        copies = COPIES[port.device.name] if nbytes < SMALL else 1
        blocks = [port.alloc_raw("raw", nbytes, backup=True, fill=0x5A) for _ in range(copies)]
        before = [port.device.checksum(block) for block in blocks]
        freed.append(port.moved(lambda: port.pause("raw")))
        port.resume("raw")
        same.append([port.device.checksum(block) for block in blocks] == before)
        counts.append(copies)
        for block in blocks:
            port.free(block)
    return {"freed": freed, "same": same, "counts": counts}


def _ask_for_what_is_needed(port: Port) -> None:
    """The hook of 0.0.9: physical memory of exactly the bytes asked for, and an end of the process where refused."""
    malloc = port.device.hook.malloc

    def unrounded(nbytes: int) -> int:
        if nbytes % GRANULE:
            print("cuMemCreate: invalid argument", flush=True)
            os._exit(1)
        return malloc(nbytes)

    port.device.hook.malloc = unrounded  # type: ignore[method-assign]

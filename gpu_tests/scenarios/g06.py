"""G06: weights without a backup are lost by a release, and are refilled before anything reads them."""

from __future__ import annotations

import hashlib
import time
from typing import Any

from gpu_tests.harness.port import Port

SENTINEL = 0xDB
TAG = "weights"
UNITS, LEFT = 32, 16
PATIENCE = 10.0
CACHE = {"host": 8, "cuda": 256}
"""Units that go with the weights, so that what is freed is more than a neighbour's context and what it leaves."""


class ReadBeforeRefill(RuntimeError):
    """Weights were read after a wake and before they were loaded again."""


class DeepSleeper:
    """An engine whose weights have no backup. In debug mode a wake fills them with a sentinel and watches reads."""

    def __init__(self, port: Port, source: bytes) -> None:
        self.port, self.source = port, source
        self.block = port.alloc(TAG, len(source))
        self.cache = port.alloc(TAG, CACHE[port.device.name] * port.unit)
        self.stale = False
        self.refill()

    def refill(self) -> None:
        self.port.device.write(self.block, self.source)
        self.stale = False

    def sleep(self) -> None:
        self.port.pause(TAG)
        self.stale = True

    def wake(self) -> None:
        self.port.resume(TAG)
        if self.port.device.name != "host":  # the stand-in's new memory is the sentinel already
            self.port.device.fill(self.block, SENTINEL)

    def forward(self) -> str:
        """The first read after a wake."""
        if self.stale:
            raise ReadBeforeRefill(f"weights must be loaded before they are read (got {self.raw()[:8]}...)")
        return self.raw()

    def raw(self) -> str:
        return self.port.device.checksum(self.block)


def cycle(port: Port, fault: str | None) -> dict[str, Any]:
    """A deep sleep with a neighbour in the freed memory, the wake, an early read, the refill, the first real read."""
    source = bytes(range(251)) * (UNITS * port.unit // 251 + 1)
    engine = DeepSleeper(port, source[: UNITS * port.unit])
    expected = engine.forward()
    rest = port.device.free_bytes()
    engine.sleep()
    asleep = port.device.free_bytes()
    with port.device.spawn("gpu_tests.scenarios.g06:neighbour", leave=LEFT * port.unit) as other:
        neighbour = other.wait().expect()
    _until_free(port, asleep)
    engine.wake()
    after_wake = engine.raw()
    try:
        engine.forward()
        early = "read"
    except ReadBeforeRefill:
        early = "caught"
    if fault == "no-refill":
        engine.stale = False
    else:
        engine.refill()
    return {
        "neighbour": neighbour > rest,  # so that part of it lies in what the release freed
        "sentinel": hashlib.sha256(bytes([SENTINEL]) * len(engine.source)).hexdigest(),
        "after_wake": after_wake,
        "early": early,
        "expected": expected,
        "first_read": engine.forward(),
    }


def _until_free(port: Port, nbytes: int) -> None:
    """Waits for what the neighbour had; a wake that comes too early would end this process."""
    until = time.monotonic() + PATIENCE
    while port.device.free_bytes() < nbytes - port.tolerance([]) and time.monotonic() < until:
        time.sleep(0.01)


def neighbour(stage: Any, leave: int) -> int:
    """Takes what is free, writes a pattern over it and goes: how many bytes that were."""
    granule: int = stage.device.granule
    nbytes: int = (stage.device.free_bytes() - leave) // granule * granule
    stage.device.alloc_raw(None, False, nbytes, fill=0x77)
    return nbytes

"""A row's view of the device, inside a child: sizes by a unit, tolerances by the device, three instruments.

    free      the device's free bytes, whoever holds the rest
    own       this process's bytes: the stand-in's ledger, or NVML where it shows processes (else absent)
    ledger    our own account: every block that this port made and has not released, rounded to granules of 2 MiB

What an operation moved is what two of the three say. On `host` the tolerance is 0. On a GPU it is one granule a segment
and what the driver's page tables take, 8 MiB until that is calibrated; raw blocks are whole granules. A figure that
comes late is waited for, 2 s at most, and the lag recorded.

Knows bytes. Does not know what a block means to a trainer or an engine.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from colocert.device.hook import GRANULE, Backup
from colocert.device.ports import Block, Device, Stage
from gpu_tests import calibrate

UNIT = {"host": 1 << 20, "cuda": 32 << 20}
PATIENCE = 2.0


@dataclass(frozen=True)
class Reading:
    """The three instruments at one moment. `own` is None where it is absent."""

    free: int
    own: int | None
    ledger: int


class Port:
    """One child's device. Everything that a row allocates goes through it, so that the ledger is whole."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.device: Device = stage.device
        self.unit = UNIT[self.device.name]
        self.blocks: list[Block] = []
        self._released: set[Block] = set()

    def alloc(self, tag: str | None, nbytes: int, backup: bool | Backup = False, fill: int | None = None) -> Block:
        """New memory, from the device's allocator."""
        return self._added(self.device.alloc(tag, backup, nbytes, fill))

    def alloc_raw(self, tag: str | None, nbytes: int, backup: bool | Backup = False, fill: int | None = None) -> Block:
        """New memory by a cudaMalloc of its own."""
        return self._added(self.device.alloc_raw(tag, backup, nbytes, fill))

    def adopt(self, tag: str, tensor: Any) -> Block:
        """A torch tensor that the row made itself, for the ledger."""
        on_gpu = tensor if self.device.name == "cuda" else None
        return self._added(Block(tag, False, tensor.untyped_storage().nbytes(), tensor.data_ptr(), on_gpu))

    def free(self, block: Block) -> None:
        self.device.free(block)
        self.blocks.remove(block)
        self._released.discard(block)

    def pause(self, tag: str | None = None) -> None:
        self.device.pause(tag)
        self._released.update(self._tagged(tag))

    def resume(self, tag: str | None = None) -> None:
        self.device.resume(tag)
        self._released.difference_update(self._tagged(tag))

    def read(self) -> Reading:
        """All three instruments now."""
        resident = [block for block in self.blocks if block not in self._released]
        return Reading(self.device.free_bytes(), self.device.own_bytes(), self.device.footprint(*resident))

    def moved(self, act: Callable[[], object]) -> dict[str, Any]:
        """What `act` freed by each instrument; negative where it took. `bytes` is what two of them agree on."""
        before, released, allocator = self.read(), set(self._released), self._allocator()
        act()
        tolerance = self.tolerance(released ^ self._released)
        begun = time.monotonic()
        while True:
            now = self.read()
            free, ledger = now.free - before.free, before.ledger - now.ledger
            lag = time.monotonic() - begun
            if abs(free - ledger) <= tolerance or lag > PATIENCE:
                break
            time.sleep(0.005)
        own = before.own - now.own if before.own is not None and now.own is not None else None
        nbytes = agreed(free, own, ledger, tolerance)
        moved = {"free": free, "own": own, "ledger": ledger, "bytes": nbytes, "tolerance": tolerance, "lag": lag}
        return {**moved, "allocator": self._allocator() - allocator}

    def tolerance(self, blocks: Iterable[Block]) -> int:
        """By how much the bytes of these blocks may be off."""
        if self.device.name == "host":
            return 0
        segments = sum(block.tensor is not None for block in blocks)  # a raw block is whole granules
        return int(calibrate.value_or_default("page tables")) + GRANULE * segments

    def settle(self) -> None:
        """One cycle before anything is measured, so that what a first use costs is paid."""
        block = self.alloc("colocert.settle", self.unit)
        self.pause("colocert.settle")
        self.resume("colocert.settle")
        self.free(block)
        gc.collect()

    def tell(self, message: Any) -> None:
        """Sends the row a JSON value."""
        self.stage.tell(message)

    def listen(self, timeout: float = 60.0) -> Any:
        """The row's next message."""
        return self.stage.listen(timeout)

    def _allocator(self) -> int:
        """What torch's allocator believes to be in use. A release does not change it: it is no evidence of one."""
        return int(sys.modules["torch"].cuda.memory_allocated()) if self.device.name == "cuda" else 0

    def _added(self, block: Block) -> Block:
        self.blocks.append(block)
        return block

    def _tagged(self, tag: str | None) -> list[Block]:
        return [block for block in self.blocks if block.tag is not None and tag in (None, block.tag)]


def agreed(free: int, own: int | None, ledger: int, tolerance: int) -> int | None:
    """What two instruments say, the device's own first; None where no two do."""
    pairs = ((free, own), (free, ledger), (own, ledger))
    for one, other in pairs:
        if one is not None and other is not None and abs(one - other) <= tolerance:
            return one
    return None

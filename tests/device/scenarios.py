"""Bodies of child processes for the tests of this folder. Each takes a stage and returns what it saw."""

from __future__ import annotations

import os
import time
from typing import Any

from colocert.device.ports import Stage

MIB = 1 << 20


def nothing(stage: Stage) -> str:
    return "here"


def raises(stage: Stage) -> None:
    raise KeyError("not there")


def exits(stage: Stage, code: int) -> None:
    os._exit(code)


def hangs(stage: Stage) -> None:
    time.sleep(3600)


def round_trip(stage: Stage, nbytes: int, backup: bool) -> dict[str, Any]:
    device = stage.device
    block = device.alloc("default", backup, nbytes, fill=0x5A)
    before, free, own = device.checksum(block), device.free_bytes(), device.own_bytes()
    device.pause("default")
    freed, own_paused = device.free_bytes() - free, device.own_bytes()
    device.resume("default")
    return {
        "freed": freed,
        "own": [own, own_paused, device.own_bytes()],
        "same": device.checksum(block) == before,
        "poisoned": device.checksum(block) == device.checksum(device.alloc(None, False, nbytes, fill=0xDB)),
    }


def touches_paused(stage: Stage) -> None:
    block = stage.device.alloc("default", True, MIB)
    stage.device.pause("default")
    stage.tell("paused")
    stage.device.touch(block)


def pauses_twice(stage: Stage) -> None:
    stage.device.alloc("default", True, MIB)
    stage.device.pause("default")
    stage.device.pause("default")

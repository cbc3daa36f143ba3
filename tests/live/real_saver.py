"""Bodies of child processes: the real `torch_memory_saver` recorded over the stand-in device."""

from __future__ import annotations

from typing import Any

import colocert
from colocert.device.ports import HostDevice, Stage

MIB = 1 << 20


def _recorded(stage: Stage, folder: str, **more: Any) -> tuple[Any, Any, HostDevice]:
    from torch_memory_saver import torch_memory_saver as saver

    device = stage.device
    assert isinstance(device, HostDevice)
    recording = colocert.record(  # type: ignore[operator]
        folder, rank=0, from_start=True, device_bytes=lambda: (device.free_bytes(), 1 << 30), host_bytes=True
    )
    for tag, backup in (("default", True), ("grad_buffer", False)):
        device.alloc(tag, backup, 8 * MIB, fill=7)
    recording.saver(saver, regions={"default": True, "grad_buffer": False}, **more)
    return recording, saver, device


def two_cycles(stage: Stage, folder: str) -> dict[str, Any]:
    recording, saver, device = _recorded(stage, folder)
    plain = type(saver).pause
    frees = []
    for _ in range(2):
        free = device.free_bytes()
        saver.pause("grad_buffer")
        saver.pause("default")
        frees.append(device.free_bytes() - free)
        saver.resume("default")
        saver.resume("grad_buffer")
    recording.close()
    return {"frees": frees, "problem": recording.problem, "undone": saver.pause.__func__ is plain}


def pauses_twice(stage: Stage, folder: str) -> None:
    _, saver, _ = _recorded(stage, folder)
    saver.pause("default")
    saver.pause("default")


def tagless_after_partial(stage: Stage, folder: str) -> None:
    _, saver, _ = _recorded(stage, folder)
    saver.pause("grad_buffer")
    saver.pause()

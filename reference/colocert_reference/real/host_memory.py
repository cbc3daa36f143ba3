"""Managed memory on the stand-in device: the one module of `real/` that imports the kit.

Knows how colocert places torch's tensors in memory from the hooked `cudaMalloc`, how to ask the stand-in for bytes, and
how to start a process under the saver. Does not know the lifecycle. On a GPU nothing but the start is taken from here:
torch's own allocator does there what the placement does here.
"""

from __future__ import annotations

import contextlib
from typing import Any

from colocert.device import Machine, run, tensors
from colocert.device.hook import Hook
from colocert.device.machine import find_preload


class HostMemory:
    """`memory.ManagedMemory` on `host`. Every tensor takes whole granules of 2 MiB of its own."""

    device = "cpu"

    def __init__(self) -> None:
        self.saver = tensors.start("host")
        self._hook = Hook(find_preload())

    def region(self, tag: str, *, backup: bool) -> contextlib.AbstractContextManager[None]:
        return tensors.region(self.saver, tag, backup)

    def pause(self, tag: str) -> int:
        """Counts by the ledger of this process, so that what others do meanwhile does not show."""
        held = self._hook.standin("own_bytes")
        self.saver.pause(tag)
        return held - self._hook.standin("own_bytes")

    def resume(self, tag: str) -> None:
        self.saver.resume(tag)

    def free_bytes(self) -> int:
        return self._hook.free_bytes()

    def host_bytes(self) -> int:
        return self._hook.standin("pinned_bytes")

    def give_up_cache(self) -> None:
        """Nothing is cached here: a tensor's memory goes with the last reference to it."""

    def library(self) -> Any:
        return self._hook.saver


def in_child(body: str, device: str) -> Any:
    """What `body`, "module:function", returns in a process of its own under the saver's preload library."""
    return run(body, machine=Machine(device="cuda" if device == "cuda" else "host"), deadline=300).expect("ok")

"""What `--calibrate` measures inside a child. The parts for `cuda` have not run on a GPU."""

from __future__ import annotations

import ctypes
import time
from functools import partial
from typing import Any

from gpu_tests.harness.host_cost import HostCost
from gpu_tests.harness.port import Port

GIB = {"host": 32, "cuda": 32}
"""Units of the block whose release is measured: 1 GiB on a GPU."""
PINNED = {"host": 64 << 20, "cuda": 64 << 30}


def release(port: Port, fault: str | None) -> dict[str, Any]:
    """What a release of a GiB (host: 32 MiB), and one with a backup, is off by, how late, and whether NVML shows us."""
    port.settle()
    moved = []
    for tag, backup in (("default", False), ("backed up", True)):  # a pinned copy has page tables of its own
        port.alloc(tag, GIB[port.device.name] * port.unit, backup)
        moved += [port.moved(partial(port.pause, tag)), port.moved(partial(port.resume, tag))]
    return {
        "bytes": max(abs(one["ledger"] - one["free"]) for one in moved),
        "of": moved[0]["ledger"],
        "lag": max(one["lag"] for one in moved),
        "own bytes visible": moved[0]["own"] is not None,
    }


def context(port: Port, fault: str | None) -> dict[str, Any]:
    """Bytes that a process with a context and nothing else takes of an otherwise empty device."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    port.device.hook.runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    return {"bytes": total.value - free.value, "total": total.value}


def pinned(port: Port, fault: str | None) -> dict[str, Any]:
    """Whether the host pages of a pinned backup go back with the resume."""
    nbytes = 16 * port.unit
    port.settle()
    port.alloc("default", nbytes, backup="pinned", fill=1)
    before, name = HostCost.now(), port.device.name
    port.pause("default")
    paused = HostCost.now().since(before, name)["bytes"]
    port.resume("default")
    after = HostCost.now().since(before, name)["bytes"]
    return {
        "payload": nbytes,
        "while released": paused,
        "after": after,
        "class": "retained" if after > nbytes // 2 else "returned",
    }


def pinning(port: Port, fault: str | None) -> dict[str, Any]:
    """Seconds to pin 64 GiB, or half of what the machine has free; 64 MiB on `host`."""
    runtime = port.device.hook.runtime
    runtime.cudaMallocHost.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]
    runtime.cudaFreeHost.argtypes = [ctypes.c_void_p]
    nbytes = min(PINNED[port.device.name], HostCost.now().available // 2 or 1 << 30)
    address = ctypes.c_void_p()
    begun = time.monotonic()
    status = runtime.cudaMallocHost(ctypes.byref(address), nbytes)
    seconds = time.monotonic() - begun
    assert not status, f"cudaMallocHost of {nbytes} bytes returned {status}"
    runtime.cudaFreeHost(address)
    return {"bytes": nbytes, "seconds": seconds}


def touch(port: Port, fault: str | None) -> None:
    """Touches released memory."""
    port.settle()
    block = port.alloc("default", port.unit, fill=1)
    port.pause("default")
    port.device.touch(block)


def segments(port: Port, fault: str | None) -> dict[str, Any]:
    """Whether the caching allocator's segments are whole granules. Needs a GPU."""
    import torch

    for units in (1, 3, 8):
        port.alloc("default", units * port.unit + 6_912)
    sizes = [segment["total_size"] for segment in torch.cuda.memory_snapshot()]
    return {"count": len(sizes), "whole granules": all(size % port.device.granule == 0 for size in sizes)}


def ipc_refusal(port: Port, fault: str | None) -> str:
    """What torch says of a handle for region memory. Needs a GPU."""
    from gpu_tests.scenarios.g16 import CudaIpc

    return CudaIpc(port).refusal(port.alloc("default", port.unit))

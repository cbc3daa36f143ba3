"""G21: whole-process mode, in which the hook takes every allocation and a tag is fixed when the allocator asks for a
segment. A block that is freed and handed out again under another tag keeps the first (torch_memory_saver #85).

Needs the caching allocator, so a GPU; it has not run on one.
"""

from __future__ import annotations

import gc
import importlib.metadata
from typing import Any

from gpu_tests.harness.port import Port

UNITS = 8
KNOWN = {"0.0.10": "mixed"}
"""What is known of a version. A version that keeps tags apart is not listed, and the finding is then to be struck."""


def reuse(port: Port, fault: str | None) -> dict[str, Any]:
    """One block under `weights`, freed; one of the same size under `kv_cache`; then a release of `weights` alone."""
    import torch

    saver = port.device.hook.saver
    nbytes = UNITS * port.unit
    hooked = bool(saver.tms_get_interesting_region())
    first = _tensor(torch, saver, b"weights", nbytes)
    address = first.data_ptr()
    del first
    gc.collect()
    second = _tensor(torch, saver, b"kv_cache", nbytes)
    second.fill_(0x5A)
    torch.cuda.synchronize()
    held = port.device.free_bytes()
    port.device.pause("weights")
    freed = port.device.free_bytes() - held
    port.device.resume("weights")
    kept = bool((second == 0x5A).all().item())
    return {
        "version": importlib.metadata.version("torch_memory_saver"),
        "hooked": hooked,
        "reused": second.data_ptr() == address,
        "released with the other tag": freed,
        "contents kept": kept,
        "tags": "mixed" if freed >= nbytes and second.data_ptr() == address else "apart",
        "segments": _segments(torch, address),
    }


def _tensor(torch: Any, saver: Any, tag: bytes, nbytes: int) -> Any:
    saver.tms_set_current_tag(tag)
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


def _segments(torch: Any, address: int) -> list[int]:
    """The sizes of the segments that hold the address: one, where both blocks were cut from it."""
    return [
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["address"] <= address < segment["address"] + segment["total_size"]
    ]

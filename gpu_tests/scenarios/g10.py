"""G10: what a backup costs the host while the region is released, after the wake, and after more cycles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from colocert.device.hook import Backup
from gpu_tests.harness.host_cost import HostCost
from gpu_tests.harness.port import Port

MIB = 1 << 20
STAGING_MIB = 8
CYCLES = 3


def cost(port: Port, fault: str | None, kind: Backup | bool, folder: str) -> dict[str, Any]:
    """Growth of the host's counters since before the first release, at three moments."""
    port.device.hook.set_disk_folder(Path(folder))
    port.settle()
    _settle_copies(port)
    nbytes = _payload(port) // 2
    for value in (1, 2):
        port.alloc_raw("default", nbytes, kind, fill=value)
    name, start = port.device.name, HostCost.now()
    seen: dict[str, Any] = {"payload": 2 * nbytes, "tolerance": max(4 * MIB, 2 * 64 * 1024)}
    second: list[bytes] = []
    for cycle in range(CYCLES):
        if fault == "keeps-a-second-copy" and kind == "mmap":
            second = [port.device.read(block) for block in port.blocks]
        port.pause("default")
        paused = HostCost.now().since(start, name)
        files = _files(folder)
        port.resume("default")
        resumed = HostCost.now().since(start, name)
        if cycle == 0:
            seen |= {"paused": paused, "resumed": resumed, "files": files}
    seen |= {"later": paused, "in the end": resumed, "files later": files, "held": len(second)}
    return seen


def _settle_copies(port: Port) -> None:
    """Pays on a GPU for what the driver sets up at the first copy to pageable memory."""
    if port.device.name == "cuda":
        block = port.alloc_raw("colocert.settle copies", port.unit, "mmap", fill=1)
        port.pause("colocert.settle copies")
        port.resume("colocert.settle copies")
        port.free(block)


def _payload(port: Port) -> int:
    """A size that the host bears: never by the GPU's memory."""
    granule = port.device.granule
    room = HostCost.now().available // 10
    return int(min(32 * port.unit, room) // (2 * granule)) * 2 * granule


def _files(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())

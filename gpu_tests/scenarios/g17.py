"""G17: a hundred hand-offs, and what they leave behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from colocert.device.hook import Backup
from gpu_tests.harness.host_cost import HostCost
from gpu_tests.harness.port import Port

SETTLED = 20


def cycles(port: Port, fault: str | None, folder: str, count: int) -> dict[str, Any]:
    """Free bytes, host memory, descriptors, mappings and files after each hand-off: at the 20th and how they drift."""
    home = Path(folder)
    port.device.hook.set_disk_folder(home)
    kinds: tuple[Backup, ...] = ("pinned", "mmap", "disk")
    blocks = [port.alloc_raw(kind, 2 * port.unit + 5, kind, fill=n) for n, kind in enumerate(kinds)]
    before = [port.device.checksum(block) for block in blocks]
    seen: list[dict[str, int]] = []
    for cycle in range(count):
        for kind in kinds:
            port.pause(kind)
        passing = port.alloc_raw("passing", port.unit, "disk", fill=9)  # the other side's memory, in the meantime
        port.pause("passing")
        port.free(passing)
        for kind in kinds:
            port.resume(kind)
        _leave_something(port, fault, home, cycle)
        seen.append(_counts(port, home))
    return {
        "drift": {name: seen[-1][name] - seen[SETTLED][name] for name in seen[0]},
        "span": {name: _span([one[name] for one in seen[SETTLED:]]) for name in seen[0]},
        "same": before == [port.device.checksum(block) for block in blocks],
    }


def _counts(port: Port, home: Path) -> dict[str, int]:
    host = HostCost.now()
    return {
        "free": port.device.free_bytes(),
        "host": host.counters["RssAnon"],
        "descriptors": host.descriptors,
        "mappings": host.mappings,
        "files": sum(1 for _ in home.iterdir()),
    }


def _span(values: list[int]) -> int:
    return max(values) - min(values)


def _leave_something(port: Port, fault: str | None, home: Path, cycle: int) -> None:
    if fault == "file-not-unlinked":
        (home / f"backup-{cycle}").write_bytes(b"left behind")
    elif fault == "handle-not-released":
        port.device.hook.malloc(port.device.granule)
    elif fault == "descriptor-not-closed":
        os.open("/dev/null", os.O_RDONLY)

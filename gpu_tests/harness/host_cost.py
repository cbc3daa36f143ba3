"""What this process costs the host, by the kernel's counters.

Device memory of the stand-in is shared memory of the process and is left out there. On a GPU the counter that pinned
memory shows in differs between drivers, so that the largest growth counts; all are recorded. MemAvailable is recorded
and never asserted: it moves by itself, and on Grace without CDMM it holds the GPU's memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KIB = 1 << 10
COUNTERS = ("RssAnon", "RssFile", "RssShmem", "VmLck", "VmPin")


@dataclass(frozen=True)
class HostCost:
    """The counters at one moment, in bytes."""

    counters: dict[str, int]
    available: int
    mappings: int
    descriptors: int

    @classmethod
    def now(cls) -> HostCost:
        return cls(
            counters={name: _kib(Path("/proc/self/status"), name) for name in COUNTERS},
            available=_kib(Path("/proc/meminfo"), "MemAvailable"),
            mappings=len(Path("/proc/self/maps").read_text().splitlines()),
            descriptors=len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - a count, not paths
        )

    def since(self, before: HostCost, device: str) -> dict[str, Any]:
        """By how much each counter grew, and `bytes`: the growth that counts."""
        grown = {name: self.counters[name] - before.counters[name] for name in COUNTERS}
        counted = grown["RssAnon"] if device == "host" else max(grown.values())
        return {"bytes": counted, **grown, "MemAvailable": self.available - before.available}


def _kib(path: Path, name: str) -> int:
    line = next((line for line in path.read_text().splitlines() if line.startswith(f"{name}:")), None)
    return int(line.split()[1]) * KIB if line else 0

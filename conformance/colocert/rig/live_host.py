"""What the processes of a live pair hold of the host, read in /proc from outside.

Knows smaps, descriptors and mappings. Does not know devices, owners or rules.

Host memory is what the kernel cannot drop: anonymous pages, and shared ones that no file on disk stands behind. The
stand-in's device memory is a memfd of its own name and is left out; pages of files are left out too.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

DEVICE_MEMORY = "/memfd:colocert-standin"
_SHARED = ("/dev/shm/", "/memfd:", "/SYSV", "/dev/zero", "[anon_shmem")
_HEADER = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S{4} \S+ \S+ \S+ *(.*)$")


@dataclass(frozen=True)
class HostHeld:
    """One process's. Bytes, except `files` (open descriptors) and `maps` (mappings that are no device memory)."""

    host: int = 0
    locked: int = 0
    files: int = 0
    maps: int = 0

    def __add__(self, other: HostHeld) -> HostHeld:
        return HostHeld(
            self.host + other.host,
            self.locked + other.locked,
            self.files + other.files,
            self.maps + other.maps,
        )


def host_held(pid: int) -> HostHeld:
    """What a living process holds; nothing for one that has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps").read_text(errors="replace")
        files = _files(pid)
    except OSError:
        return HostHeld()
    return _read(text, files)


def _files(pid: int) -> int:
    """Descriptors, without the stand-in's own: one for each block of device memory."""
    count = 0
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            count += not str(Path(entry.path).readlink()).startswith(DEVICE_MEMORY)
    return count


def _read(smaps: str, files: int) -> HostHeld:
    """Sums over the mappings of `/proc/PID/smaps`."""
    host = locked = maps = 0
    device = shared = False
    for line in smaps.splitlines():
        header = _HEADER.match(line)
        if header is not None:
            name = header[1]
            device = name.startswith(DEVICE_MEMORY)
            shared = name.startswith(_SHARED)
            maps += not device
            continue
        if device:
            continue
        key, _, value = line.partition(":")
        if key == ("Pss" if shared else "Anonymous"):
            host += _kib(value)
        elif key == "Locked":
            locked += _kib(value)
    return HostHeld(host, locked, files, maps)


def _kib(value: str) -> int:
    return int(value.split()[0]) << 10

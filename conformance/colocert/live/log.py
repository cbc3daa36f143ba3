"""A file of events that a process cannot take with it when it is killed.

Knows bytes and pages. Does not know what is written, or by whom.

Lines are stored into a mapped file, which costs a copy and no system call: what is stored is the kernel's, and survives
SIGKILL. Space is allocated before it is mapped, because a store into a page that a full disk cannot back is a SIGBUS:
`OSError` comes from here instead, at a chunk's edge. The rest of a chunk is zero bytes, which a reader leaves out and
`close` cuts off. A line's end is stored after the line, so that a line which has its end is whole.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

CHUNK = 1 << 20
_NEWLINE = 10


class MappedLog:
    """Appends lines. The caller sees to it that one thread at a time does. Space is taken `chunk` bytes at a time."""

    __slots__ = ("_at", "_chunk", "_fd", "_map", "_offset", "_size", "path")

    def __init__(self, path: Path, chunk: int = CHUNK) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._chunk = path, chunk
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._offset = self._at = self._size = 0
        self._map: mmap.mmap | None = None

    def append(self, line: bytes) -> None:
        """Adds one line, given without its end. Raises `OSError` where the disk is full."""
        start = self._at
        end = start + len(line)
        if end >= self._size:
            self._more(len(line) + 1)
            start = self._at
            end = start + len(line)
        mapped = self._map
        assert mapped is not None
        mapped[start:end] = line
        mapped[end] = _NEWLINE
        self._at = end + 1

    def _more(self, needed: int) -> None:
        written = self._offset + self._at
        self._drop()
        offset = written - written % mmap.ALLOCATIONGRANULARITY
        size = -(-(written - offset + needed) // self._chunk) * self._chunk
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._fd, offset, size)
        else:  # pragma: no cover - no such call on macOS
            os.ftruncate(self._fd, offset + size)
        self._map = mmap.mmap(self._fd, size, offset=offset)
        self._offset, self._at, self._size = offset, written - offset, size

    def _drop(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None
        self._offset, self._at, self._size = self._offset + self._at, 0, 0

    def close(self) -> None:
        """Cuts the file off after its last line."""
        if self._fd < 0:
            return
        self._drop()
        os.ftruncate(self._fd, self._offset)
        self.abandon()

    def abandon(self) -> None:
        """Lets go of the file and leaves it as it is: what a forked child does with its parent's."""
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

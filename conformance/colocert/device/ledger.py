"""Reads a stand-in device's ledger from outside, without taking part in it.

Knows the file that `csrc/ledger.c` writes. A process without the hook can so see what a whole device holds, and what
a process held when it died.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

_HEAD = struct.Struct("<4Q")  # magic, capacity, peak, slots
_SLOT = struct.Struct("<4Q")  # pid, start time, used, peak
_MAGIC = int.from_bytes(b"CLDGER2\0", "little")


@dataclass(frozen=True)
class Holder:
    """One process on the device. `alive` is false for a process whose memory the next to count will clear."""

    pid: int
    used: int
    peak: int
    alive: bool


@dataclass(frozen=True)
class Ledger:
    """What a ledger said at one moment."""

    capacity: int
    peak: int
    holders: tuple[Holder, ...]

    @property
    def free(self) -> int:
        """Bytes that nobody alive holds."""
        return self.capacity - sum(holder.used for holder in self.holders if holder.alive)


def read(path: Path) -> Ledger:
    """The ledger at `path`. `ValueError` where the file is not one."""
    raw = path.read_bytes()
    if len(raw) < _HEAD.size:
        raise ValueError(f"a ledger has at least {_HEAD.size} bytes, got {len(raw)} in {path}")
    magic, capacity, peak, slots = _HEAD.unpack_from(raw)
    if magic != _MAGIC:
        raise ValueError(f"a ledger of this version starts with {_MAGIC:#x}, got {magic:#x} in {path}")
    rows = (_SLOT.unpack_from(raw, _HEAD.size + i * _SLOT.size) for i in range(slots))
    holders = tuple(Holder(pid, used, high, start_time(pid) == begun) for pid, begun, used, high in rows if pid)
    return Ledger(capacity, peak, holders)


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 where it is gone or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    state, *rest = text[text.rindex(")") + 2 :].split()
    return 0 if state in "ZX" else int(rest[18])

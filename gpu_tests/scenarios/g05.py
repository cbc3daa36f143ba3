"""G05: bytes that a backup must not change, in each kind of backup."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

from colocert.device.hook import GRANULE, Backup
from colocert.device.ports import Block
from gpu_tests.harness.port import Port

KINDS: tuple[Backup, ...] = ("pinned", "mmap", "disk")


def contents(port: Port, fault: str | None, folder: str, cycles: int) -> dict[str, list[bool]]:
    """By kind of backup: is every byte the same after each cycle?"""
    port.device.hook.set_disk_folder(Path(folder))
    data = [_bytes(n) for n in (6_913, GRANULE + 1, 5 * GRANULE // 2 + 3)]
    expected = [hashlib.sha256(one).hexdigest() for one in data]
    seen: dict[str, list[bool]] = {}
    for kind in KINDS:
        blocks = [port.alloc_raw(kind, len(one), kind if fault is None else False) for one in data]
        blocks.append(port.alloc(kind, len(data[-1]), kind if fault is None else False))
        for block, one in zip(blocks, [*data, data[-1]], strict=True):
            port.device.write(block, one)
        seen[kind] = []
        for _ in range(cycles):
            _cycle(port, kind, blocks, fault)
            now = [port.device.checksum(block) for block in blocks]
            seen[kind].append(now == [*expected, expected[-1]])
    return seen


def _cycle(port: Port, tag: str, blocks: list[Block], fault: str | None) -> None:
    """Out and in. With a fault the blocks have no backup of the saver's, and the fault's own copies come back."""
    copies = []
    if fault == "rounds-down":
        copies = [port.device.read(block)[: block.nbytes // 4096 * 4096] for block in blocks]
    elif fault == "copies-too-early":
        whole = [port.device.read(block) for block in blocks]
        for block, last in zip(blocks, whole, strict=True):  # the last kernel's output is not there yet
            port.device.fill(block, 0)
            copies.append(port.device.read(block)[: block.nbytes // 2] + last[block.nbytes // 2 :])
            port.device.write(block, last)
    port.pause(tag)
    port.resume(tag)
    for block, copy in zip(blocks, copies, strict=False):
        port.device.write(block, copy)


def _bytes(nbytes: int) -> bytes:
    """Every type's awkward values, repeated: NaNs with payloads, negative zeros, subnormals, infinities, extremes."""
    patterns = [
        *(struct.pack("<I", bits) for bits in (0x7FC00001, 0xFFBFFFFF, 0x80000000, 0x00000001, 0xFF800000)),  # float32
        *(struct.pack("<Q", bits) for bits in (0x7FF8DEADBEEF0001, 1 << 63, 1, 0xFFF0000000000000)),  # float64
        *(struct.pack("<H", bits) for bits in (0x7E01, 0x8000, 0x0001, 0xFC00)),  # float16
        *(struct.pack("<H", bits) for bits in (0x7FC1, 0xFFBF, 0x8000, 0xFF80)),  # bfloat16
        *(struct.pack("<B", bits) for bits in (0x7F, 0xFF, 0x80)),  # float8 in both kinds, int8
        *(struct.pack("<q", value) for value in (-(1 << 63), -1, (1 << 63) - 1)),
        b"\x01\x00",  # bool
        bytes(range(256)),
    ]
    once = b"".join(patterns)
    return (once * (nbytes // len(once) + 1))[:nbytes]

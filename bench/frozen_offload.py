"""Offload and backload beside what the disk and the memory do with the same bytes, alternating in one process.

    python bench/frozen_offload.py [DIRECTORY] [MIB ...]

Ours is the reference's offload over one torch storage whose device memory is paused and resumed, as under
torch_memory_saver: `drop` leaves it to the saver, and a backload copies into memory that is there already. Beside it:
the file's blocks reserved and then written from the tensor, a plain write to a new file, SkyRL 0.4.0's function where
its package can be imported, and a copy within memory. Nothing is synced to the disk. Medians of alternating rounds;
peak is anonymous memory beyond that of the tensor, as the kit measures it.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from colocert.rig.frozen_module import MIB, FakeDevice
from colocert.rig.frozen_probe import HighWater, make_memory_exact
from colocert_reference.offload import FrozenOffload
from colocert_reference.real.frozen_tensors import StorageStore

ROUNDS = 7
CHUNK = 4 * MIB


class PausedStore(StorageStore):
    """A storage whose memory the saver pauses and resumes: neither call is ours."""

    off = False

    def resident(self) -> bool:
        return not self.off

    def drop(self) -> None:
        self.off = True

    def restore(self, content: memoryview) -> None:
        self.off = False
        self._raw().copy_(torch.frombuffer(content, dtype=torch.uint8))


class Ours:
    """A fresh offload a round, so that its file is written."""

    def __init__(self, tensor: torch.Tensor, folder: Path) -> None:
        self.store = PausedStore({"weight": tensor})
        self.offload = FrozenOffload(
            lambda: [self.store], directory=folder, chunk=CHUNK, report=lambda text: sys.exit(text)
        )

    def first(self) -> None:
        self.offload.offload()

    def again(self) -> None:
        self.offload.offload()

    def back(self) -> None:
        self.offload.backload()


def write(tensor: torch.Tensor, folder: Path, *, reserve: bool) -> None:
    """The bytes into a new file, from the tensor, in one call."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        left = memoryview(tensor.numpy())
        if reserve:
            os.posix_fallocate(file.fileno(), 0, len(left))
        while left:
            left = left[file.write(left) :]


def skyrl() -> Callable[[torch.Tensor, Path], None] | None:
    """SkyRL's offload of one frozen tensor to a mapped file, if its package is there."""
    try:
        from skyrl.backends.skyrl_train.distributed.megatron import megatron_utils as utils
    except ImportError:
        return None
    function = getattr(utils, "_offload_frozen_param_to_file", None)
    return None if function is None else (lambda tensor, folder: function(tensor, str(folder / "peer")))


def timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(mib: int, folder: Path) -> None:
    """Prints the rows of one size."""
    tensor = FakeDevice().adopt(torch.empty(mib * MIB, dtype=torch.uint8)).random_()
    plain = torch.empty(mib * MIB, dtype=torch.uint8).copy_(tensor)
    target = torch.empty_like(plain).fill_(0)
    peer = skyrl()
    times: dict[str, list[float]] = {}
    for turn in range(ROUNDS + 1):
        ours = Ours(tensor, folder)
        works: dict[str, Callable[[], None]] = {
            "fallocate+write": lambda: write(plain, folder, reserve=True),
            "offload": ours.first,
            "write": lambda: write(plain, folder, reserve=False),
            "repeated": ours.again,
            "memcpy": lambda: target.copy_(plain),
            "backload": ours.back,
        }
        if peer is not None:
            works["skyrl"] = lambda: peer(plain, folder)
        for name, work in works.items():
            seconds = timed(work)
            if turn:
                times.setdefault(name, []).append(seconds)
        del ours, works
    median = {name: statistics.median(values) for name, values in times.items()}
    peak = highest(tensor, folder)
    row(mib, "offload", median["offload"], "fallocate+write", median["fallocate+write"])
    row(mib, "offload", median["offload"], "write", median["write"])
    if "skyrl" in median:
        row(mib, "offload", median["offload"], "skyrl 0.4.0", median["skyrl"])
    row(mib, "backload", median["backload"], "memcpy", median["memcpy"])
    print(f"{mib:>6} repeated offload {median['repeated'] * 1e6:.0f} us; peak of an offload {peak / MIB:.1f} MiB")


def row(mib: int, what: str, ours: float, beside: str, theirs: float) -> None:
    rate = mib * MIB / ours / 1e9
    print(f"{mib:>6} {what:>9} {ours * 1e3:>8.1f} {rate:>6.1f}  {beside:<16} {theirs * 1e3:>8.1f} {ours / theirs:>6.2f}")


def highest(tensor: torch.Tensor, folder: Path) -> int:
    """Bytes of anonymous memory that an offload takes at most."""
    ours, water = Ours(tensor, folder), HighWater(FakeDevice())
    before = water.now()
    with water:
        ours.first()
    return water.highest - before


def main(arguments: list[str]) -> None:
    root: Any = arguments[0] if arguments else None
    make_memory_exact()
    print(f"{'MiB':>6} {'ours':>9} {'ms':>8} {'GB/s':>6}  {'beside':<16} {'ms':>8} {'ratio':>6}")
    with tempfile.TemporaryDirectory(dir=root) as folder:
        for mib in map(int, arguments[1:] or (64, 512)):
            measure(mib, Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Offload and backload beside what the disk and the memory do with the same bytes, alternating in one process.

Ours is the reference's offload over one torch storage whose device memory is paused and resumed, as under
torch_memory_saver: `drop` leaves it to the saver, and a backload copies into memory that is there already. Beside it:
the file's blocks reserved and then written from the tensor, a plain write to a new file, SkyRL's functions, and a copy
within memory: of skyrl 0.4.0 where COLOCERT_SKYRL_PATH names its unpacked wheel, and of pull request 2062 where
COLOCERT_SKYRL_PR2062_PATH names a checkout of its head. Nothing is synced to the disk. Medians of alternating rounds;
peak is anonymous memory beyond that of the tensor, as the kit measures it. `second` is a backload from a mapping that
was read before.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from _rows import LIMIT, PEER, Bench

from colocert.adapters.found import Framework
from colocert.adapters.skyrl import MEGATRON, STAND_INS
from colocert.rig.frozen_module import MIB, FakeDevice
from colocert.rig.frozen_probe import HighWater, make_memory_exact
from colocert.rig.stubs import install
from colocert_reference.offload import FrozenOffload
from colocert_reference.real.frozen_tensors import StorageStore

ROUNDS = 7
CHUNK = 4 * MIB

Peer = Callable[[torch.Tensor, Path], Any]


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
        stores = [PausedStore({"weight": tensor})]
        self.offload = FrozenOffload(lambda: stores, directory=folder, chunk=CHUNK, report=sys.exit)


def write(tensor: torch.Tensor, folder: Path, *, reserve: bool) -> Any:
    """The bytes into a new file, from the tensor, in one call; returns the file, whose end is not timed."""
    file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
    left = memoryview(tensor.numpy())
    if reserve:
        os.posix_fallocate(file.fileno(), 0, len(left))
    while left:
        left = left[file.write(left) :]
    return file


PEERS = {"skyrl 0.4.0": "COLOCERT_SKYRL_PATH", "PR 2062": "COLOCERT_SKYRL_PR2062_PATH"}
"""What of SkyRL is measured, and the variable that names its tree."""


def skyrl(name: str) -> Peer | None:
    """SkyRL's offload of one frozen tensor to a mapped file, from the tree that its variable names.

    A file is written under a new name each time, since the pull request takes one of the same name and size for its
    own.
    """
    found = Framework("skyrl", distribution="skyrl", variable=PEERS[name])
    if not os.environ.get(PEERS[name]) or found.root() is None:
        print(f"without {name}: {PEERS[name]} names no tree")
        return None
    for known in [module for module in sys.modules if module.partition(".")[0] == "skyrl"]:
        del sys.modules[known]
    tree, before = str(found.root()), sys.path.copy()
    install([*STAND_INS, "megatron" if "megatron" in sys.modules else "!megatron"])
    try:
        sys.path.insert(0, tree)
        utils = found.load(MEGATRON)
    finally:
        sys.path[:] = before
    names = map("weight{}".format, count())

    def offload(tensor: torch.Tensor, folder: Path) -> torch.nn.Parameter:
        utils._FROZEN_OFFLOAD_DIR = str(folder)
        parameter = torch.nn.Parameter(tensor, requires_grad=False)
        if not utils._offload_frozen_param_to_file(next(names), parameter):
            sys.exit("SkyRL fell back to pinned memory")
        return parameter

    return offload


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what the work made: it goes later."""
    start = time.perf_counter()
    made = work()
    return time.perf_counter() - start, made


def measure(bench: Bench, mib: int, folder: Path, peers: dict[str, Peer]) -> None:
    """The rows of one size."""
    tensor = torch.empty(mib * MIB, dtype=torch.uint8).random_()
    plain = torch.empty(mib * MIB, dtype=torch.uint8).copy_(tensor)
    target = torch.empty_like(plain).fill_(0)
    times: dict[str, list[float]] = {}
    for turn in range(bench.rounds(ROUNDS) + 1):
        ours = Ours(tensor, folder)
        works: dict[str, Callable[[], Any]] = {
            "fallocate+write": lambda: write(plain, folder, reserve=True),
            "offload": ours.offload.offload,
            "write": lambda: write(plain, folder, reserve=False),
            "repeated": ours.offload.offload,
            "memcpy": lambda: target.copy_(plain),
            "backload": ours.offload.backload,
            "offloaded again": ours.offload.offload,
            "memcpy again": lambda: target.copy_(plain),
            "backload again": ours.offload.backload,
        }
        works |= {name: partial(peer, plain, folder) for name, peer in peers.items()}
        for name, work in works.items():
            seconds, made = timed(work)
            del made
            for left in (path for path in folder.rglob("*") if path.is_file()):
                left.unlink()
            if turn:
                times.setdefault(name, []).append(seconds)
        del ours, works
    size, ours = f"{mib} MiB", times["offload"]
    for beside, kind, at_most in (
        ("blocks reserved, then written", LIMIT, 1.15),
        ("a plain write", LIMIT, None),
        ("skyrl 0.4.0", PEER, 0.85),
        ("PR 2062", PEER, 0.25),
    ):
        theirs = times.get(_TIMED.get(beside, beside))
        if theirs is not None:
            bench.beside(f"offload, {size}", "ms", ours, beside, theirs, kind=kind, scale=1e3, at_most=at_most)
    for what, mine, copy in (
        ("backload", times["backload"], times["memcpy"]),
        ("backload of a mapping read before", times["backload again"], times["memcpy again"]),
    ):
        bench.beside(f"{what}, {size}", "ms", mine, "a copy within memory", copy, kind=LIMIT, scale=1e3, at_most=1.11)
    bench.alone(f"offload again, {size}", "us", [value * 1e6 for value in times["repeated"]], at_most=1000)
    bench.alone(
        f"offload, {size}: peak beside the file", "MiB", [highest(tensor, folder) / MIB], at_most=CHUNK / MIB + 4
    )


_TIMED = {"blocks reserved, then written": "fallocate+write", "a plain write": "write"}


def highest(tensor: torch.Tensor, folder: Path) -> int:
    """Bytes of anonymous memory that an offload takes at most."""
    ours, water = Ours(tensor, folder), HighWater(FakeDevice())
    before = water.now()
    with water:
        ours.offload.offload()
    return water.highest - before


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--directory", help="where the files go, beside others of their own")
    parser.add_argument("--mib", type=int, nargs="*", help="sizes (64 and 512)")


def main() -> None:
    bench = Bench.started(__file__, __doc__, options=options)
    make_memory_exact()
    peers = {name: peer for name in PEERS if (peer := skyrl(name)) is not None}
    with tempfile.TemporaryDirectory(dir=bench.arguments.directory) as folder:
        for mib in bench.arguments.mib or ((64,) if bench.quick else (64, 512)):
            measure(bench, mib, Path(folder), peers)
    bench.finish()


if __name__ == "__main__":
    main()

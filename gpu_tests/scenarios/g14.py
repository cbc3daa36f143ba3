"""G14 and G15: one rank of process groups that are destroyed for every hand-off. gloo on `host`, NCCL on `cuda`.

Whether a group lives is asked of torch at the moment of a release, and what is released is asked of the port at the
moment of a rebuild: a rank does not report its own good order. NCCL has not run here.
"""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from gpu_tests.harness.port import Port

ROUNDS = 5
LATE = 5.0
LATE_ROUND = 2
PATIENCE = timedelta(seconds=60)


def rank(port: Port, fault: str | None, number: int, count: int, folder: str, late: int | None) -> dict[str, Any]:
    """Five rounds of: compute, destroy, release, resume, rebuild. `late` is the rank that comes late in one of them."""
    port.settle()
    block = port.alloc("default", (3 + number) * port.unit, backup=True, fill=number + 1)
    other = port.alloc("grad_buffer", port.unit)
    whole = port.device.checksum(block)
    tag = "grad_buffer" if fault == "one-rank-pauses-another-tag" and number == 1 else "default"
    groups = Groups(port, number, count, Path(folder))
    seen: dict[str, Any] = {"alive": [], "released": [], "sums": [], "wanted": [], "down": [], "up": [], "rounds": 0}
    seen["start"] = port.device.free_bytes()
    groups.build()
    for turn in range(ROUNDS):
        seen["sums"].append(groups.sums(turn))
        seen["wanted"].append(groups.wanted(turn))
        seen["up"].append(port.device.free_bytes())
        if fault != "destroy-forgotten":
            groups.destroy()
        seen["down"].append(port.device.free_bytes())
        seen["alive"].append(int(groups.alive()))
        freed = port.moved(lambda: port.pause(tag))["bytes"]
        if number == late and turn == LATE_ROUND:
            time.sleep(LATE)
        if fault == "rebuilt-before-the-resume":
            seen["released"].append(_released(port))
            groups.build()
            port.resume(tag)
        else:
            port.resume(tag)
            seen["released"].append(_released(port))
            groups.build()
        seen["rounds"] += 1
    groups.destroy()
    seen["same"] = port.device.checksum(block) == whole
    return {**seen, "freed": freed, "expected": port.device.footprint(block), "spare": other.nbytes}


class Groups:
    """The world's group and, from four ranks on, one of tensor and one of data parallelism."""

    def __init__(self, port: Port, number: int, count: int, folder: Path) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        self._nccl = port.device.name == "cuda"
        self._number, self._count, self._folder = number, count, folder
        self._built = 0
        self._parts: list[tuple[list[int], Any]] = []

    def alive(self) -> bool:
        return bool(self._dist.is_initialized())

    def build(self) -> None:
        """A fresh group over a store of its own; nothing where one lives."""
        if self.alive():
            return
        self._built += 1
        self._dist.init_process_group(
            "nccl" if self._nccl else "gloo",
            init_method=f"file://{self._folder}/store{self._built}",
            rank=self._number,
            world_size=self._count,
            timeout=PATIENCE,
            device_id=self._torch.device("cuda", self._torch.cuda.current_device()) if self._nccl else None,
        )
        self._parts = [(list(range(self._count)), None)]
        if self._count >= 4:
            half = self._count // 2
            tensor = [[n, n + 1] for n in range(0, self._count, 2)]
            data = [[n + odd for n in range(0, self._count, 2)] for odd in (0, 1)]
            assert all(len(ranks) == half for ranks in data)
            for split in (tensor, data):
                made = [(ranks, self._dist.new_group(ranks)) for ranks in split]  # every rank makes every group
                self._parts += [(ranks, group) for ranks, group in made if self._number in ranks]

    def destroy(self) -> None:
        if self.alive():
            self._dist.destroy_process_group()

    def sums(self, turn: int) -> list[int]:
        """The sum over each group of a number that every rank and round has of its own."""
        found = []
        for _, group in self._parts:
            value = self._torch.tensor([_number(self._number, turn)], dtype=self._torch.int64)
            value = value.cuda() if self._nccl else value
            self._dist.all_reduce(value, group=group)
            found.append(int(value.item()))
        return found

    def wanted(self, turn: int) -> list[int]:
        return [sum(_number(n, turn) for n in ranks) for ranks, _ in self._parts]


def _released(port: Port) -> int:
    """The bytes that this rank has released and not taken again."""
    return port.device.footprint(*port.blocks) - port.read().ledger


def _number(rank: int, turn: int) -> int:
    return int(1000**rank) % 999_983 + 17 * turn

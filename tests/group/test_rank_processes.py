"""Local rank processes end with whoever started them, and a dead one is reported at every call."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from colocert.rig.group_rank import started_at
from colocert_reference.group import RankLost
from colocert_reference.rank_processes import ProcessRank

STARTER = """
import os, sys, time
from colocert_reference.rank_processes import ProcessRank

class Rank:
    def pid(self):
        return os.getpid()

import asyncio
ranks = [ProcessRank(n, Rank, ()) for n in range(3)]
print(*[asyncio.run(rank.call("pid")) for rank in ranks], flush=True)
time.sleep(60)
"""


class Rank:
    def end(self) -> None:
        os._exit(0)

    def add(self, one: int, other: int) -> int:
        return one + other

    def fail(self) -> None:
        raise ValueError("as told")

    def open_files(self) -> list[str]:
        held = []
        for fd in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the listing's own
                held.append((int(fd.name), str(fd.readlink())))
        return [name for fd, name in held if fd > 2]


def gone_within(seconds: float, pids: list[int]) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(started_at(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_ranks_end_when_the_process_that_started_them_is_killed() -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    pids = [int(word) for word in starter.stdout.readline().split()]
    assert [bool(started_at(pid)) for pid in pids] == [True, True, True]
    starter.send_signal(signal.SIGKILL)
    starter.communicate(timeout=10)
    assert gone_within(10, pids)


def test_a_rank_holds_none_of_its_parents_files(tmp_path: Path) -> None:
    with (tmp_path / "parents").open("w"):
        rank = ProcessRank(0, Rank, ())
        try:
            held = asyncio.run(rank.call("open_files"))
        finally:
            rank.kill()
    assert not [name for name in held if str(tmp_path) in name]
    assert len([name for name in held if name.startswith(("pipe:", "socket:"))]) == 1


def test_what_a_rank_returns_and_raises_arrives() -> None:
    rank = ProcessRank(0, Rank, ())
    try:
        assert asyncio.run(rank.call("add", 2, 3)) == 5
        with pytest.raises(ValueError, match="as told"):
            asyncio.run(rank.call("fail"))
    finally:
        rank.kill()


def test_every_call_to_a_dead_rank_fails() -> None:
    rank = ProcessRank(0, Rank, ())
    for _ in range(3):
        with pytest.raises(RankLost):
            asyncio.run(rank.call("end"))
    rank.kill()

"""One rank of a train group, in a process of its own: a plain class that a framework wraps as its actor.

Knows one rank's memory, its plan of misbehaviour and the file that its events go to. Does not know the other ranks
beyond their addresses, who calls it, or through what: Ray, a pipe, or anything else that passes plain data.

    args = rig.rank_arguments(rank)          in the process that drives the group
    actor = ray.remote(RankDouble).remote(*args)
    actor.train.remote() ... actor.sleep.remote() ...

A line of the file is an event with its time, put out by a single `write(2)` before the effect's caller knows of it:
what a rank did before it was killed is there. The times are CLOCK_MONOTONIC, one clock for all processes of a host.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from colocert.rig.contract import Config, Region
from colocert.rig.faults import InjectedFault
from colocert.rig.rank import RankRig
from colocert.rig.saver import SaverFatal
from colocert.rig.trainers import DEFAULT, TrainerDouble
from colocert.trace.events import AnyEvent, CallBegin, CallEnd, CallRaise, Change, Event, Fault, GroupUse

WAYS = ("before", "after", "hang", "killed", "killed-after", "slow")
"""How a call can go wrong: it raises before or after its effect, never returns, ends its process, or takes long.

A call that never returns ends with the process that started its rank: no rank is left behind."""

STARTED = "rank.started"
SLOW_SECONDS = 0.4


class RankFault(InjectedFault):
    """An error that the suite injected on one rank. `rank` survives pickling."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(rank, text)
        self.rank, self.text = rank, text

    def __str__(self) -> str:
        return self.text


class Stamped(msgspec.Struct, frozen=True):
    """One line of a rank's file: an event and its time in nanoseconds of CLOCK_MONOTONIC."""

    at: int
    event: AnyEvent


class RankDouble:
    """The calls of a trainer, each correct by itself, so that what goes wrong is the group's or the plan's.

    `plan` is plain data: `config` (facts of a `Config`), `incarnation` (0, and one more for each replacement),
    `addresses` of all ranks, and `faults`: (method, way, nth) for the nth call of a method.
    """

    def __init__(self, rank: int, folder: str, plan: Mapping[str, Any]) -> None:
        self._incarnation: int = plan["incarnation"]
        self._addresses: dict[int, str] = dict(plan["addresses"])
        self._faults = {(method, int(nth)): way for method, way, nth in plan["faults"]}
        self._made: dict[str, int] = {}
        self._calls = 0
        self._base_invalid = False
        path = Path(folder) / f"rank-{rank}.{self._incarnation}.jsonl"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._rig = RankRig(rank, config_of(plan["config"]), self._write)
        pid = os.getpid()
        self._rig.emit(Change(STARTED, {"incarnation": self._incarnation, "pid": pid, "since": started_at(pid)}))
        self._trainer = TrainerDouble(self._rig, ())
        self._trainer.init()

    # ---- the calls of a trainer

    def wake_up(self) -> None:
        self._call("wake_up")

    def sleep(self) -> None:
        self._call("sleep")

    def offload_grad_buffer(self) -> None:
        self._call("offload_grad_buffer")

    def clear_memory(self) -> None:
        self._call("clear_memory")

    def train(self) -> None:
        self._call("train")

    def update_weights(self) -> None:
        self._call("update_weights")

    # ---- what a group needs beside them

    def released(self) -> list[str]:
        """The tags of which something is released now."""
        return sorted({a.tag for a in self._rig.saver.allocations.values() if a.paused})

    def address(self) -> str:
        """Where the other ranks find this process; a replacement has another one."""
        return address(self._rig.rank, self._incarnation)

    def connect(self, addresses: Mapping[int, str]) -> None:
        """From here on the collectives of this rank go to these addresses, by rank."""
        self._addresses = dict(addresses)

    def invalidate_base(self) -> None:
        """Its base weights are not those of the run: `train()` loads them anew."""
        self._base_invalid = True
        self._rig.emit(Change("base.invalid", {"incarnation": self._incarnation}))

    # ---- how a call goes

    def _call(self, method: str) -> None:
        self._calls += 1
        call = self._calls
        nth = self._made[method] = self._made.get(method, 0) + 1
        way = self._faults.get((method, nth), "")
        self._rig.emit(CallBegin("trainer", method, call))
        try:
            self._misbehave(method, way, ("slow", "before", "hang", "killed"))
            self._effect(method)
            self._misbehave(method, way, ("after", "killed-after"))
        except SaverFatal:
            os._exit(1)
        except Exception as error:
            self._rig.emit(CallRaise("trainer", method, call, type(error).__name__, str(error)[:300]))
            raise
        self._rig.emit(CallEnd("trainer", method, call))

    def _effect(self, method: str) -> None:
        if method in ("train", "update_weights"):
            for rank, where in sorted(self._addresses.items()):
                if rank != self._rig.rank:
                    self._rig.emit(GroupUse(where, alive=True))
        if method == "train" and self._base_invalid:
            self._trainer.wake_up()
            self._rig.data(DEFAULT, "overwrite", only="base")
            self._base_invalid = False
        getattr(self._trainer, method)()

    def _misbehave(self, method: str, way: str, now: tuple[str, ...]) -> None:
        if way not in now:
            return
        when = "killed" if way == "killed-after" else way
        self._rig.emit(Fault(point=f"rank.{method}", when=when))
        if way == "slow":
            time.sleep(SLOW_SECONDS)
        elif way == "hang":
            caller = os.getppid()
            while os.getppid() == caller:
                time.sleep(0.1)
            os._exit(1)
        elif when == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise RankFault(self._rig.rank, f"rank {self._rig.rank}, {method}: injected {way} its effect")

    def _write(self, event: Event) -> None:
        line = _encode({"at": time.monotonic_ns(), "event": event}) + b"\n"
        while line:
            line = line[os.write(self._fd, line) :]


_encode = msgspec.json.Encoder().encode


def address(rank: int, incarnation: int) -> str:
    """The address of a rank's process."""
    return f"rank-{rank}.{incarnation}"


def config_of(facts: Mapping[str, Any]) -> Config:
    """A configuration back from its `facts()`."""
    regions = {tag: tuple(Region(*region) for region in regions) for tag, regions in facts["regions"].items()}
    return Config(**{**facts, "engine_releases": frozenset(facts["engine_releases"]), "regions": regions})


def started_at(pid: int) -> int:
    """When a process was started, in clock ticks since boot: with the pid it names one process for good.

    0 if there is no such process any more, or only its exit status is left.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if state in ("Z", "X") else int(fields[18])

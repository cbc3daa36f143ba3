"""Trainers for a driver to call: a correct double a rank, or the framework's own trainer, behind one handle.

Knows the calls of a trainer and writes their events. Does not know drivers or what order of calls is right.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from colocert.rig.engine import EngineDouble
from colocert.rig.rank import RankRig
from colocert.rig.remote_call import Callee
from colocert.rig.saver import SaverFatal
from colocert.trace.events import CallBegin, CallEnd, CallRaise, Event

GRADS, PARAMS, DEFAULT = "grad_buffer", "param_buffer", "default"


class RankDied(RuntimeError):
    """The rank's process has ended: what a driver sees where the saver called `exit(1)`, as from a dead Ray actor."""


class TrainerHandle(Callee):
    """One rank as a driver sees it: the calls of a trainer, each with its events and a fault point `trainer.CALL`.

    A rank whose role is critic is called so: in its events and in its fault points, `critic.CALL`.

    `init()` builds the trainer's memory. A call into a rank that died raises `RankDied`.
    """

    def __init__(self, rank: RankRig, trainer: Any) -> None:
        super().__init__()
        self.rank, self.trainer = rank, trainer
        self._calls = 0
        self._actor = "critic" if rank.config.role == "critic" else "trainer"

    def emit(self, event: Event) -> None:
        self.rank.emit(event)

    def init(self) -> Any:
        return self._call("init")

    def sleep(self) -> Any:
        return self._call("sleep")

    def wake_up(self) -> Any:
        return self._call("wake_up")

    def train(self) -> Any:
        return self._call("train")

    def update_weights(self) -> Any:
        return self._call("update_weights")

    def offload_grad_buffer(self) -> Any:
        return self._call("offload_grad_buffer")

    def clear_memory(self) -> Any:
        return self._call("clear_memory")

    def close(self) -> Any:
        return self._call("close")

    def _call(self, method: str) -> Any:
        if self.rank.saver.dead:
            raise RankDied(f"rank {self.rank.rank} has ended; {method}() cannot be called")
        self._calls += 1
        call = self._calls
        self.emit(CallBegin(self._actor, method, call))
        try:
            with self.rank.faults.point(f"{self._actor}.{method}"):
                result = getattr(self.trainer, method)()
        except BaseException as error:
            self._raised(method, call, error)
            raise
        if inspect.isawaitable(result):
            return self._later(method, call, result)
        self.emit(CallEnd(self._actor, method, call))
        return result

    async def _later(self, method: str, call: int, result: Any) -> Any:
        try:
            value = await result
        except BaseException as error:
            self._raised(method, call, error)
            raise
        self.emit(CallEnd(self._actor, method, call))
        return value

    def _raised(self, method: str, call: int, error: BaseException) -> None:
        if isinstance(error, SaverFatal):
            raise RankDied(f"rank {self.rank.rank} ended in {method}(): {error}") from error
        self.emit(CallRaise(self._actor, method, call, type(error).__name__, str(error)[:300]))


class TrainerDouble:
    """A trainer that does right whatever it is asked, so that what goes wrong is the driver's.

    Releases gradients, then the rest; resumes in reverse; undoes an early release; sends from the device while
    resident and from the host copy while asleep. Repeated calls do nothing.
    """

    def __init__(self, rank: RankRig, engines: Sequence[EngineDouble]) -> None:
        self.rank, self.engines = rank, engines
        self.version = 0

    def init(self) -> None:
        if not self.rank.saver.allocations:
            self.rank.start()

    def sleep(self) -> None:
        for tag in self._tags():
            if not (tag == PARAMS and self._owes_params()):
                self._pause(tag)

    def wake_up(self) -> None:
        for tag in reversed(self._tags()):
            if self._out(tag):
                self.rank.saver.resume(tag)
                if tag != DEFAULT:
                    self.rank.data(tag, "overwrite")

    def offload_grad_buffer(self) -> None:
        self._pause(GRADS)

    def train(self) -> None:
        self.wake_up()
        self.rank.data(DEFAULT, "read")
        self.rank.data(GRADS, "zero")
        self.rank.data(GRADS, "accumulate")
        self.rank.data(GRADS, "consume")
        self.version += 1

    def update_weights(self) -> None:
        """Rank 0 sends to every engine; the others take part without sending. Released parameters were sent before."""
        tag = PARAMS if PARAMS in self._tags() else DEFAULT
        if tag == PARAMS and self._out(PARAMS):
            return
        if self.rank.rank == 0:
            kind = "adapter" if self.rank.config.lora else "base"
            invalid = kind == "adapter" and any(not e.base_valid for e in self.engines)
            for what in ("base", kind) if invalid else (kind,):
                self._send(what, tag)
        if tag == PARAMS and self._out(DEFAULT):
            self._pause(PARAMS)

    def clear_memory(self) -> None:
        self.rank.clear_memory()

    def close(self) -> None:
        """Nothing of this double outlives its process."""

    def _send(self, kind: str, tag: str) -> None:
        for allocation in self.rank.saver.of(tag):
            if allocation.kind in (kind, "params"):
                source = "host" if allocation.paused else "device"
                self.rank.send(kind, tag, only=allocation.name, read_from=source, version=self.version)
        for engine in self.engines:
            engine.update(kind, self.version)

    def _owes_params(self) -> bool:
        return self.rank.config.rematerialize and self.rank.config.role == "actor"

    def _tags(self) -> list[str]:
        return [tag for tag in (GRADS, PARAMS, DEFAULT) if self.rank.saver.of(tag)]

    def _out(self, tag: str) -> bool:
        return any(a.paused for a in self.rank.saver.of(tag))

    def _pause(self, tag: str) -> None:
        if self.rank.saver.of(tag) and not self._out(tag):
            self.rank.saver.pause(tag)

"""The two sides of a pair under Ray: an actor a side, which starts the side's process on the shared device.

A process under the saver must start with the saver's preload library, and what the saver says as it ends one is on its
stderr; so the actor does not become that process, it owns it. What can end, and what is then left:

    the process     its actor reports it, as it would without Ray
    the actor       the process finds its line closed and leaves; what does not leave is killed
    this process    its Ray ends with it (`ray_reaper`), the actors with that, the processes with those

Knows Ray. Does not know what a side does, nor the order of calls.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from colocert_reference.real.processes import (
    ANSWER_WITHIN,
    END_WITHIN,
    NOTHING,
    NoDevice,
    PairError,
    ProcessDied,
    SharedDevice,
    as_called,
)
from colocert_reference.real.ray_group import start_ray

MORE = 30.0
"""Seconds beyond an answer's own limit until an actor that says nothing is given up."""


class SideActor:
    """One side's process, in a Ray actor. A call returns the error instead of raising it, and what the side holds."""

    def start(
        self, device: str, capacity: int, folder: str, side: str, body: str, answer_within: float, more: dict[str, Any]
    ) -> dict[str, Any]:
        try:
            shared = SharedDevice(device, capacity, Path(folder))
            self.side = shared.start(side, body, answer_within=answer_within, **more)
        except PairError as error:
            return {"raised": error}
        return {"value": None, "pid": self.side.pid, "actor": os.getpid(), **self._state()}

    def do(self, what: str, call: str, answer_within: float, more: dict[str, Any]) -> dict[str, Any]:
        """`begin`, `answer` or `require_alive` of the side."""
        self.side.answer_within = answer_within
        try:
            value = getattr(self.side, what)(call, **more)
        except PairError as error:
            return {"raised": error, **self._state()}
        return {"value": value, **self._state()}

    def end(self) -> None:
        self.side.end()

    def _state(self) -> dict[str, Any]:
        side = self.side
        told = {name: value for name, value in side.told.items() if name not in ("ok", "error", "text")}
        return {"held": side.held, "released": side.released, "told": told}


class RaySide:
    """A side whose process a Ray actor keeps; `actor` is the actor's own process."""

    def __init__(self, name: str, handle: Any, answer_within: float) -> None:
        self.name, self._handle, self.answer_within = name, handle, answer_within
        self.held: dict[str, Any] = dict(NOTHING)
        self.released: frozenset[str] = frozenset()
        self.told: dict[str, Any] = {}
        self.death: ProcessDied | None = None
        self.pid, self.actor = 0, 0
        self._ended = False

    def start(self, device: SharedDevice, body: str, arguments: dict[str, Any]) -> None:
        where = (device.name, device.capacity, str(device.folder.resolve()))
        answer = self._get(self._handle.start.remote(*where, self.name, body, self.answer_within, arguments), "start")
        self.pid, self.actor = answer["pid"], answer["actor"]

    def call(self, call: str, **arguments: Any) -> Any:
        self.begin(call, **arguments)
        return self.answer(as_called(call, arguments))

    def begin(self, call: str, **arguments: Any) -> None:
        self._do("begin", call, arguments)

    def answer(self, call: str) -> Any:
        return self._do("answer", call, {})

    def require_alive(self, call: str) -> None:
        self._do("require_alive", call, {})

    def end(self) -> None:
        """Ends the process, then the actor; kills what does not end."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(RayActorError, GetTimeoutError):
            ray.get(self._handle.end.remote(), timeout=2 * END_WITHIN)
        ray.kill(self._handle, no_restart=True)
        self._gone()

    def _do(self, what: str, call: str, arguments: dict[str, Any]) -> Any:
        if self.death is not None:
            raise self.death
        return self._get(self._handle.do.remote(what, call, self.answer_within, arguments), call)["value"]

    def _get(self, reference: Any, call: str) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = ray.get(reference, timeout=self.answer_within + MORE)
        except RayActorError:
            raise self._lost(call, "lost the Ray actor that kept it") from None
        except GetTimeoutError:
            ray.kill(self._handle, no_restart=True)
            raise self._lost(
                call, f"has a Ray actor that gave no answer within {self.answer_within + MORE:g} s"
            ) from None
        self.held = answer.get("held", self.held)
        self.released = answer.get("released", self.released)
        self.told = answer.get("told", self.told)
        if "raised" in answer:
            if isinstance(answer["raised"], ProcessDied):
                self.death = answer["raised"]
            raise answer["raised"]
        return answer

    def _lost(self, call: str, text: str) -> ProcessDied:
        self.held = dict(NOTHING)
        self._gone()
        self.death = ProcessDied(self.name, call, text, None)
        return self.death

    def _gone(self) -> None:
        """Returns once the side's process is no longer there; without its actor it leaves by itself, or is killed."""
        until = time.monotonic() + END_WITHIN
        while self.pid and _runs(self.pid):
            if time.monotonic() > until:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.02)


class RayDevice(SharedDevice):
    """The shared device whose processes are kept by Ray actors. Ray is started here, in the thread of whoever asks."""

    def __init__(self, name: str, capacity: int) -> None:
        try:
            start_ray()
        except Exception as error:  # Ray has no one error for a start that failed
            raise NoDevice(f"Ray must start for --processes ray (got {type(error).__name__}: {error})") from error
        super().__init__(name, capacity)

    def start(self, side: str, body: str, *, answer_within: float = ANSWER_WITHIN, **arguments: Any) -> RaySide:
        handle = ray.remote(SideActor).options(num_cpus=0, max_restarts=0, max_task_retries=0).remote()
        begun = RaySide(side, handle, answer_within)
        begun.start(self, body, arguments)
        return begun


def _runs(pid: int) -> bool:
    """Whether the process is there and has not ended; one that nobody has waited for has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")

"""The two processes of a colocated pair: started on one device, asked by name, and told apart when one of them ends.

With `host_memory` the one place in `real/` that imports the kit. Knows the kit's launcher, links and ledger, and what
the saver prints when a resume does not fit. Does not know what a call does, nor the order of calls.

    device = SharedDevice("host", capacity)
    side = device.start("engine", "colocert_reference.real.engine_memory:main", ...)
    side.call("resume", tags=["weights"])     # the answer; `CallFailed` where it raised there
    side.end()

A message is one JSON object: `{"call": name, ...}` there; `{"ok": value}` or `{"error": name, "text": ...}` back, with
the bytes that the process holds. A call whose process ends raises `ProcessDied`, then and at every later call of it.

    PairError
      NoDevice          the device cannot be used on this machine
      CallFailed        the call raised in its process, which goes on
      ProcessDied       the process ended, was killed, or did not answer and was killed
        DoesNotFit      the saver ended it in a resume that does not fit on the device
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any, Protocol

from colocert.device import Child, DeviceError, Machine, Outcome, start
from colocert.device import ledger as device_ledger
from colocert.device.link import LinkClosed

ANSWER_WITHIN = 120.0
"""Seconds within which a process must answer; the longest answer is the trainer's first, which imports megatron."""
END_WITHIN, GRACE = 10.0, 0.5
THREADS = "1"
"""Of torch, a process, unless OMP_NUM_THREADS says otherwise: small models gain nothing from more, and sums that are
split among as many threads as a machine has cores differ between machines."""
NOTHING: dict[str, Any] = {"device": 0, "host": 0, "tags": {}, "host_tags": {}}
"""What a process holds that is not there."""
_FOREVER = 7 * 86400.0


class PairError(RuntimeError):
    """The pair cannot go on as asked."""


class NoDevice(PairError):
    """The device cannot be used on this machine."""


class CallFailed(PairError):
    """The call raised in its process, which goes on. `error` is the name of what it raised."""

    def __init__(self, side: str, call: str, error: str, text: str) -> None:
        super().__init__(f"{side}.{call}() raised {error}: {text}")
        self.side, self.call, self.error, self.text = side, call, error, text

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.side, self.call, self.error, self.text)


class ProcessDied(PairError):
    """The process of one side is gone; `outcome` says how it ended."""

    def __init__(self, side: str, call: str, text: str, outcome: Outcome | None) -> None:
        super().__init__(f"the {side} process {text} (in {call})")
        self.side, self.call, self.text, self.outcome = side, call, text, outcome

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.side, self.call, self.text, self.outcome)


class DoesNotFit(ProcessDied):
    """The saver ended the process by `exit(1)`: what it had to resume does not fit on the device.

    `needed` and `free` are bytes as they were before the call, where whoever asked knows them.
    """

    needed: int | None = None
    free: int | None = None

    def __str__(self) -> str:
        known = "" if self.needed is None else f"; it needs {self.needed} bytes and {self.free} are free"
        return super().__str__() + known


class AnySide(Protocol):
    """A side as a pair sees it: `Side`, or one whose process another process keeps (`ray_sides.RaySide`)."""

    name: str
    answer_within: float
    held: dict[str, Any]
    released: frozenset[str]
    told: dict[str, Any]
    death: ProcessDied | None

    @property
    def pid(self) -> int: ...
    def call(self, call: str, **arguments: Any) -> Any: ...
    def begin(self, call: str, **arguments: Any) -> None: ...
    def answer(self, call: str) -> Any: ...
    def require_alive(self, call: str) -> None: ...
    def end(self) -> None: ...


class Side:
    """One process of the pair.

    `held` is what it said last: its own device bytes and its pinned host bytes, and of those what lies under which tag
    (`tags`, `host_tags`) where it says so. `released`, the tags it has given back; `told`, all that went with its last
    answer.
    """

    def __init__(self, name: str, child: Child, answer_within: float) -> None:
        self.name, self.child, self.answer_within = name, child, answer_within
        self.held: dict[str, Any] = dict(NOTHING)
        self.released: frozenset[str] = frozenset()
        self.told: dict[str, Any] = {}
        self.death: ProcessDied | None = None
        self._ended = False

    @property
    def pid(self) -> int:
        return self.child.pid

    def call(self, call: str, **arguments: Any) -> Any:
        """What the call returned there."""
        self.begin(call, **arguments)
        return self.answer(as_called(call, arguments))

    def begin(self, call: str, **arguments: Any) -> None:
        """Asks and does not wait; each needs its `answer`."""
        if self.death is not None:
            raise self.death
        try:
            self.child.tell({"call": call, **arguments})
        except LinkClosed:
            raise self._died(as_called(call, arguments)) from None

    def answer(self, call: str) -> Any:
        """The value; the message itself where it is neither an answer nor an error (a report before the answer)."""
        if self.death is not None:
            raise self.death
        try:
            message = self.child.listen(self.answer_within)
        except LinkClosed:
            raise self._died(call) from None
        except TimeoutError:
            self.child.kill()
            raise self._died(call, f"gave no answer within {self.answer_within:g} s and was killed") from None
        self.told = message
        self.held = message.get("held", self.held)
        self.released = frozenset(message.get("released", self.released))
        if "error" in message:
            raise CallFailed(self.name, call, message["error"], message["text"])
        return message.get("ok", message)

    def require_alive(self, call: str) -> None:
        """Raises `ProcessDied` where the process has ended; for after a call of another that needed this one."""
        if self.death is not None:
            raise self.death
        try:
            self.child.listen(GRACE)
        except LinkClosed:
            raise self._died(call) from None
        except TimeoutError:
            return
        raise AssertionError(f"{self.name} answered although nothing was asked")

    def end(self) -> None:
        """Asks the process to leave, kills it where it does not; nothing of it is left either way."""
        if self._ended:
            return
        self._ended = True
        try:
            self.child.tell(None)
        except LinkClosed:
            self.child.kill()
        with contextlib.suppress(DeviceError):  # as it leaves it checks a saver that it may never have put to use
            self._wait()

    def _died(self, call: str, text: str = "") -> ProcessDied:
        self.held = dict(NOTHING)
        self._ended = True
        try:
            outcome = self._wait()
        except DeviceError as error:
            self.death = ProcessDied(self.name, call, f"could not start: {error}", None)
            return self.death
        kind = DoesNotFit if _did_not_fit(outcome) else ProcessDied
        self.death = kind(self.name, call, text or _how(outcome), outcome)
        return self.death

    def _wait(self) -> Outcome:
        late = threading.Timer(END_WITHIN, self.child.kill)
        late.start()
        try:
            return self.child.wait()
        finally:
            late.cancel()


class SharedDevice:
    """One device for both processes. `capacity` limits the stand-in and means nothing on `cuda`, whose is its own.

    `folder` is that of the device where another process made it.
    """

    def __init__(self, name: str, capacity: int, folder: Path | None = None) -> None:
        self.name, self.capacity = name, capacity
        self.folder = folder or Path(tempfile.mkdtemp(prefix="colocert-pair-"))
        self._ledger = self.folder / "ledger"
        self._machine = Machine(
            device="cuda" if name == "cuda" else "host", capacity=capacity, ledger=self._ledger.resolve()
        )

    def start(self, side: str, body: str, *, answer_within: float = ANSWER_WITHIN, **arguments: Any) -> AnySide:
        """A process that has said that it is there: its hook is proved and it holds nothing yet."""
        env = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", THREADS)}
        try:
            child = start(body, machine=self._machine, env=env, deadline=_FOREVER, **arguments)
        except DeviceError as error:
            raise NoDevice(str(error)) from None
        begun = Side(side, child, answer_within)
        begun.answer("start")
        return begun

    def held_by(self, *sides: AnySide) -> dict[str, int]:
        """Device bytes by side: out of the ledger, read from outside; on `cuda` what each process said last."""
        if self.name == "cuda":
            return {side.name: side.held["device"] or 0 for side in sides}
        holders = {h.pid: h.used for h in self._read().holders if h.alive}
        return {side.name: holders.get(side.pid, 0) for side in sides}

    def free(self) -> int:
        """Bytes that no living process holds; -1 on `cuda`, which this process does not look into."""
        return -1 if self.name == "cuda" else self._read().free

    def peak(self) -> int:
        """The stand-in's own high-water mark over everything that ever held memory on it; -1 on `cuda`."""
        return -1 if self.name == "cuda" else self._read().peak

    def close(self) -> None:
        """Removes the ledger; every process on the device must have ended."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self) -> device_ledger.Ledger:
        return device_ledger.read(self._ledger)


def _did_not_fit(outcome: Outcome) -> bool:
    return outcome.kind == "hook-abort" and "out of memory" in outcome.stderr.lower().replace("_", " ")


def _how(outcome: Outcome) -> str:
    if outcome.kind == "signal":
        return f"was ended by {outcome.signal}"
    if _did_not_fit(outcome):
        return f"was ended by the saver, out of device memory: {outcome.last_words}"
    if outcome.kind == "failed":
        return f"failed: {(outcome.traceback.strip() or outcome.last_words).splitlines()[-1]}"
    return f"ended with {outcome.kind}, code {outcome.returncode}: {outcome.last_words or 'it left no word'}"


def as_called(call: str, arguments: dict[str, Any]) -> str:
    return " ".join((call, *map(str, arguments.get("tags", ()))))

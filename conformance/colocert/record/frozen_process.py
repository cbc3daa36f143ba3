"""A rank of a frozen-offload scenario in a process of its own: forked, limited, commanded, and killed.

Knows how to start such a process, what it is denied (descriptors, disk), and how its events come back. Does not know
scenarios or rules.

Commands go one way, lines the other: an event each, and after a command's last one an answer. What a process has
written before it dies is there. It is forked, so that torch and the implementation are imported once.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import os
import resource
import select
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from colocert.record.drive import ProcessGone, TrainerShapeError
from colocert.record.frozen_disk import DiskNotHad, limit_files
from colocert.rig.contract import Claims
from colocert.rig.frozen_module import fill, overwrite, random_like, tensors
from colocert.rig.frozen_probe import Probe, make_memory_exact
from colocert.rig.frozen_rig import FrozenConfig, FrozenRig
from colocert.trace.events import (
    AnyEvent,
    CallBegin,
    CallEnd,
    CallRaise,
    Change,
    ClaimsStated,
    Config,
    Event,
    Fault,
    TensorsSeen,
)

ACTOR = "offloader"
METHODS = ("offload", "backload")
LONGEST = float(os.environ.get("COLOCERT_FROZEN_DEADLINE", "120"))
"""Seconds for one command. The runner's own deadline for a scenario comes first; this is for other callers."""

_PR_SET_PDEATHSIG = 1
_encode, _decode = msgspec.json.encode, msgspec.json.Decoder(AnyEvent)
_OK, _WRONG = b"!ok", b"!wrong "


class FactoryRaised(Exception):
    """`frozen_offload(rig)` raised; the text is the error's."""


_KINDS: Mapping[str, type[Exception]] = {"shape": TrainerShapeError, "factory": FactoryRaised, "disk": DiskNotHad}

# ---- the process


class Rank:
    """The side in the process: a rig, the implementation's object, and a probe around every call."""

    def __init__(
        self,
        implementation: Any,
        claims: Claims,
        config: FrozenConfig,
        folder: Path,
        facts: Mapping[str, Any],
        out: int,
    ) -> None:
        self._out, self._calls, self._facts = out, 0, facts
        self._limits = limit_files(facts["files"])
        if facts["disk"]:
            self._limits.disk(folder, facts["disk"])
        make_memory_exact()
        self.rig = FrozenRig(config, claims, self.write, folder, rank=facts["rank"], values=facts["values"])
        self.probe = Probe(self.rig)
        self.rig.emit(self.probe.module(facts["found"]))
        self.rig.emit(self.probe.tensors("built"))
        if facts["disk"]:
            self.rig.emit(Fault(point="disk", when=facts["disk"].partition(":")[0]))
        try:
            self.made = self.rig.run(implementation.frozen_offload(self.rig))
        except Exception as error:
            raise FactoryRaised(f"{type(error).__name__}: {error}") from error
        missing = [m for m in METHODS if not callable(getattr(self.made, m, None))]
        if missing:
            raise TrainerShapeError(
                f"frozen_offload(rig) must return an object with {' and '.join(m + '()' for m in METHODS)} (got "
                f"{type(self.made).__name__} without {', '.join(m + '()' for m in missing)})"
            )

    def write(self, event: Event) -> None:
        _put(self._out, _encode(event))

    def call(self, method: str) -> None:
        """One call, what it cost, and where the tensors are then."""
        self._calls += 1
        call, emit = self._calls, self.rig.emit
        emit(CallBegin(ACTOR, method, call))
        self.probe.before()
        error: Exception | None = None
        with self._limits, self.probe.high_water:
            try:
                self.rig.run(getattr(self.made, method)())
            except Exception as raised:
                error = raised
        memory = self.probe.after(method)
        if error is None:
            emit(CallEnd(ACTOR, method, call))
        else:
            emit(CallRaise(ACTOR, method, call, type(error).__name__, str(error)[:300]))
            error = None
        emit(memory)
        emit(self.probe.tensors(method))

    # ---- what the suite does to the module

    def load(self, values: str) -> None:
        """Another checkpoint, as `load_state_dict` takes it."""
        made = self.rig.made
        for name, kind, tensor in tensors(made):
            if kind == "frozen":
                overwrite(tensor, random_like(tensor, int(values), name))
        self._changed("base.loaded")

    def swap(self, values: str) -> None:
        """Another checkpoint, in new device memory."""
        seen: set[int] = set()
        for name, kind, tensor in tensors(self.rig.made):
            if kind == "frozen" and id(tensor) not in seen:
                seen.add(id(tensor))
                tensor.data = self.rig.device.to_device(random_like(tensor, int(values), name))
        self._changed("base.replaced")

    def train(self, values: str) -> None:
        """A step: what requires gradients has other bits."""
        fill(self.rig.made, int(values), only="adapter" if self.rig.config.lora else "trained")
        self._changed("trained")

    def _changed(self, what: str) -> None:
        self.rig.emit(Change(what))
        self.rig.emit(self.probe.tensors("changed"))

    def end(self) -> NoReturn:
        """The normal end: the object is dropped, and what it registered to run at exit runs."""
        if callable(getattr(self.made, "close", None)):
            self.rig.run(self.made.close())
        self.made = None
        gc.collect()
        atexit._run_exitfuncs()
        os._exit(0)


def _serve(rank: Rank, commands: int, out: int) -> None:
    with open(commands, "rb", closefd=False) as lines:
        for line in lines:
            word, *rest = line.decode().split()
            if word in METHODS:
                rank.call(word)
            else:
                getattr(rank, word)(*rest)
            _put(out, _OK)


def _put(fd: int, line: bytes) -> None:
    line += b"\n"
    while line:
        line = line[os.write(fd, line) :]


def _begin_anew() -> None:
    """Makes this fork a process of its own: nothing of its parent's runs at its end, and it dies without a word."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    sys.setprofile(None)
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    import torch

    torch.set_num_threads(1)


# ---- its parent's side


class RankProcess:
    """The side of the suite. `wait` returns when the process has answered, or has ended (`ended` then says how)."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self.ended = ""
        self.in_call = ""
        self.pid = 0
        self._status: int | None = None
        self._buffer = b""

    def start(self, build: Callable[[int], Rank]) -> None:
        """Forks the process, which builds a rank that writes to the descriptor it is given.

        Raises `TrainerShapeError`, `FactoryRaised` or `DiskNotHad` if it did not come to be, `ProcessGone` if it hangs.
        """
        commands_read, self._commands = os.pipe()
        self._lines, lines_write = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._commands)
            os.close(self._lines)
            _child(build, commands_read, lines_write)
        os.close(commands_read)
        os.close(lines_write)
        self.wait("start")

    def send(self, line: str) -> None:
        """Sends a command; `wait` takes the answer."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._commands, line.encode() + b"\n")

    def readable_answer(self) -> bool:
        """Whether the process has answered, or ended: what it wrote so far is read, and kept for `wait`."""
        ready, _, _ = select.select([self._lines], [], [], 0)
        if ready and not self.ended:
            self._read()
        return bool(self.ended) or b"\n" + _OK in self._buffer

    def stop(self) -> bool:
        """Stops the process where it is, until `go`. False if it has ended."""
        if self._status is None:
            os.kill(self.pid, signal.SIGSTOP)
            _, status = os.waitpid(self.pid, os.WUNTRACED)
            if os.WIFSTOPPED(status):
                return True
            self._status = status
        return False

    def go(self) -> None:
        """Lets a stopped process go on."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Ends the process at once, and passes on what it had written."""
        if self.pid and not self.ended:
            if self._status is None:
                os.kill(self.pid, signal.SIGKILL)
            while self._read():
                pass
        self._drain()

    def wait(self, line: str) -> None:
        """Passes on what the process writes until it has answered or ended."""
        end = time.monotonic() + LONGEST
        while True:
            while b"\n" in self._buffer:
                told, _, self._buffer = self._buffer.partition(b"\n")
                if told == _OK:
                    return
                if told.startswith(_WRONG):
                    self._wrong(told[len(_WRONG) :].decode())
                self._pass_on(told)
            ready, _, _ = select.select([self._lines], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self.kill()
                raise ProcessGone(f"{line} did not return within {LONGEST:g} s")
            if not self._read():
                return

    def _read(self) -> bool:
        chunk = os.read(self._lines, 1 << 16)
        self._buffer += chunk
        if not chunk:
            self._reap()
        return bool(chunk)

    def _drain(self) -> None:
        *whole, self._buffer = self._buffer.split(b"\n")
        for told in whole:
            if not told.startswith(b"!"):
                self._pass_on(told)

    def _reap(self) -> None:
        if self._status is None:
            _, self._status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(self._status)
        self.ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}" if code else "normal"
        for fd in (self._commands, self._lines):
            os.close(fd)

    def _pass_on(self, told: bytes) -> None:
        event = _decode.decode(told)
        if isinstance(event, (Config, ClaimsStated)):
            return
        if isinstance(event, CallBegin):
            self.in_call = event.method
        elif isinstance(event, (CallEnd, CallRaise)):
            self.in_call = "look"
        elif isinstance(event, TensorsSeen):
            self.in_call = ""
        self._emit(event)

    def _wrong(self, told: str) -> NoReturn:
        kind, _, text = told.partition(" ")
        self.kill()
        text = msgspec.json.decode(text)
        raise _KINDS.get(kind, RuntimeError)(text)


def _child(build: Callable[[int], Rank], commands: int, out: int) -> NoReturn:
    try:
        _begin_anew()
        rank = build(out)
        _put(out, _OK)
        _serve(rank, commands, out)
    except (TrainerShapeError, FactoryRaised, DiskNotHad) as error:
        kind = next(name for name, known in _KINDS.items() if isinstance(error, known))
        _put(out, _WRONG + kind.encode() + b" " + _encode(str(error)))
    except SystemExit as error:
        os._exit(error.code if isinstance(error.code, int) else 1)
    except BaseException:
        _put(out, _WRONG + b"harness " + _encode(traceback.format_exc()))
    finally:
        os._exit(70)

"""Starts one child process a scenario, under the saver's preload library, and says how it ended.

Knows processes, deadlines and the verdict file. Does not know what a scenario does, and never imports torch.

    start(body)  ->  child: environment from scratch, hook probed, body imported and called
        child.tell / child.listen        while it runs
        child.kill                       SIGKILL, as an out-of-memory killer would
    child.wait() ->  Outcome, or one of the named errors of colocert.device.errors

The saver ends a process by C `exit(1)`: no traceback, no `finally`. So a child is judged by two things that must agree,
its return code and a verdict that it writes as its last act.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from colocert.device.errors import HOOK_ERRORS, HookNotLive, LibraryNotFound
from colocert.device.link import Link, pair
from colocert.device.machine import Machine

Kind = Literal["ok", "failed", "hook-abort", "signal", "hang", "vanished"]
DEADLINE = 60.0


@dataclass(frozen=True)
class Outcome:
    """How a child ended.

    `ok`: it returned `value`. `failed`: it raised; `traceback` says where. `hook-abort`: the saver ended it, or another
    C `exit(1)`; `stderr` ends with the reason. `signal`: `signal` names it. `hang`: the deadline passed and its process
    group was killed. `vanished`: it ended in some other way without a verdict.
    """

    kind: Kind
    returncode: int
    value: Any
    traceback: str
    stdout: str
    stderr: str
    seconds: float

    @property
    def signal(self) -> str:
        """The name of the signal that ended it, or nothing."""
        return signal.Signals(-self.returncode).name if self.returncode < 0 else ""

    @property
    def last_words(self) -> str:
        """The last line on stderr."""
        return (self.stderr.strip().splitlines() or [""])[-1]

    def expect(self, kind: Kind = "ok") -> Any:
        """The value, where the child ended as expected; else `AssertionError` with all that it left."""
        if self.kind != kind:
            raise AssertionError(
                f"the child must end as {kind!r}, got {self.kind!r} "
                f"(rc {self.returncode} {self.signal} after {self.seconds:.1f} s)\n"
                f"{self.traceback}--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
            )
        return self.value


@final
class Child:
    """A running scenario. Use as a context manager, or `wait()` for it: both leave no process behind."""

    def __init__(
        self, process: subprocess.Popen[bytes], link: Link, folder: Path, deadline: float, group: bool
    ) -> None:
        self._process, self._link, self._folder, self._group = process, link, folder, group
        self._begun, self._deadline = time.monotonic(), deadline
        self._outcome: Outcome | HookNotLive | None = None
        self.pid = process.pid

    def tell(self, message: Any) -> None:
        """Sends the child a JSON value; its body reads it with `stage.listen()`."""
        self._link.tell(message)

    def listen(self, timeout: float | None = None) -> Any:
        """The child's next `stage.tell()`. Raises `LinkClosed` where it ended first, `TimeoutError` at the deadline."""
        return self._link.listen(self._left() if timeout is None else timeout)

    def kill(self) -> None:
        """SIGKILL to the child alone."""
        self._process.kill()

    def wait(self) -> Outcome:
        """How it ended; a second call says the same. A hook that was not live is raised by name."""
        if self._outcome is None:
            try:
                self._outcome = self._end()
            except HookNotLive as error:
                self._outcome = error
        if isinstance(self._outcome, HookNotLive):
            raise self._outcome
        return self._outcome

    @property
    def over(self) -> bool:
        """Whether it has been waited for."""
        return self._outcome is not None

    def gone(self, within: float = 0.0) -> bool:
        """Whether its process ends within so many seconds, or has ended, waited for or not."""
        try:
            self._process.wait(within)
        except subprocess.TimeoutExpired:
            return False
        return True

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        if self._outcome is None:
            self.kill()
            with contextlib.suppress(HookNotLive):
                self.wait()

    def _left(self) -> float:
        return max(0.0, self._begun + self._deadline - time.monotonic())

    def _end(self) -> Outcome:
        hung = False
        try:
            self._process.wait(self._left())
        except subprocess.TimeoutExpired:
            hung = True
        finally:
            self._kill_all()
        seconds = time.monotonic() - self._begun
        self._link.close()
        stdout, stderr = (_text(self._folder / name) for name in ("stdout", "stderr"))
        verdict = json.loads(_text(self._folder / "verdict") or "null")
        shutil.rmtree(self._folder, ignore_errors=True)
        _raise_named(self._process.returncode, verdict, stderr)
        kind = "hang" if hung else _kind(self._process.returncode, verdict, stderr)
        verdict = verdict or {}
        traceback = verdict.get("traceback", "")
        return Outcome(kind, self._process.returncode, verdict.get("value"), traceback, stdout, stderr, seconds)

    def _kill_all(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._group:
                os.killpg(self.pid, signal.SIGKILL)
            else:
                self._process.kill()
        self._process.wait()


def start(
    body: Callable[..., Any] | str,
    /,
    *,
    machine: Machine | None = None,
    env: Mapping[str, str] | None = None,
    deadline: float = DEADLINE,
    own_group: bool = True,
    **arguments: Any,
) -> Child:
    """Starts `body(stage, **arguments)` in a child on `machine`.

    `body` is a module-level function, or `module:function`, or `file.py:function`. The arguments and the value that
    it returns travel as JSON. `own_group=False` is for a child's own children: they die with its group.
    """
    machine = machine or Machine()
    environment = machine.environment(env)
    folder = Path(tempfile.mkdtemp(prefix="colocert-child-"))
    link, theirs = pair()
    job = {
        "device": machine.device,
        "body": body if isinstance(body, str) else f"{inspect.getfile(body)}:{body.__name__}",
        "arguments": arguments,
        "verdict": str(folder / "verdict"),
        "link": theirs,
    }
    try:
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "colocert.device.child", json.dumps(job)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=theirs,
                start_new_session=own_group,
            )
    finally:
        for descriptor in theirs:
            os.close(descriptor)
    return Child(process, link, folder, deadline, own_group)


def run(
    body: Callable[..., Any] | str,
    /,
    *,
    machine: Machine | None = None,
    env: Mapping[str, str] | None = None,
    deadline: float = DEADLINE,
    **arguments: Any,
) -> Outcome:
    """Starts a child and waits for it."""
    return start(body, machine=machine, env=env, deadline=deadline, **arguments).wait()


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _kind(returncode: int, verdict: dict[str, Any] | None, stderr: str) -> Kind:
    if returncode < 0:
        return "signal"
    if verdict is not None:
        agreed: Kind = "ok" if verdict["ok"] else "failed"
        return agreed if (returncode == 0) == verdict["ok"] else "vanished"
    if returncode and "Traceback (most recent call last)" in stderr:
        return "failed"
    return "hook-abort" if returncode == 1 else "vanished"


def _raise_named(returncode: int, verdict: dict[str, Any] | None, stderr: str) -> None:
    if verdict and verdict.get("error"):
        named = verdict["error"]
        raise HOOK_ERRORS[named["name"]](named["must"], got=named["got"], fix=named["fix"])
    if returncode == 127 and (found := re.search(r"error while loading shared libraries: ([^:]+):.*", stderr)):
        raise LibraryNotFound(
            f"{found[1]} must be on the library path of a process under the saver's preload library",
            got=found[0],
            fix="On `cuda`: `pip install nvidia-cuda-runtime` for CUDA 13 in this environment. On `host`: rebuild the "
            "stand-in (delete its cache folder).",
        )

"""A runner child as its parent sees it: starting it, asking it within a deadline, replacing it when it is lost.

Knows processes and deadlines. Does not know what the jobs mean (`runner`) or how they are run (`child`).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from colocert.record.jobs import Answer, Job
from colocert.record.manifest import DIED, HANG

IMPORT_DEADLINE = float(os.environ.get("COLOCERT_IMPORT_DEADLINE", "180"))
DEADLINE = float(os.environ.get("COLOCERT_DEADLINE", "30"))
"""Seconds for one scenario, and between two signs of life of an exploration."""

FIRST = 4.0
"""Deadlines for the first scenario of a worker: a factory imports its framework in it, at length on a busy machine."""

LAST_WORDS = 15.0
"""Seconds for a child that started processes of its own to end them."""

_BOOT = (
    "import sys, json, os\n"
    "r, w = int(sys.argv[1]), int(sys.argv[2])\n"
    "sys.path[:] = json.loads(sys.argv[3])\n"
    "from colocert.record.child import main\n"
    "main(r, w)\n"
)


class Lost(Exception):
    """The child did not answer: it hung or died."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


class ChildProcess:
    """One runner child, as its parent sees it: its own session, temp folder and home."""

    def __init__(self, log: Path) -> None:
        self._home = tempfile.mkdtemp(prefix="colocert-home-")
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        jobs_read, self._jobs = os.pipe()
        self._answers, answers_write = os.pipe()
        environment = {**os.environ, "HOME": self._home, "TMPDIR": self._home, "PYTHONUNBUFFERED": "1"}
        environment.pop("PYTEST_CURRENT_TEST", None)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(jobs_read), str(answers_write), json.dumps(sys.path)],
                pass_fds=(jobs_read, answers_write),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=environment,
            )
        os.close(jobs_read)
        os.close(answers_write)
        self._buffer = b""
        self.graceful = False

    def ask(self, job: Job, deadline: float, progress: Callable[[str], None] | None = None) -> Answer:
        """Sends a job and waits for its answer, at most `deadline` seconds between two signs of life.

        Raises `Lost` if the child hangs or dies; it is killed with everything it started.
        """
        with contextlib.suppress(BrokenPipeError):
            os.write(self._jobs, msgspec.json.encode(job) + b"\n")
        while True:
            answer = msgspec.json.decode(self._line(deadline), type=Answer)
            if not answer.progress:
                return answer
            if progress is not None:
                progress(answer.detail)

    def _line(self, deadline: float) -> bytes:
        end = time.monotonic() + deadline
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self.kill()
                raise Lost(HANG, f"no answer within {deadline:g} s")
            chunk = os.read(self._answers, 1 << 16)
            if not chunk:
                raise Lost(DIED, self._epitaph())
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _epitaph(self) -> str:
        """How the process ended, with the last line that it wrote."""
        code = self._process.wait()
        self.kill()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        tail = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        return f"the process ended with {how}" + (f"; its last line: {tail[0][:200]}" if tail else "")

    def end(self) -> None:
        """Lets a child that started processes of its own end them, then `kill`."""
        if self.graceful:
            with contextlib.suppress(OSError):
                os.close(self._jobs)
            self._jobs = -1
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=LAST_WORDS)
        self.kill()

    def interrupt(self) -> None:
        """Ends the child and everything in its session; whoever waits for its answer gets `Lost`."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Ends the child and everything in its session, and removes its home."""
        self.interrupt()
        with contextlib.suppress(Exception):
            self._process.wait(timeout=10)
        for fd in (self._jobs, self._answers):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._jobs = self._answers = -1
        shutil.rmtree(self._home, ignore_errors=True)


class Worker:
    """A child and its replacements: `ask` always has a loaded child to ask."""

    def __init__(self, impl: str, log: Path) -> None:
        self._impl, self._log = impl, log
        self._child: ChildProcess | None = None
        self._answered = False

    def start(self) -> Answer:
        """Starts a child and loads the implementation; raises `Lost` if it does not survive that."""
        self._child = ChildProcess(self._log)
        try:
            return self._child.ask(Job("load", impl=self._impl), IMPORT_DEADLINE)
        except Lost:
            self._child = None
            raise

    def ask(self, job: Job, progress: Callable[[str], None] | None = None, *, patience: float = 1.0) -> Answer:
        """Runs a job, within so many deadlines; after a loss the next job gets a fresh child."""
        if self._child is None:
            answer = self.start()
            if not answer.ok:
                raise Lost(DIED, answer.problem.message if answer.problem else "the implementation no longer loads")
        assert self._child is not None
        try:
            answer = self._child.ask(job, DEADLINE * (patience if self._answered else max(patience, FIRST)), progress)
            self._child.graceful |= patience > 1
            self._answered = True
        except Lost:
            self._child = None
            raise
        if not answer.ok and answer.problem is None:  # the implementation asked for the end of the process
            self.close()
        return answer

    def close(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None

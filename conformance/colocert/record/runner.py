"""The runner: children that import the implementation, scenarios and exploration spread over them, deadlines.

Knows processes, deadlines and where evidence lies. Does not know rules or what a trace means.

A child that hangs or dies costs what it was running; a fresh one takes its place. In the smoke stage (import, build,
one cycle, close) that is a problem of the whole run; later the scenario is recorded as `hang` or `died`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from colocert.record.child import Answer, Job
from colocert.record.manifest import (
    COMPLETE,
    DIED,
    HANG,
    NOT_RUN,
    ControlRecord,
    ExplorationRecord,
    Options,
    Problem,
    Record,
    ScenarioRecord,
    write_record,
)
from colocert.record.registry import ALL_SCENARIOS, PATIENCE, smoke
from colocert.record.resolve import HARNESS
from colocert.record.scenarios import EXPLORATIONS, Scenario
from colocert.rig.contract import Claims
from colocert.rules.catalogue import catalogue

FULL_DEPTH, HIGH_COST_FAULT_DEPTH = 6, 3
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

    def kill(self) -> None:
        """Ends the child and everything in its session, and removes its home."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
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


def record(impl: str, folder: Path, options: Options, progress: Callable[[str], None] | None = None) -> Record:
    """Records everything that the options ask for into the folder, and writes its index.

    Whatever is wrong with the implementation comes back in the record: as its `problem`, or scenario by scenario.
    """
    started = time.monotonic()
    say = progress or (lambda _: None)
    _clear(folder)
    say(f"importing {impl}")
    worker = Worker(impl, folder / "logs" / "child-0.txt")
    base = Record(impl=impl, options=options)
    try:
        loaded, problem = _load(worker, folder, options)
        if loaded:
            base = msgspec.structs.replace(base, **loaded)
        if problem is None:
            base = _everything(worker, base, folder, say)
        result = msgspec.structs.replace(base, problem=problem)
    finally:
        worker.close()
    result = msgspec.structs.replace(result, seconds=round(time.monotonic() - started, 3))
    write_record(folder, result)
    return result


def _clear(folder: Path) -> None:
    """Removes what an earlier recording left in the folder, and nothing else."""
    for name in ("traces", "transcripts", "logs"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "record.json").unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)


def _load(worker: Worker, folder: Path, options: Options) -> tuple[dict[str, Any], Problem | None]:
    """The smoke stage: import, build, one cycle, close."""
    try:
        answer = worker.start()
    except Lost as lost:
        what = "hung" if lost.status == HANG else "ended the process"
        return {}, Problem("import", f"importing the implementation {what} ({lost.detail})", HARNESS)
    if answer.problem is not None:
        return {}, answer.problem
    body = answer.body
    claims = body["claims"]
    loaded = {"name": body["name"], "version": body["version"], "claims": claims, "claimed": tuple(body["profiles"])}
    loaded["options"] = _depths(options, body["build_cost"])
    for profile in body["profiles"]:
        if not options.profiles or profile in options.profiles:
            problem = _smoke(worker, profile, Claims.of({**claims}), folder)
            if problem is not None:
                return loaded, problem
    return loaded, None


def _smoke(worker: Worker, profile: str, claims: Claims, folder: Path) -> Problem | None:
    """One profile's first cycle."""
    scenario = smoke(profile, claims)
    if scenario is None:
        return None
    try:
        answer = worker.ask(_job(scenario.id, "smoke", folder), patience=PATIENCE.get(profile, 1.0))
    except Lost as lost:
        what = "hung" if lost.status == HANG else "ended the process"
        return Problem("smoke", f"the first cycle of {profile} {what} ({lost.detail})", HARNESS)
    if answer.ok:
        return None
    return answer.problem or Problem("smoke", f"the first cycle must not end the process: {answer.detail}", HARNESS)


def _depths(options: Options, build_cost: str) -> Options:
    fault_depth = options.fault_depth or (HIGH_COST_FAULT_DEPTH if build_cost == "high" else FULL_DEPTH)
    return msgspec.structs.replace(options, fault_depth=fault_depth if options.faults == "single" else 0)


def _job(scenario: str, profile: str, folder: Path) -> Job:
    path = folder / "traces" / profile / f"{scenario}.jsonl"
    return Job("scenario", id=scenario, folder=str(folder.resolve()), trace=str(path.resolve()))


def _everything(first: Worker, base: Record, folder: Path, say: Callable[[str], None]) -> Record:
    claims = Claims.of({**base.claims})
    asked = base.options.profiles
    ran = [p for p in base.claimed if not asked or p in asked]
    scenarios = [s for s in ALL_SCENARIOS if s.profile in ran and s.wanted(claims) and base.options.scenarios]
    explorations = [s for s in EXPLORATIONS if s.profile in ran and s.wanted(claims) and base.options.depth]
    jobs: list[Callable[[Worker], ScenarioRecord | ExplorationRecord]] = [
        *(partial(_explore, scenario=e, options=base.options, folder=folder, say=say) for e in explorations),
        *(partial(_scenario, scenario=s, folder=folder, say=say) for s in scenarios),
    ]
    done = list(_spread(jobs, first, base, folder))
    controls = _controls(base, ran, folder, say) if base.options.controls else ()
    order = {s.id: i for i, s in enumerate((*scenarios, *explorations))}
    done.sort(key=lambda d: order[d.id])
    return msgspec.structs.replace(
        base,
        scenarios=tuple(d for d in done if isinstance(d, ScenarioRecord)),
        explorations=tuple(d for d in done if isinstance(d, ExplorationRecord)),
        controls=controls,
    )


def _controls(base: Record, ran: list[str], folder: Path, say: Callable[[str], None]) -> tuple[ControlRecord, ...]:
    """The controls of the required rules, in a child that never imports the implementation under test.

    It answers once; of profiles whose scenarios take longer it gets more time.
    """
    rules = [r.id for r in catalogue().values() if r.profile in ran and r.level == "must" and r.bound(base.claims)]
    if not rules:
        return ()
    say("running the controls")
    child = ChildProcess(folder / "logs" / "controls.txt")
    try:
        patience = max(1.0, sum(PATIENCE.get(profile, 1.0) - 1.0 for profile in ran) / 4)
        answer = child.ask(Job("controls", rules=tuple(rules)), IMPORT_DEADLINE * patience)
        return msgspec.convert(answer.body["controls"], tuple[ControlRecord, ...])
    except Lost as lost:
        return (ControlRecord("controls", "", "", "green", f"the controls did not finish: {lost.detail}"),)
    finally:
        child.kill()


def _spread(jobs: list[Any], first: Worker, base: Record, folder: Path) -> Iterator[Any]:
    """Runs the jobs on as many children as the options say, the first of which is already there."""
    pending: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for job in jobs:
        pending.put(job)
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def serve(worker: Worker) -> None:
        last: BaseException | None = None
        try:
            while True:
                results.put(pending.get_nowait()(worker))
        except queue.Empty:
            pass
        except BaseException as error:
            last = error
        worker.close()
        results.put(last)

    extra = max(1, min(base.options.workers, len(jobs))) - 1
    workers = [first, *(Worker(base.impl, folder / "logs" / f"child-{i + 1}.txt") for i in range(extra))]
    threads = [threading.Thread(target=serve, args=(w,), daemon=True) for w in workers]
    for thread in threads:
        thread.start()
    running = len(threads)
    try:
        while running:
            result = results.get()
            if result is None:
                running -= 1
            elif isinstance(result, BaseException):
                raise result
            else:
                yield result
    finally:  # also where somebody interrupts: no child is left behind
        for worker in workers:
            worker.close()


def _scenario(worker: Worker, scenario: Scenario, folder: Path, say: Callable[[str], None]) -> ScenarioRecord:
    say(f"recording {scenario.id}")
    started = time.monotonic()
    job = _job(scenario.id, scenario.profile, folder)
    status, detail = COMPLETE, ""
    try:
        answer = worker.ask(job, patience=PATIENCE.get(scenario.profile, 1.0))
        if not answer.ok:
            status, detail = DIED, answer.detail
        elif "not_run" in answer.body:
            status, detail = NOT_RUN, answer.body["not_run"]
    except Lost as lost:
        status, detail = lost.status, lost.detail
    return ScenarioRecord(
        id=scenario.id,
        profile=scenario.profile,
        status=status,
        trace=os.path.relpath(job.trace, job.folder),
        detail=detail,
        seconds=round(time.monotonic() - started, 3),
        golden=scenario.golden,
    )


def _explore(
    worker: Worker, scenario: Scenario, options: Options, folder: Path, say: Callable[[str], None]
) -> ExplorationRecord:
    say(f"exploring {scenario.id}")
    started = time.monotonic()
    trace = folder / "traces" / scenario.profile / scenario.id
    trace.parent.mkdir(parents=True, exist_ok=True)
    job = Job(
        "explore",
        id=scenario.id,
        folder=str(folder.resolve()),
        trace=str(trace.resolve()),
        depth=options.depth,
        fault_depth=options.fault_depth,
    )
    at = Path(job.trace + ".at")
    try:
        answer = worker.ask(job, lambda runs: say(f"exploring {scenario.id}: {runs} runs"))
        if answer.ok:
            found = msgspec.convert(answer.body, ExplorationRecord)
            return msgspec.structs.replace(found, seconds=round(time.monotonic() - started, 3))
        status, detail = DIED, answer.detail
    except Lost as lost:
        status, detail = lost.status, lost.detail
    finally:
        sequence = at.read_text(errors="replace").strip() if at.exists() else ""
        at.unlink(missing_ok=True)
    return ExplorationRecord(
        id=scenario.id,
        profile=scenario.profile,
        status=status,
        detail=f"{detail}; after: {sequence}" if sequence else detail,
        seconds=round(time.monotonic() - started, 3),
    )

"""The runner: children that import the implementation, scenarios and exploration spread over them, deadlines.

Knows processes, deadlines and where evidence lies. Does not know rules or what a trace means.

A child that hangs or dies costs what it was running; a fresh one takes its place. In the smoke stage (import, build,
one cycle, close) that is a problem of the whole run; later the scenario is recorded as `hang` or `died`.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from colocert.record.control_run import ControlRun
from colocert.record.jobs import Job
from colocert.record.manifest import (
    COMPLETE,
    DIED,
    HANG,
    NOT_RUN,
    ExplorationRecord,
    Options,
    Problem,
    Record,
    ScenarioRecord,
    write_record,
)
from colocert.record.process import Lost, Worker
from colocert.record.registry import ALL_SCENARIOS, PATIENCE, smoke
from colocert.record.resolve import HARNESS
from colocert.record.scenarios import EXPLORATIONS, Scenario
from colocert.rig.contract import Claims
from colocert.rules.catalogue import catalogue

FULL_DEPTH, HIGH_COST_FAULT_DEPTH = 6, 3


def record(impl: str, folder: Path, options: Options, progress: Callable[[str], None] | None = None) -> Record:
    """Records everything that the options ask for into the folder, and writes its index.

    Whatever is wrong with the implementation comes back in the record: as its `problem`, or scenario by scenario.
    """
    started = time.monotonic()
    say = progress or (lambda _: None)
    _clear(folder)
    say(f"importing {impl}")
    worker = Worker(impl, folder / "logs" / "child-0.txt")
    controls = ControlRun(folder / "logs" / "controls.txt") if options.controls else None
    try:
        base, problem = _load(worker, Record(impl=impl, options=options))
        if problem is None and controls is not None:
            controls.start(_required(base), _ran(base))
        problem = problem or _first_cycles(worker, base, folder)
        if problem is None:
            base = _everything(worker, base, folder, say)
            if controls is not None:
                base = msgspec.structs.replace(base, controls=controls.result(say))
        result = msgspec.structs.replace(base, problem=problem)
    finally:
        worker.close()
        if controls is not None:
            controls.close()
    result = msgspec.structs.replace(result, seconds=round(time.monotonic() - started, 3))
    write_record(folder, result)
    return result


def _clear(folder: Path) -> None:
    """Removes what an earlier recording left in the folder, and nothing else."""
    for name in ("traces", "transcripts", "logs"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "record.json").unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)


def _load(worker: Worker, base: Record) -> tuple[Record, Problem | None]:
    """Imports the implementation: its name, its claims, its profiles."""
    try:
        answer = worker.start()
    except Lost as lost:
        what = "hung" if lost.status == HANG else "ended the process"
        return base, Problem("import", f"importing the implementation {what} ({lost.detail})", HARNESS)
    if answer.problem is not None:
        return base, answer.problem
    body = answer.body
    loaded = msgspec.structs.replace(
        base,
        name=body["name"],
        version=body["version"],
        claims=body["claims"],
        claimed=tuple(body["profiles"]),
        options=_depths(base.options, body["build_cost"]),
    )
    return loaded, None


def _ran(base: Record) -> list[str]:
    """The profiles that this run has."""
    return [p for p in base.claimed if not base.options.profiles or p in base.options.profiles]


def _required(base: Record) -> list[str]:
    """The rules that must hold, of the run's profiles."""
    ran = _ran(base)
    return [r.id for r in catalogue().values() if r.profile in ran and r.level == "must" and r.bound(base.claims)]


def _first_cycles(worker: Worker, base: Record, folder: Path) -> Problem | None:
    """The smoke stage: build, one cycle, close, profile by profile."""
    claims = Claims.of({**base.claims})
    return next(filter(None, (_smoke(worker, profile, claims, folder) for profile in _ran(base))), None)


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
    ran = _ran(base)
    scenarios = [s for s in ALL_SCENARIOS if s.profile in ran and s.wanted(claims) and base.options.scenarios]
    explorations = [s for s in EXPLORATIONS if s.profile in ran and s.wanted(claims) and base.options.depth]
    jobs: list[Callable[[Worker], ScenarioRecord | ExplorationRecord]] = [
        *(partial(_explore, scenario=e, options=base.options, folder=folder, say=say) for e in explorations),
        *(partial(_scenario, scenario=s, folder=folder, say=say) for s in scenarios),
    ]
    done = list(_spread(jobs, first, base, folder))
    order = {s.id: i for i, s in enumerate((*scenarios, *explorations))}
    done.sort(key=lambda d: order[d.id])
    return msgspec.structs.replace(
        base,
        scenarios=tuple(d for d in done if isinstance(d, ScenarioRecord)),
        explorations=tuple(d for d in done if isinstance(d, ExplorationRecord)),
    )


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

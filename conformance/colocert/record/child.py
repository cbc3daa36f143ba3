"""The runner child: imports one implementation and runs the jobs that its parent sends, one at a time.

Knows how to run a job and how to answer. Does not know deadlines, other children or rules' outcomes: whatever happens
to this process, the parent notices.

Jobs and answers are JSON objects, a line each, on two pipes of their own; standard output and error belong to the
implementation. A trace goes to its file event by event, so what was written before a death stays.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from colocert.record import controls
from colocert.record.drive import NotRun, ProcessGone, TrainerShapeError
from colocert.record.explore import Explorer
from colocert.record.jobs import Answer, Job
from colocert.record.manifest import ExploredFinding, Problem
from colocert.record.registry import BY_ID, run, smoke
from colocert.record.resolve import HARNESS, USAGE, ResolveError, resolve
from colocert.record.scenarios import EXPLORATIONS, Scenario
from colocert.rig.contract import FACTORIES, Claims, ContractError, check_implementation
from colocert.rules.catalogue import catalogue
from colocert.trace import SCHEMA_VERSION, TraceWriter
from colocert.trace.events import Header

PROGRESS_SECONDS = 0.5


class Child:
    """The state of this process: the implementation, once loaded."""

    def __init__(self) -> None:
        self.implementation: Any = None
        self.name = self.version = ""
        self.claims: Claims | None = None

    def load(self, job: Job) -> Answer:
        """Imports the implementation and checks its shape."""
        try:
            self.implementation = resolve(job.impl)
            self.name, self.version, self.claims, profiles = check_implementation(
                self.implementation, f"--impl={job.impl}"
            )
        except ResolveError as error:
            return Answer(ok=False, problem=error.problem)
        except ContractError as error:
            return Answer(ok=False, problem=Problem("claims", " ".join(str(error).split()), USAGE))
        cost = str(getattr(self.implementation, "build_cost", "low"))
        return Answer(
            body={
                "name": self.name,
                "version": self.version,
                "claims": self.claims.facts(),
                "profiles": profiles,
                "build_cost": cost,
            }
        )

    def scenario(self, job: Job) -> Answer:
        """Runs one scenario into its trace file."""
        assert self.claims is not None
        first = smoke(job.id.removeprefix("smoke-"), self.claims) if job.id.startswith("smoke-") else None
        return self._run(first or BY_ID[job.id], Path(job.trace))

    def _run(self, scenario: Scenario, path: Path) -> Answer:
        assert self.claims is not None
        header = Header(schema=SCHEMA_VERSION, scenario=scenario.id, profile=scenario.profile, implementation=self.name)
        writer = TraceWriter(path, header)
        try:
            run(self.implementation, self.claims, scenario, writer)
        except NotRun as error:
            return Answer(body={"not_run": str(error)})
        except ProcessGone as error:
            return Answer(ok=False, detail=str(error))
        except TrainerShapeError as error:
            return Answer(ok=False, detail=str(error), problem=Problem("factory", str(error), HARNESS))
        except Exception as error:
            problem = _factory_problem(error, FACTORIES[scenario.profile])
            return Answer(ok=False, problem=problem, detail=f"{type(error).__name__}: {error}")
        finally:
            writer.close()
        return Answer()

    def explore(self, job: Job, send: Any) -> Answer:
        """Explores one configuration; what it finds is written as traces, shortest sequence first."""
        assert self.claims is not None
        scenario = next(s for s in EXPLORATIONS if s.id == job.id)
        at = os.open(job.trace + ".at", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        last = time.monotonic()

        def note(sequence: str) -> None:
            nonlocal last
            os.pwrite(at, sequence.encode().ljust(512)[:512], 0)
            if time.monotonic() - last > PROGRESS_SECONDS:
                last = time.monotonic()
                send(Answer(progress=True, detail=str(explorer.runs)))

        explorer = Explorer(self.implementation, self.claims, scenario, list(catalogue().values()), note=note)
        try:
            record = explorer.run(job.depth, job.fault_depth)
        except ProcessGone as error:
            return Answer(ok=False, detail=str(error))
        except (TrainerShapeError, Exception) as error:
            return Answer(ok=False, problem=_factory_problem(error), detail=f"{type(error).__name__}: {error}")
        finally:
            os.close(at)
        findings = tuple(self._kept(job, scenario, found) for found in explorer.discoveries.values())
        return Answer(body=msgspec.to_builtins(msgspec.structs.replace(record, findings=findings)))

    def controls(self, job: Job) -> Answer:
        """Judges the controls of these rules."""
        return Answer(body={"controls": msgspec.to_builtins(controls.run(job.rules))})

    def selftest(self, job: Job) -> Answer:
        """Runs one of the suite's own fixtures."""
        teeth = importlib.import_module("colocert_fixtures.selftest")
        rows = teeth.run(job.id, job.profiles, explore=bool(job.depth))
        return Answer(body={"rows": msgspec.to_builtins(rows)})

    def _kept(self, job: Job, scenario: Scenario, found: Any) -> ExploredFinding:
        steps = tuple(step for taken in found.path for step in taken.steps())
        name = f"{scenario.id}-{found.rule}-{found.code}"
        again = Scenario(name, scenario.config, steps, scenario.needs)
        trace = f"{job.trace}-{found.rule}-{found.code}.jsonl"
        self._run(again, Path(trace))
        return ExploredFinding(
            rule=found.rule,
            code=found.code,
            steps=steps,
            trace=os.path.relpath(trace, job.folder),
            paste=again.paste(),
            times=found.times,
        )


def _factory_problem(error: Exception, factory: str = "trainer") -> Problem:
    abstract = isinstance(error, TypeError) and "abstract" in str(error)
    text = " ".join(str(error).split())
    made = "a trainer" if factory == "trainer" else "what the contract says"
    message = f"the factory {factory}(rig) must return {made} (got {type(error).__name__}: {text})"
    return Problem("factory", message, USAGE if abstract else HARNESS)


def main(read_fd: int, write_fd: int) -> None:
    """Serves jobs until the parent closes its end."""
    encoder = msgspec.json.Encoder()
    child = Child()

    def send(answer: Answer) -> None:
        line = encoder.encode(answer) + b"\n"
        while line:
            line = line[os.write(write_fd, line) :]

    with open(read_fd, "rb", closefd=False) as jobs:
        for line in jobs:
            job = msgspec.json.decode(line, type=Job)
            if job.kind == "explore":
                send(child.explore(job, send))
            else:
                send(getattr(child, job.kind)(job))
            sys.stdout.flush()
            sys.stderr.flush()

"""The controller's run: records before the session, notes what ran, and settles the verdict after it.

Knows the order of things and the exit codes. Does not know rules or events. A plugin of its own, registered only
where `--impl` is given and never in an xdist worker, so that one process writes files.

    record()                 evidence folder, transcripts; or one line and an exit code
    pytest_configure_node    the folder's path goes to xdist workers
    pytest_runtest_logreport what ran
    pytest_sessionfinish     verdict, certificate, exit code; the verdict is the last line
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest

from colocert.expected import FILE, Expected, ExpectedError, read_expected
from colocert.judge import (
    EXIT_CODES,
    EXPECTED,
    FAIL,
    HARNESS_ERROR,
    USAGE_ERROR,
    Evidence,
    Judged,
    Selection,
    judge,
    narrowed_by,
)
from colocert.plugin import WORKER_EVIDENCE, WORKER_EXPECT
from colocert.record.manifest import EvidenceError, Options, Problem, Record
from colocert.record.runner import record
from colocert.report import github, html, pages, terminal
from colocert.report.certificate import certificate, digests, write_certificate
from colocert.report.peaks import Peaks, highest_peaks
from colocert.report.transcript import write_transcripts
from colocert.rules.catalogue import PROFILES
from colocert.suite.items import evidence_at
from colocert.suite.outputs import Outputs, progress
from colocert.trace import TraceError

USAGE, HARNESS = EXIT_CODES[USAGE_ERROR], EXIT_CODES[HARNESS_ERROR]
KEPT_FOLDERS = 3


class Run:
    """One run on the controller. `folder` is the evidence folder, `judged` the verdict once it is settled."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.option = config, config.option
        self.started = datetime.now(timezone.utc)
        self.here = config.invocation_params.dir
        self.folder = Path()
        self.judged: Judged | None = None
        self.expect: Path | None = None
        self.expected: tuple[Expected, ...] = ()
        self.outputs = next((p for p in config.pluginmanager.get_plugins() if isinstance(p, Outputs)), None)
        self.peaks: tuple[Peaks, ...] = ()
        self.interrupted = False
        self._ran: set[str] = set()
        self._others_failed = 0

    # ---- before the session

    def record(self) -> int | None:
        """Records, judges every trace once, and writes the transcripts. An exit code if the run ends here."""
        problem = self._cleared() or self._misused()
        if problem is not None:
            return self._end(problem)
        try:
            recorded = self._recorded()
            if recorded.problem is not None:
                return self._end(recorded.problem, recorded)
            evidence_at(str(self.folder)).cases  # noqa: B018
            if not self._given_traces():
                write_transcripts(self.folder, recorded)
        except (TraceError, EvidenceError) as error:
            code = USAGE if self._given_traces() else HARNESS
            return self._end(Problem("evidence", str(error), code))
        except OSError as error:
            return self._end(Problem("evidence", f"the evidence folder must be writable (got {error})", USAGE))
        except KeyboardInterrupt:
            print("\ncolocert: interrupted while recording: no verdict, no certificate", file=sys.stderr)
            return int(pytest.ExitCode.INTERRUPTED)
        return None

    def _misused(self) -> Problem | None:
        """What is wrong with the options themselves."""
        option = self.option
        unknown = [p for p in self._profiles() if p not in PROFILES]
        told = ""
        if unknown:
            told = f"--profile names profiles of {', '.join(PROFILES)} (got {', '.join(unknown)})"
        elif option.colocert_depth < 0 or option.colocert_fault_depth < 0:
            told = (
                f"--depth and --fault-depth are 0 or more (got {option.colocert_depth}, {option.colocert_fault_depth})"
            )
        elif wrong := self._unwritable_report():
            told = wrong
        elif option.colocert_snapshot_dir and not hasattr(option, "update_snapshots"):
            told = "--snapshot-dir needs the syrupy plugin, which is switched off"
        elif getattr(option, "update_snapshots", False) and not option.colocert_snapshot_dir:
            told = "--snapshot-update writes transcripts and needs --snapshot-dir=DIR"
        elif getattr(option, "update_snapshots", False) and os.environ.get("CI"):
            told = "--snapshot-update refuses to run where CI is set: golden transcripts are accepted by a person"
        if not told:
            try:
                self._read_expected()
            except ExpectedError as error:
                told = str(error)
        return Problem("options", told, USAGE) if told else None

    def _read_expected(self) -> None:
        """The list that `--expect` names, or the one in the rootdir if there is one."""
        given = self.option.colocert_expect
        path = self._at(given) if given else self.config.rootpath / FILE
        if given or path.is_file():
            self.expect, self.expected = path, read_expected(path)

    def _report_path(self) -> Path | None:
        return self._at(self.option.colocert_report) if self.option.colocert_report else None

    def _unwritable_report(self) -> str:
        """Why the report cannot be written; removes an older run's, which must not stand for this one."""
        path = self._report_path()
        if path is None:
            return ""
        try:
            pages.check_extra("--report")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
        except (OSError, pages.MissingExtra) as error:
            return str(error) if isinstance(error, pages.MissingExtra) else f"--report must be writable (got {error})"
        return "" if os.access(path.parent, os.W_OK) else f"--report must be writable (got {path})"

    def _profiles(self) -> tuple[str, ...]:
        named = (p.strip() for p in self.option.colocert_profile.split(","))
        return tuple(dict.fromkeys(p for p in named if p))

    def _given_traces(self) -> bool:
        return str(self.option.colocert_impl).startswith("trace:")

    def _recorded(self) -> Record:
        if self._given_traces():
            self.folder = self._at(self.option.colocert_impl.removeprefix("trace:"))
            return evidence_at(str(self.folder)).record
        given = self.option.colocert_evidence
        self.folder = self._at(given) if given else temporary_folder()
        workers = max(1, int(getattr(self.option, "numprocesses", None) or 1))
        options = Options(
            profiles=self._profiles(),
            depth=self.option.colocert_depth,
            faults=self.option.colocert_faults,
            fault_depth=self.option.colocert_fault_depth,
            asked_fault_depth=self.option.colocert_fault_depth,
            workers=workers,
        )
        with importable(self.here), self._progress() as say:
            return record(self.option.colocert_impl, self.folder, options, say)

    def _at(self, named: str) -> Path:
        return (self.here / named).resolve()

    def _progress(self) -> contextlib.AbstractContextManager[Any]:
        """What is being recorded; nothing with `-q`, unless it is `certify`."""
        if self.option.verbose < 0 and self.outputs is None:
            return contextlib.nullcontext()
        return progress(log=self.outputs is not None)

    def _end(self, problem: Problem, recorded: Record | None = None) -> int:
        """One line, and for a harness problem the certificate that says so."""
        message = " ".join(problem.message.split())
        verdict = USAGE_ERROR if problem.exit_code == USAGE else HARNESS_ERROR
        if problem.exit_code == HARNESS:
            base = recorded or Record(impl=self.option.colocert_impl, options=Options(profiles=self._profiles()))
            base = msgspec.structs.replace(base, problem=problem)
            self.judged = Judged(base, verdict, {}, (), self._selection(base, ()), (message,))
            self._write_report(None)
            self._write()
        elif self.outputs is not None:
            self.outputs.write_problem(verdict, message)
        if github.wanted():
            print(github.command("error", f"colocert {verdict}", message))
        print(f"colocert: {verdict}: {message}", file=sys.stderr)
        return problem.exit_code

    # ---- the session

    def pytest_report_header(self) -> list[str]:
        kept = evidence_at(str(self.folder)).record
        counts = f"{len(kept.scenarios)} scenarios and {len(kept.explorations)} explorations"
        return [f"colocert: {kept.name} {kept.version}, {counts} in {kept.seconds:.1f} s", f"evidence: {self.folder}"]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[WORKER_EVIDENCE] = str(self.folder)
        node.workerinput[WORKER_EXPECT] = str(self.expect or "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        facts = dict(report.user_properties)
        case = f"{facts.get('rule')}[{facts.get('scenario')}]"
        if report.when == "call" and "rule" in facts:
            self._ran.add(case)
        if report.failed and not (report.when == "call" and facts.get("outcome") in (FAIL, EXPECTED)):
            self._others_failed += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._others_failed += report.failed

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """A person's Ctrl-C, or a plugin's exit; pytest and xdist stop a run with subclasses, which is not that."""
        self.interrupted = type(excinfo.value) in (KeyboardInterrupt, pytest.exit.Exception)

    # ---- after it

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """Around every other plugin's: settled before their summaries, and the last word after them."""
        broken = session.exitstatus in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR)
        if not (broken or self.interrupted or self.option.collectonly):
            self._settle()
        yield
        reporter: Any = self.config.pluginmanager.getplugin("terminalreporter")
        if self.judged is None:
            if not self.option.collectonly and reporter is not None:
                reporter.write_line("colocert: the run did not reach its end: no verdict, no certificate")
            return
        code = self.judged.exit_code
        if self._others_failed and code in (EXIT_CODES["conformant"], EXIT_CODES["incomplete"]):
            code = int(pytest.ExitCode.TESTS_FAILED)
        session.exitstatus = code
        if reporter is not None:
            last = terminal.verdict_line(self.judged)
            reporter.write_line(last.text, **last.markup)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.judged is None:
            return
        terminalreporter.write_sep("=", f"colocert: {self.judged.record.name} {self.judged.record.version}")
        for line in terminal.summary(self.judged, self.peaks):
            terminalreporter.write_line(line.text, **line.markup)
        if self._report_path() is not None:
            terminalreporter.write_line(f"report: {self._report_path()}")
        path = self._certificate_path()
        if path is not None:
            terminalreporter.write_line(f"certificate: {path}")
        if github.wanted():
            for command in github.commands(self.judged):
                terminalreporter.write_line(command)

    def _settle(self) -> None:
        evidence: Evidence = evidence_at(str(self.folder))
        left_out = [c for c in (f"{c.rule}[{c.scenario}]" for c in evidence.cases) if c not in self._ran]
        self.judged = judge(evidence, self._selection(evidence.record, tuple(left_out)))
        self.peaks = highest_peaks(evidence)
        self._write_report(evidence)
        self._write()

    def _selection(self, recorded: Record, left_out: tuple[str, ...]) -> Selection:
        return Selection(
            profiles=self._profiles() or recorded.options.profiles,
            level=self.option.colocert_level,
            left_out=left_out,
            narrowed=tuple(narrowed(self.option, recorded.options)),
            expected=self.expected,
        )

    def _write_report(self, evidence: Evidence | None) -> None:
        path = self._report_path()
        if path is not None and self.judged is not None:
            facts = {"started": self.started.isoformat(timespec="seconds"), "evidence": str(self.folder)}
            pages.write_page(path, html.report(self.judged, evidence, self.peaks, facts))

    def _certificate_path(self) -> Path | None:
        given = self.option.colocert_certificate
        return self._at(given) if given else None

    def _cleared(self) -> Problem | None:
        """An older run's certificate must not stand for this one, however it ends."""
        path = self._certificate_path()
        try:
            if path is not None:
                path.unlink(missing_ok=True)
                path.parent.mkdir(parents=True, exist_ok=True)
            if self.outputs is not None:
                self.outputs.clear(path)
        except OSError as error:
            return Problem("outputs", f"what is to be written must be writable (got {error})", USAGE)
        return None

    def _write(self) -> None:
        path = self._certificate_path()
        if self.judged is None or (path is None and self.outputs is None):
            return
        facts = {
            "started": self.started.isoformat(timespec="seconds"),
            "seconds": round((datetime.now(timezone.utc) - self.started).total_seconds(), 3),
            "workers": self.judged.record.options.workers,
            "evidence": str(self.folder),
            **digests(self.folder, self.judged.record),
        }
        made = certificate(self.judged, facts, self.peaks)
        if path is not None:
            write_certificate(path, made)
        if self.outputs is not None:
            self.outputs.write(made, path)


def narrowed(option: Any, recorded: Options) -> Iterator[str]:
    """The options that make a run less than complete, as they are written on the command line."""
    given = {
        "-k": getattr(option, "keyword", ""),
        "-m": getattr(option, "markexpr", ""),
        "--lf": getattr(option, "lf", False),
        "--sw": getattr(option, "stepwise", False),
        "--deselect": getattr(option, "deselect", None),
        "--runxfail": getattr(option, "runxfail", False),
        "-x or --maxfail": getattr(option, "maxfail", 0),
    }
    yield from (name for name, value in given.items() if value)
    yield from narrowed_by(recorded)


@contextlib.contextmanager
def importable(folder: Path) -> Iterator[None]:
    """The folder comes last on the path while recording: `--impl=mypkg` finds a package where the command was given."""
    added = str(folder)
    if added in sys.path or "" in sys.path:
        yield
        return
    sys.path.append(added)
    try:
        yield
    finally:
        sys.path.remove(added)


def temporary_folder() -> Path:
    """A new folder for evidence. The newest few stay for reading; older ones go once they are an hour old."""
    root = Path(tempfile.gettempdir()) / f"colocert-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise PermissionError(f"{root} belongs to another user: give --evidence=DIR")
    earlier = sorted(root.iterdir(), key=lambda p: p.stat().st_mtime, reverse=True)
    for old in earlier[KEPT_FOLDERS - 1 :]:
        if time.time() - old.stat().st_mtime > 3600:
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix="evidence-", dir=root))

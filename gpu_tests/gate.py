"""What a run of gpu_tests must have done before it may be green: options, the preflight, and the verdict of every row.

Knows pytest, the table of rows and the preflight's report. Does not know what a row does.

    start            before anything is collected: the preflight; a required GPU that is not there ends here, exit 1
    Gate             leaves out, by name, what this device and world cannot run; then watches
                     where a kind or a world is required, a skip, a skip mark and an xfail are failures, and a
                     required row without a verdict fails the session

Nothing is required: a developer's run, in which a skip is a skip.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from . import report
from .table import HOST, TABLE, Shard, Split, load, split

KINDS = ("b300", "gb300", "h200", "b200", "any")
HERE = Path(__file__).parent
ROW = "colocert_row"
"""The row of a test, among its user properties: these reach the controller of an xdist run."""


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    device: str
    kind: str
    world: int
    required: bool
    calibrate: bool
    shard: Shard


def add_options(parser: pytest.Parser) -> None:
    """The options of gpu_tests; their names are fixed."""
    add = parser.getgroup("gpu_tests", "colocert: rows on real device memory").addoption
    add(
        "--device",
        dest="gpu_device",
        choices=("host", "cuda"),
        help="the stand-in driver or a GPU (default: host; cuda with --require-gpu)",
    )
    add(
        "--require-gpu",
        dest="gpu_kind",
        choices=KINDS,
        help="fail, with one line, unless this kind of GPU is here; nothing may be skipped",
    )
    add(
        "--require-world",
        dest="gpu_world",
        type=int,
        metavar="N",
        help="run every row for up to N devices (host: ranks); nothing may be skipped",
    )
    add("--calibrate", dest="gpu_calibrate", action="store_true", help="measure what GPU.md's first run is to find out")


def asked(config: pytest.Config) -> Asked:
    """The options, made whole. `UsageError` where they contradict each other."""
    # A run that comes upon this folder from above (`pytest .`) knows the folder's conftest too late for its options.
    kind, least, device = (getattr(config.option, f"gpu_{name}", None) for name in ("kind", "world", "device"))
    device = device or ("cuda" if kind else HOST)
    if device == HOST and kind:
        raise pytest.UsageError(f"--require-gpu={kind} needs a GPU, got --device=host: leave --device out")
    if device == "cuda" and getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("rows on a GPU need it to themselves, got -n: run them in one process (-n 0)")
    if least is not None and least < 1:
        raise pytest.UsageError(f"--require-world must be 1 or more, got {least}")
    try:
        shard = Shard.parse(os.environ.get("COLOCERT_SHARD", ""))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    return Asked(
        device=device,
        kind=HOST if device == HOST else kind or "any",
        world=least or (8 if device == HOST else 1),
        required=kind is not None or least is not None,
        calibrate=getattr(config.option, "gpu_calibrate", False),
        shard=shard,
    )


def preflight(kind: str, world: int) -> dict[str, Any]:
    """The report of `python -m colocert.preflight`, which keeps CUDA out of this process."""
    command = [sys.executable, "-m", "colocert.preflight", "--kind", kind, "--world", str(world), "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or [f"exit {done.returncode} without a word"])[-1]
        found = {"ok": False, "line": f"the preflight ended without a report: {last}", "facts": {}, "checks": []}
    return found


def start(config: pytest.Config) -> int | None:
    """Runs the preflight; an exit code where it ends the run, with one line on standard error."""
    if hasattr(config, "workerinput") or any(
        getattr(config.option, name, None) for name in ("help", "version", "markers", "showfixtures", "cacheshow")
    ):
        return None
    wanted = asked(config)
    found = preflight(wanted.kind, wanted.world)
    config.stash[FOUND] = found
    if found["ok"]:
        return None
    missing = wanted.device == "cuda" and not found["facts"].get("cards")
    if wanted.required or missing:
        print(f"gpu_tests: {found['line']}", file=sys.stderr)
        return int(pytest.ExitCode.TESTS_FAILED)
    return None


FOUND = pytest.StashKey[dict[str, Any]]()
"""The preflight's report, on the controller."""


class Gate:
    """The plugin of one run, in the controller and in every xdist worker."""

    def __init__(self, config: pytest.Config, table: Path = TABLE) -> None:
        self.config = config
        self.asked = asked(config)
        self.rows = load(table)
        self.split: Split = split(
            self.rows.values(),
            device=self.asked.device,
            kind=self.asked.kind,
            world=self.asked.world,
            shard=self.asked.shard,
            torch=self.asked.required or importlib.util.find_spec("torch") is not None,  # required: red without it
        )
        self.watch = report.Watch()
        self.measured: dict[str, Any] = {}

    @property
    def controls(self) -> bool:
        """Whether this process sees every report and decides the exit code."""
        return not hasattr(self.config, "workerinput")

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """The mutants of the rows are no rows: they run where somebody names them."""
        mutants = HERE / "mutants"
        named = (Path(self.config.invocation_params.dir, arg.split("::")[0]) for arg in self.config.args)
        if collection_path == mutants and not any(mutants in (path, *path.parents) for path in named):
            return True
        return None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        required = {row.id for row in self.split.required}
        kept: list[pytest.Item] = []
        dropped: list[pytest.Item] = []
        for item in items:
            if HERE not in item.path.parents or HERE / "mutants" in item.path.parents:
                kept.append(item)
                continue
            measures = item.get_closest_marker("calibration") is not None
            row = None if measures else self._row(item)
            wanted = measures if self.asked.calibrate else row in required
            (kept if wanted else dropped).append(item)
            if row:
                item.user_properties.append((ROW, row))
        if dropped:
            self.config.hook.pytest_deselected(items=dropped)
            items[:] = kept

    def _row(self, item: pytest.Item) -> str:
        mark = item.get_closest_marker("row")
        row = mark.args[0] if mark and mark.args else None
        if row not in self.rows:
            raise pytest.UsageError(
                f"{item.nodeid}: every test of gpu_tests names a row of rows.toml, got {row!r}; mark it with "
                '`@pytest.mark.row("G02")`'
            )
        return str(row)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        made = yield
        row = dict(item.user_properties).get(ROW)
        if self.asked.required and row and (made.skipped or hasattr(made, "wasxfail")):
            said = getattr(made, "wasxfail", None) or _reason(made.longrepr)
            how = "marked as an expected failure" if hasattr(made, "wasxfail") else "skipped"
            made.outcome = "failed"
            made.longrepr = f"{row} is required in this run and may not be {how}: {said}"
            if hasattr(made, "wasxfail"):
                del made.wasxfail
        return made

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = dict(report.user_properties).get(ROW)
        if self.controls and row:
            noted = [(name, value) for name, value in report.user_properties if name != ROW]
            self.watch.add(str(row), report.when, report.outcome, report.duration, noted)

        measured = dict(report.user_properties).get("measured")
        if self.controls and measured is not None and self.asked.calibrate and report.when == "call":
            name = report.nodeid.partition("[")[2].rstrip("]")
            self.measured[name] = measured

    @property
    def missing(self) -> list[str]:
        """The rows that this run must judge and did not."""
        return [row.id for row in self.split.required if not self.watch.outcome(row.id)]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self.controls or self.config.option.collectonly:
            return
        if self.asked.calibrate:
            found = self.config.stash.get(FOUND, {})
            facts = report.result(kind=self.asked.kind, measured=self.measured, preflight=found)
            self.written = report.save(facts, self.folder / f"calibration-{self.asked.kind}.json")
            return
        if self.watch.rows:
            self.written = report.write(self.result(), self.folder)
        if self.asked.required and self.missing and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    written: Path | None = None

    @property
    def folder(self) -> Path:
        """Where reports go: `$COLOCERT_REPORT_DIR`, else build/gpu."""
        return Path(os.environ.get("COLOCERT_REPORT_DIR") or self.config.rootpath / "build" / "gpu")

    def result(self) -> dict[str, Any]:
        """This run, as report.py compares and stores it."""
        found = self.config.stash.get(FOUND, {})
        return report.result(
            kind=self.asked.kind,
            world=self.asked.world,
            shard=str(self.asked.shard),
            required=self.asked.required,
            rows=self.watch.rows,
            left_out=self.split.left_out,
            versions=report.versions(),
            preflight=found,
        )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        if self.asked.calibrate and self.written:
            terminalreporter.section("measured", "-")
            for name, values in self.measured.items():
                write(f"{name}: {', '.join(f'{key} {value}' for key, value in values.items())}")
            write(f"wrote {self.written}")
        if self.asked.calibrate or self.config.option.collectonly or not (self.watch.rows or self.asked.required):
            return
        terminalreporter.section("rows", "-")
        judged = [row for row in self.rows if self.watch.outcome(row)]
        write(f"{self.asked.kind}, world {self.asked.world}, shard {self.asked.shard}: {len(judged)} rows judged")
        for reason in dict.fromkeys(self.split.left_out.values()):
            write(f"left out: {_names(r for r, why in self.split.left_out.items() if why == reason)}: {reason}")
        for row, names in self.watch.defaults().items():
            write(f"{row} ran with the wide default of {', '.join(names)}: no calibrated value for {self.asked.kind}")
        if self.missing:
            write(f"no verdict: {_names(self.missing)}", red=self.asked.required)
        found = self.config.stash.get(FOUND, {})
        if found and not found["ok"]:
            write(f"preflight, not required here: {found['line']}")
        if self.written:
            write(f"wrote {self.written}")


def _names(rows: Any) -> str:
    return ", ".join(rows)


def _reason(longrepr: Any) -> str:
    return str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)

"""`colocert selftest`: every mutant and every variant that ships, run here, and the suite's teeth as a table.

Knows children, tables and exit codes. Does not know when a fixture is void; and imports `colocert_fixtures` only when
the command runs.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import queue
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FIXTURES = "colocert_fixtures"
SHOWN, VOID, USAGE, NOTHING_RAN = 0, 1, 4, 10
DEADLINE = 300.0
"""Seconds for one fixture: all its scenarios, and its exploration with `--explore`."""


def register(commands: Any) -> None:
    """Adds the command to those of `colocert`."""
    command = commands.add_parser("selftest", help="run the suite's mutants and variants and show what catches what")
    command.add_argument("--profile", default="", metavar="A,B", help="profiles to show (default: all with rules)")
    command.add_argument("--only", default="", metavar="TEXT", help="fixtures whose name holds this text")
    command.add_argument("--explore", action="store_true", help="explore each one too; takes minutes")
    command.add_argument("-n", dest="workers", type=int, default=1, metavar="N", help="children")
    command.set_defaults(run=_selftest)


def _selftest(arguments: argparse.Namespace) -> int:
    from colocert.rules.catalogue import profiles_with_rules

    if importlib.util.find_spec(FIXTURES) is None:
        return _told(f"{FIXTURES} must be installed (got none): it ships in the wheel of colocert")
    known = profiles_with_rules()
    profiles = tuple(dict.fromkeys(p.strip() for p in arguments.profile.split(",") if p.strip())) or known
    unknown = [p for p in profiles if p not in known]
    if unknown:
        return _told(f"--profile names profiles that have rules, of {', '.join(known)} (got {', '.join(unknown)})")
    teeth = importlib.import_module(f"{FIXTURES}.selftest")
    tasks = [task for task in teeth.tasks(profiles) if arguments.only in task.split()[-1]]
    rows = list(_rows(tasks, profiles, arguments.explore, max(1, arguments.workers)))
    if not arguments.only:
        rows += teeth.uncovered(rows, profiles)
    return _show(rows, profiles)


def _told(text: str) -> int:
    print(f"colocert: {text}", file=sys.stderr)
    return USAGE


# ---- running


def _rows(tasks: list[str], profiles: tuple[str, ...], explore: bool, workers: int) -> Iterator[Any]:
    """The rows of every task, in the order of the tasks; one that hangs or dies is void and costs a child."""
    from colocert.suite.outputs import progress

    pending: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    for numbered in enumerate(tasks):
        pending.put(numbered)
    results: dict[int, list[Any]] = {}
    with tempfile.TemporaryDirectory(prefix="colocert-selftest-") as logs, progress(log=True) as say:

        def note(task: str) -> None:
            if say is not None:
                say(f"{task}, {len(results)} of {len(tasks)} done")

        threads = [
            threading.Thread(
                target=_serve, args=(pending, results, profiles, explore, Path(logs) / f"{i}.txt", note), daemon=True
            )
            for i in range(min(workers, max(1, len(tasks))))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for at in range(len(tasks)):
        yield from results[at]


def _serve(
    pending: queue.SimpleQueue[tuple[int, str]],
    results: dict[int, list[Any]],
    profiles: tuple[str, ...],
    explore: bool,
    log: Path,
    note: Callable[[str], None],
) -> None:
    """Takes tasks until there is none, in one child and its replacements."""
    from colocert.record.jobs import Job
    from colocert.record.process import ChildProcess, Lost

    row = importlib.import_module(f"{FIXTURES}.selftest").Row
    child: ChildProcess | None = None
    try:
        while True:
            at, task = pending.get_nowait()
            note(task)
            child = child or ChildProcess(log)
            child.graceful = True
            try:
                answer = child.ask(Job("selftest", id=task, profiles=profiles, depth=int(explore)), DEADLINE)
                results[at] = [row(**{**facts, "also": tuple(facts["also"])}) for facts in answer.body["rows"]]
            except Lost as lost:
                child = None
                kind, *profile, name = task.split()
                results[at] = [row(kind, "".join(profile), name, "void", detail=f"{lost.status}: {lost.detail}")]
    except queue.Empty:
        pass
    finally:
        if child is not None:
            child.end()


# ---- showing


def _show(rows: list[Any], profiles: tuple[str, ...]) -> int:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PAGE)
    for profile in (*profiles, ""):
        mine = [row for row in rows if row.profile == profile]
        for kind, columns in _COLUMNS.items():
            shown = [row for row in mine if row.kind == kind]
            if shown:
                title = Text(f"{profile or 'of an extra'}: {kind}s", style="bold")
                table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
                for title_of_column in columns:
                    table.add_column(title_of_column, no_wrap=title_of_column != columns[-1])
                for row in shown:
                    table.add_row(*(Text(cell) for cell in _cells(row)), style=_STYLES.get(row.outcome, ""))
                console.print(table)
                console.print()
    counts = Counter((row.kind, row.outcome) for row in rows)
    for row in rows:
        if row.outcome == "void":
            console.print(Text(f"void: {row.kind} {row.name} ({row.profile}): {row.detail}"), soft_wrap=True)
    told = "; ".join(
        f"{sum(n for (k, _), n in counts.items() if k == kind)} {kind}s: "
        + ", ".join(f"{n} {outcome}" for (k, outcome), n in sorted(counts.items()) if k == kind)
        for kind in _COLUMNS
        if any(k == kind for k, _ in counts)
    )
    console.print(Text(f"colocert selftest: {told or 'there is nothing of that name'}"), soft_wrap=True)
    if any(row.outcome == "void" for row in rows):
        return VOID
    return SHOWN if any(row.outcome in ("killed", "correct") for row in rows) else NOTHING_RAN


_COLUMNS = {
    "mutant": ("mutant", "rule", "code", "outcome", "on", "also found by, or why not"),
    "variant": ("variant", "outcome", "why not"),
}
_PAGE = 160
_STYLES = {"void": "red", "not-run": "yellow"}


def _cells(row: Any) -> tuple[str, ...]:
    if row.kind == "variant":
        return row.name, row.outcome, row.detail
    return row.name, row.rule, row.code, row.outcome, row.on, row.detail or ", ".join(row.also)

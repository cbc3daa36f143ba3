"""`colocert baseline IMPL`: records, judges, and writes what fails into the list of expected failures.

Knows the command's arguments and what it tells. Does not know the file's lines.
"""

from __future__ import annotations

import argparse
import sys
from datetime import date, timedelta
from pathlib import Path
from typing import Any

DAYS = 90
"""How long a new entry is accepted where `--expiry` does not say."""


def register(commands: Any) -> None:
    """Adds the command to those of `colocert`."""
    add = commands.add_parser("baseline", help="write what fails today into the list of expected failures")
    add.add_argument("impl", metavar="IMPL", help="entry point, module, .py file[:attr], or trace:FOLDER")
    add.add_argument("--profile", default="", metavar="A,B", help="profiles to look at (default: all that IMPL has)")
    add.add_argument("--level", choices=("must", "should"), default="must", help="whether SHOULD rules are listed too")
    add.add_argument("--expect", type=Path, metavar="FILE", help="the list (default: colocert-expected.toml here)")
    add.add_argument("--issue", default="to be filed", help="issue of the new entries")
    add.add_argument("--reason", default="", help="reason of the new entries (default: what the code says is wrong)")
    add.add_argument(
        "--expiry", type=_day, metavar="DATE", help=f"last day of the new entries (default: in {DAYS} days)"
    )
    add.add_argument("-n", dest="workers", type=int, default=1, metavar="N", help="runner children")
    add.set_defaults(run=_baseline)


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a day such as 2027-03-31 (got {text})") from None


def _baseline(arguments: argparse.Namespace) -> int:
    from colocert.baseline import update
    from colocert.expected import FILE, Expected, ExpectedError, read_expected
    from colocert.judge import EXIT_CODES, FAIL, NOT_RUN, USAGE_ERROR, Selection, judge
    from colocert.report.terminal import code_text
    from colocert.rules.catalogue import PROFILES, catalogue

    path = arguments.expect or Path(FILE)
    asked = tuple(dict.fromkeys(p.strip() for p in arguments.profile.split(",") if p.strip()))
    unknown = [p for p in asked if p not in PROFILES]
    if unknown:
        return _told(f"--profile names profiles of {', '.join(PROFILES)} (got {', '.join(unknown)})")
    if arguments.expiry is not None and arguments.expiry < date.today():
        return _told(f"--expiry must not have passed (got {arguments.expiry})")
    try:
        earlier = path.read_text(encoding="utf-8") if path.exists() else ""
        update(earlier, (), {}, ())
        evidence = _evidence(arguments, asked)
        problem = evidence.record.problem
        if problem is not None:
            return _told(" ".join(problem.message.split()), problem.exit_code)
        judged = judge(evidence, Selection(asked or evidence.record.options.profiles, arguments.level))
        failing = [row for row in judged.rules if row.outcome == FAIL and row.level in ("must", arguments.level)]
        new: dict[tuple[str, str], Expected] = {}
        expiry = arguments.expiry or date.today() + timedelta(days=DAYS)
        for row in failing:
            codes = dict.fromkeys(code for case in row.cases for code in case.codes) or {row.code: None}
            for code in codes:
                reason = arguments.reason or code_text(catalogue()[row.id], code)
                new[row.id, code] = Expected(row.id, code, reason, arguments.issue, expiry)
        spoken = [row.id for row in judged.rules if row.profile in judged.profiles and row.outcome != NOT_RUN]
        made = update(earlier, new, new, spoken)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".part")
        draft.write_text(made.text, encoding="utf-8")
        draft.replace(path)
    except (ExpectedError, OSError, ValueError) as error:
        return _told(" ".join(str(error).split()))
    for what, entries in (("added", made.added), ("removed", made.removed)):
        for entry in entries:
            print(f"{what}  {entry.rule} {entry.code}: {entry.reason}")
    print(f"colocert: {path}: {len(made.added)} added, {len(made.removed)} removed, {len(made.kept)} kept")
    try:
        read_expected(path)
    except ExpectedError as error:
        return _told(str(error), EXIT_CODES[USAGE_ERROR])
    return 0


def _evidence(arguments: argparse.Namespace, asked: tuple[str, ...]) -> Any:
    """The implementation recorded in full, or the evidence that was given."""
    from colocert.judge import Evidence
    from colocert.record.manifest import Options
    from colocert.record.runner import record
    from colocert.suite.run import importable, temporary_folder

    if arguments.impl.startswith("trace:"):
        return Evidence(Path(arguments.impl.removeprefix("trace:")))
    folder = temporary_folder()
    with importable(Path.cwd()):
        record(arguments.impl, folder, Options(profiles=asked, workers=max(1, arguments.workers), controls=False))
    return Evidence(folder)


def _told(text: str, code: int = 4) -> int:
    print(f"colocert: {text}", file=sys.stderr)
    return code

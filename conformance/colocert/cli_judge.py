"""`colocert judge FILES…`: an evidence folder, one of its traces, or recordings of a real run, judged together.

Knows the command's arguments and what is printed. Does not know how files are merged or judged.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from colocert.expected import FILE, Expected, read_expected

if TYPE_CHECKING:
    from colocert.judge import Evidence, Judged
    from colocert.judge_stream import FilesJudged, Found
    from colocert.report.peaks import Peaks

USAGE = 4
_BEFORE, _AFTER = 12, 3


def files_of(given: Sequence[Path]) -> list[Path]:
    """The files that were named, and those in folders that were. Raises `ValueError` for a folder without any."""
    found: list[Path] = []
    for path in given:
        if path.is_dir():
            inside = _inside(path)
            if not inside:
                raise ValueError(f"{path} must be an evidence folder (record.json), or hold recordings (*.jsonl)")
            found += inside
        else:
            found.append(path)
    return found


def register(commands: Any) -> None:
    """Adds the command to those of `colocert`."""
    command = commands.add_parser("judge", help="judge an evidence folder, or recordings of a real run, made earlier")
    command.add_argument("files", type=Path, nargs="+", metavar="DIR|FILE", help="one evidence folder, or .jsonl files")
    command.add_argument("--level", choices=("must", "should"), default="must")
    command.add_argument("--profile", default="", metavar="A,B", help="profiles to judge (default: all there is of)")
    command.add_argument("--expect", type=Path, metavar="FILE", help=f"the list of expected failures (default: {FILE})")
    command.add_argument("--report", type=Path, metavar="FILE", help="write the verdict as one HTML page here")
    command.add_argument("--summary", type=Path, metavar="FILE", help="write a Markdown page for CI here")
    command.set_defaults(run=_judge)


class Page(NamedTuple):
    """A verdict, and what a page about it says: lines for the terminal, facts and transcripts for the others."""

    judged: Judged
    evidence: Evidence | None
    peaks: Sequence[Peaks]
    findings: Sequence[str]
    facts: dict[str, Any]
    windows: dict[tuple[str, str], str]


def _judge(arguments: argparse.Namespace) -> int:
    """Judges, prints the findings, the rules' outcomes and the verdict, writes the pages; returns the exit code."""
    from colocert.record.manifest import EvidenceError
    from colocert.report.pages import MissingExtra, check_extra
    from colocert.trace import TraceError

    try:
        if arguments.report is not None:
            check_extra("--report")
        profiles = _profiles(str(arguments.profile))
        expected = _expected(arguments.expect)
        one = arguments.files[0]
        whole = len(arguments.files) == 1 and one.is_dir() and ((one / "record.json").exists() or not _inside(one))
        made = (_of_evidence if whole else _of_files)(arguments.files, str(arguments.level), profiles, expected)
        _print(made)
        _write(made, arguments.report, arguments.summary)
    except (EvidenceError, MissingExtra, OSError, TraceError, ValueError) as error:
        print("colocert: " + " ".join(str(error).split()), file=sys.stderr)
        return USAGE
    return made.judged.exit_code


def _inside(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl"))


def _profiles(named: str) -> tuple[str, ...]:
    """The profiles of `--profile`. Raises `ValueError` for one that is not."""
    from colocert.rules.catalogue import PROFILES

    found = tuple(dict.fromkeys(part for name in named.split(",") if (part := name.strip())))
    if unknown := [name for name in found if name not in PROFILES]:
        raise ValueError(f"--profile must name some of {', '.join(PROFILES)} (got {', '.join(unknown)})")
    return found


def _expected(given: Path | None) -> tuple[Expected, ...]:
    path = given or Path(FILE)
    return read_expected(path) if given is not None or path.is_file() else ()


def _of_evidence(given: Sequence[Path], level: str, profiles: tuple[str, ...], expected: tuple[Expected, ...]) -> Page:
    from colocert.judge import Evidence, Selection, judge, narrowed_by
    from colocert.report.peaks import highest_peaks

    evidence = Evidence(given[0], profiles)
    options = evidence.record.options
    selection = Selection(profiles or options.profiles, level, narrowed=narrowed_by(options), expected=expected)
    return Page(judge(evidence, selection), evidence, highest_peaks(evidence), (), {}, {})


def _of_files(given: Sequence[Path], level: str, profiles: tuple[str, ...], expected: tuple[Expected, ...]) -> Page:
    from colocert.judge_stream import judge_files

    paths = files_of(given)
    result = judge_files(paths, level, profiles, expected)
    findings = [line for row in result.judged.rules if row.cases for line in _findings(row.id, result, paths)]
    read = f"{result.events} events of {result.ranks} processes or ranks in {len(paths)} files"
    facts = {"read": read, "notes": list(result.notes)}
    windows = {key: "\n".join(_window(found[0], paths)) for key, found in result.found.items()}
    return Page(result.judged, None, (), findings, facts, windows)


def _print(made: Page) -> None:
    from rich.console import Console

    from colocert.report.terminal import summary, verdict_line

    console = Console(highlight=False, soft_wrap=True)
    for text in made.findings:
        console.print(text, markup=False)
    for line in summary(made.judged, made.peaks):
        console.print(line.text, style=line.style or None, markup=False)
    if made.facts:
        console.print(f"read: {made.facts['read']}", markup=False)
        for note in made.facts["notes"]:
            console.print(f"note: {note}", markup=False)
    last = verdict_line(made.judged)
    console.print(last.text, style=last.style or None, markup=False)


def _write(made: Page, report: Path | None, summary: Path | None) -> None:
    """The pages that were asked for. Raises `OSError` where one cannot be written."""
    from colocert.report import html
    from colocert.report.certificate import certificate
    from colocert.report.pages import write_page
    from colocert.report.summary import page

    if report is not None:
        write_page(report, html.report(made.judged, made.evidence, made.peaks, made.facts, made.windows))
    if summary is not None:
        summary.parent.mkdir(parents=True, exist_ok=True)
        summary.write_text(page(certificate(made.judged, made.facts, made.peaks)), encoding="utf-8")


def _findings(rule_id: str, result: FilesJudged, paths: Sequence[Path]) -> Iterator[str]:
    """Each code of a rule that was broken: the first finding in full, the next ones by their places."""
    from colocert.report.terminal import code_text
    from colocert.rules.catalogue import catalogue

    rule = catalogue()[rule_id]
    for code in (c.name for c in rule.codes):
        found = result.found.get((rule_id, code))
        if not found:
            continue
        first = found[0]
        yield f"{rule.id} ({rule.level}), {code}: {code_text(rule, code)}"
        yield f"  rule        {rule.sentence}"
        yield f"  in a run    {rule.breaks}"
        yield f"  at          {_where(first, paths)}"
        yield from (f"    {text}" for text in _window(first, paths))
        yield f"  expected    {first.finding.expected}"
        yield f"  observed    {first.finding.observed}"
        more = result.counts[rule_id, code]
        if more > 1:
            yield f"  times       {more}; next at {', '.join(_where(f, paths) for f in found[1:])}"
        yield f"  fix         {rule.fix}"
        yield ""


def _where(found: Found, paths: Sequence[Path]) -> str:
    return f"{paths[found.place.file]}:{found.place.line}, rank {found.finding.rank}"


def _window(found: Found, paths: Sequence[Path]) -> Iterator[str]:
    """The lines of that file and rank around the finding, as a transcript, the one with the finding marked."""
    from colocert.report.transcript import lines
    from colocert.trace.merge import Source

    source = Source(paths[found.place.file], 0)
    kept: deque[tuple[int, object]] = deque(maxlen=_BEFORE + 1 + _AFTER)
    after = 0
    while (event := source.next()) is not None:
        if event.rank == found.finding.rank:
            kept.append((source.line, event))
            after += source.line > found.place.line
        if after == _AFTER or (source.line > found.place.line + 1000):
            break
    events = [event for _, event in kept]
    for line in lines(events):  # type: ignore[arg-type]
        yield ("> " if line.seq == found.finding.seq else "  ") + line.text

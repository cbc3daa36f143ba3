"""`colocert judge FILES…`: recordings of a real run, or one trace, judged together; an evidence folder goes elsewhere.

Knows the command's arguments and what is printed. Does not know how files are merged or judged.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colocert.judge_stream import FilesJudged, Found
    from colocert.report.terminal import Styled

USAGE = 4
_BEFORE, _AFTER = 12, 3


def files_of(given: Sequence[Path]) -> list[Path]:
    """The files that were named, and those in folders that were. Raises `ValueError` for a folder without any."""
    found: list[Path] = []
    for path in given:
        if path.is_dir():
            inside = sorted(path.glob("*.jsonl"))
            if not inside:
                raise ValueError(f"{path} must be an evidence folder (record.json), or hold recordings (*.jsonl)")
            found += inside
        else:
            found.append(path)
    return found


def judge_command(given: Sequence[Path], level: str) -> int:
    """Judges, prints the rules' outcomes, the findings and the verdict, and returns the exit code."""
    from rich.console import Console

    from colocert.judge_stream import judge_files
    from colocert.report.terminal import summary, verdict_line
    from colocert.trace import TraceError

    console = Console(highlight=False, soft_wrap=True)
    try:
        paths = files_of(given)
        result = judge_files(paths, level)
        findings = [line for row in result.judged.rules if row.code for line in _findings(row.id, result, paths)]
    except (TraceError, ValueError) as error:
        print("colocert: " + " ".join(str(error).split()), file=sys.stderr)
        return USAGE
    for text in findings:
        console.print(text, markup=False)
    lines: Iterator[Styled] = summary(result.judged)
    for line in lines:
        console.print(line.text, style=line.style or None, markup=False)
    console.print(
        f"read: {result.events} events of {result.ranks} processes or ranks in {len(paths)} files", markup=False
    )
    for note in result.notes:
        console.print(f"note: {note}", markup=False)
    last = verdict_line(result.judged)
    console.print(last.text, style=last.style or None, markup=False)
    return result.judged.exit_code


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

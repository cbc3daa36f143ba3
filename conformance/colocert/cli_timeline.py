"""`colocert timeline FILE`: the byte ledger of one trace over its events, as SVG.

Knows the command's arguments. Does not know how bytes are counted, how a rule judges or how the picture is drawn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

USAGE = 4


def register(commands: Any) -> None:
    """Adds the command to those of `colocert`."""
    command = commands.add_parser("timeline", help="draw the device and host bytes of one trace over its events (SVG)")
    command.add_argument("file", type=Path, metavar="FILE", help="a trace (.jsonl)")
    command.add_argument("-o", dest="output", type=Path, metavar="FILE", help="default: standard output")
    command.add_argument("--rank", type=int, metavar="N", help="only rank N and engine N (default: all, summed)")
    command.set_defaults(run=_timeline)


def _timeline(arguments: argparse.Namespace) -> int:
    from colocert.trace import TraceError

    try:
        drawn = _draw(arguments.file, arguments.rank)
        if arguments.output is None:
            sys.stdout.write(drawn)
        else:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(drawn, encoding="utf-8")
            print(f"wrote {arguments.output}")
    except (TraceError, OSError, ValueError) as error:
        print("colocert: " + " ".join(str(error).split()), file=sys.stderr)
        return USAGE
    return 0


def _draw(path: Path, rank: int | None) -> str:
    """Two passes over the file, so that its length costs no memory: the bytes and the rules, then the findings."""
    from colocert.judge_trace import judge_events
    from colocert.report.bytes_over_time import Recorder, marks
    from colocert.report.timeline_svg import timeline
    from colocert.rules.catalogue import catalogue
    from colocert.trace import read_trace

    recorder = Recorder(rank=rank)

    def both() -> Iterator[Any]:
        for event in read_trace(path, allow_torn_tail=True):
            recorder.apply(event)
            yield event

    first = next(read_trace(path, allow_torn_tail=True), None)
    profile = getattr(first, "profile", "")
    judged = judge_events(both(), [rule for rule in catalogue().values() if rule.profile == profile])
    series = recorder.series()
    if not series.columns:
        whose = "" if rank is None else f" of rank {rank}"
        raise ValueError(f"{path}: a timeline needs allocations (got {series.events} events, none{whose} moves bytes)")
    bound = {code for r in catalogue().values() for code in _codes(r, series.claims)}
    findings = [f for f in judged.findings if (f.rule, f.code) in bound and (rank is None or f.rank == rank)]
    found = marks(read_trace(path, allow_torn_tail=True), findings) if findings else []
    title = f"{series.profile or 'trace'}: {series.scenario or path.stem}" + ("" if rank is None else f", rank {rank}")
    if _torn(path):
        print(f"colocert: {path}: the last line is incomplete and was left out", file=sys.stderr)
    return timeline(series, found, title=title, alone=True)


def _codes(rule: Any, claims: dict[str, Any]) -> list[tuple[str, str]]:
    """What of a rule the trace's claims bind; all of it where a trace states none."""
    names = rule.bound(claims) if claims else [code.name for code in rule.codes]
    return [(rule.id, name) for name in names]


def _torn(path: Path) -> bool:
    with path.open("rb") as stream:
        stream.seek(0, 2)
        if not stream.tell():
            return False
        stream.seek(-1, 2)
        return stream.read(1) != b"\n"

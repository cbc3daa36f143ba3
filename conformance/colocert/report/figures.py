"""The figures of one recorded trace on a page: its timeline in two widths, the same as rows, its transcript.

Knows the files of an evidence folder. Does not know pages or verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from colocert.judge import Evidence
from colocert.record.manifest import COMPLETE
from colocert.report.bytes_over_time import Mark, Series, bytes_over_time, marks
from colocert.report.sequence import Diagram, diagram
from colocert.report.terminal import bounds
from colocert.report.timeline_svg import NARROW, WIDE, table, timeline
from colocert.report.transcript import Line, lines
from colocert.rules.fold import Finding
from colocert.trace import AnyEvent, read_trace
from colocert.trace.events import Fault, SaverFatal, SaverTouch

AROUND = 24
"""Events on each side of a finding that a narrow timeline shows at most."""


class Figure(NamedTuple):
    """One trace's timeline: for wide pages all of it, for narrow ones what is around the first finding."""

    title: str
    wide: str
    narrow: str
    rows: list[tuple[str, str, str, str]]


class Trace:
    """One trace of an evidence folder, read once. A damaged one raises `TraceError`."""

    def __init__(self, folder: Path, path: str, *, torn: bool = False) -> None:
        self.path = path
        self.name = Path(path).stem
        self.events: list[AnyEvent] = list(read_trace(folder / path, allow_torn_tail=torn))
        self.lines: list[Line] = list(lines(self.events))
        self.series: Series = bytes_over_time(self.events)

    @property
    def clean(self) -> bool:
        """Whether nothing was made to go wrong in it, and something moved bytes."""
        return bool(self.series.columns) and not any(
            isinstance(e, (Fault, SaverFatal, SaverTouch)) for e in self.events
        )

    @property
    def kind(self) -> str:
        """lora or full."""
        return "lora" if self.series.config.get("lora") else "full"

    def figure(self, title: str, findings: Sequence[Finding] = ()) -> Figure | None:
        """Its timeline; None where no memory was seen."""
        if not self.series.columns:
            return None
        found = marks(self.events, findings)
        narrow = timeline(self.series, found, width=NARROW, window=self._around(found), title=title)
        return Figure(title, timeline(self.series, found, width=WIDE, title=title), narrow, table(self.series))

    def sequence(self, findings: Sequence[Finding]) -> Diagram | None:
        """The part of its transcript that shows the first finding; its end without one. None if it is empty."""
        if not self.lines:
            return None
        begin, end, _ = bounds(self.lines, findings[0] if findings else None)
        return diagram(self.events, self.lines, findings, begin, end)

    def _around(self, found: Sequence[Mark]) -> tuple[int, int] | None:
        if not found:
            return None
        at = found[0].at
        return max(0, at - AROUND), min(self.series.events, at + AROUND // 2)


def trace_of(evidence: Evidence, path: str) -> Trace:
    """A trace by its path in the folder."""
    kept = next((s for s in evidence.record.scenarios if s.trace == path), None)
    return Trace(evidence.folder, path, torn=kept is not None and kept.status != COMPLETE)

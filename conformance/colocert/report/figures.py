"""The figures of one recorded trace on a page: its timeline in two widths, the same as rows, its transcript.

Knows the files of an evidence folder. Does not know pages or verdicts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from colocert.judge import Evidence
from colocert.record.manifest import COMPLETE
from colocert.report.bytes_in_words import table
from colocert.report.bytes_over_time import Mark, Series, bytes_over_time, marks
from colocert.report.sequence import Diagram, diagram
from colocert.report.terminal import bounds
from colocert.report.timeline_svg import NARROW, WIDE, timeline
from colocert.report.transcript import Line, lines
from colocert.rules.fold import Finding
from colocert.trace import AnyEvent, read_trace
from colocert.trace.events import Fault, Header, SaverFatal, SaverTouch

AROUND = 24
"""Events on each side of a finding that a narrow timeline shows at most."""

LARGE = 4 << 20
"""Bytes of a trace file from which on it is streamed, and its whole transcript left to the evidence folder."""

EXCERPT = 120
"""Events of such a trace that are looked at for a sequence diagram."""


class Figure(NamedTuple):
    """One trace's timeline: for wide pages all of it, for narrow ones what is around the first finding."""

    title: str
    wide: str
    narrow: str
    rows: list[tuple[str, str, str, str]]


class Trace:
    """One trace of an evidence folder. A damaged one raises `TraceError`.

    It is read once, unless its file is `large`: such a one, of a real run, is streamed for each figure, and has neither
    `events` nor `lines` to show as a whole.
    """

    def __init__(self, folder: Path, path: str, *, torn: bool = False) -> None:
        self._file, self._torn = folder / path, torn
        self.name = Path(path).stem
        self.large = self._file.exists() and self._file.stat().st_size > LARGE
        self.events: list[AnyEvent] = [] if self.large else list(self._read())
        self.lines: list[Line] = list(lines(self.events))
        self.series: Series = bytes_over_time(self._read())

    def _read(self) -> Iterable[AnyEvent]:
        return getattr(self, "events", None) or read_trace(self._file, allow_torn_tail=self._torn)

    @property
    def clean(self) -> bool:
        """Whether nothing was made to go wrong in it, and something moved bytes."""
        return bool(self.series.columns) and not any(
            isinstance(e, (Fault, SaverFatal, SaverTouch)) for e in self._read()
        )

    @property
    def kind(self) -> str:
        """lora or full."""
        return "lora" if self.series.config.get("lora") else "full"

    def figure(self, title: str, findings: Sequence[Finding] = ()) -> Figure | None:
        """Its timeline; None where no memory was seen."""
        if not self.series.columns:
            return None
        found = marks(self._read(), findings) if findings else []
        narrow = timeline(self.series, found, width=NARROW, window=self._around(found), title=title)
        return Figure(title, timeline(self.series, found, width=WIDE, title=title), narrow, table(self.series))

    def sequence(self, findings: Sequence[Finding]) -> Diagram | None:
        """The part of its transcript that shows the first finding; its end without one. None if it is empty."""
        at = findings[0] if findings else None
        skipped, events = self._excerpt(at) if self.large else (0, self.events)
        shown = list(lines(events)) if self.large else self.lines
        if not shown:
            return None
        begin, end, _ = bounds(shown, at)
        found = diagram(events, shown, findings, begin, end, skipped=skipped)
        return found._replace(total=self.series.events)

    def _excerpt(self, at: Finding | None) -> tuple[int, list[AnyEvent]]:
        """The events up to a finding and a few after it, or the last; and how many come before them."""
        before: deque[AnyEvent] = deque(maxlen=EXCERPT)
        left, number = -1, 0
        for event in self._read():
            if isinstance(event, Header):
                continue
            number += 1
            before.append(event)
            left -= left > 0
            if at is not None and left < 0 and (event.rank, event.seq) == (at.rank, at.seq):
                left = EXCERPT // 4
            if left == 0:
                break
        return number - len(before), list(before)

    def _around(self, found: Sequence[Mark]) -> tuple[int, int] | None:
        if not found:
            return None
        at = found[0].at
        return max(0, at - AROUND), min(self.series.events, at + AROUND // 2)


def trace_of(evidence: Evidence, path: str) -> Trace:
    """A trace by its path in the folder."""
    kept = next((s for s in evidence.record.scenarios if s.trace == path), None)
    return Trace(evidence.folder, path, torn=kept is not None and kept.status != COMPLETE)

"""A transcript as a sequence diagram: who is there, and for each event from whom to whom it goes.

Knows how events lie between drivers, ranks, their memory and engines. Does not know rules or how a page looks.

One event is one row: lifelines and an arrow or a sign on the left, its line of the transcript on the right. So the
diagram is also a list, and loses nothing where it is read out, narrowed to a phone, or printed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from colocert.report.bytes_over_time import ENGINE, TRAINER, lane_place
from colocert.report.transcript import Line
from colocert.rules.fold import Finding
from colocert.trace import AnyEvent
from colocert.trace import events as ev

MEMORY, SUITE = "memory", "suite"
MOST_LANES = 9

_RANK_MARK = re.compile(r"^(\w+ )?\d+\| ")
_SIGNS: dict[type, str] = {
    ev.SaverPause: "out",
    ev.SaverResume: "in",
    ev.SaverAlloc: "in",
    ev.SaverFree: "out",
    ev.SaverFatal: "end",
    ev.SaverTouch: "end",
    ev.SaverRefused: "no",
    ev.Fault: "no",
}


class Row(NamedTuple):
    """One event. `source` and `target` are lanes by index; equal where something happens in one place.

    `at` is the event's place in its trace, the first after the header being 1: the number that timelines show too.
    `arrow` is call, back, failed or send for an arrow; in, out, no, end or dot for a sign in one place. `told` says
    the direction in words; `depth` is how far the line is indented. `findings` are those about this event.
    """

    at: int
    source: int
    target: int
    arrow: str
    told: str
    depth: int
    text: str
    findings: tuple[Finding, ...] = ()


class Diagram(NamedTuple):
    """The rows and their lanes: the events from `first` to `last` of `total`, less what a transcript leaves out."""

    lanes: tuple[str, ...]
    rows: tuple[Row, ...]
    first: int
    last: int
    total: int


class _Place(NamedTuple):
    source: str
    target: str
    arrow: str


def diagram(
    events: Iterable[AnyEvent],
    shown: Sequence[Line],
    findings: Sequence[Finding],
    begin: int,
    end: int,
    *,
    skipped: int = 0,
) -> Diagram:
    """The lines `begin` to `end` (indexes into `shown`, both included) as a diagram.

    `skipped` is how many events of the trace come before the first of `events`.
    """
    window = shown[begin : end + 1]
    wanted = {(line.rank, line.seq) for line in window}
    found: dict[tuple[int, int], list[Finding]] = {}
    for finding in findings:
        found.setdefault((finding.rank, finding.seq), []).append(finding)
    driver, by_event, total = SUITE, {}, skipped
    there: set[str] = set()
    callers: set[str] = set()
    for event in events:
        if isinstance(event, ev.Header):
            continue
        total += 1
        if isinstance(event, ev.CallBegin) and event.actor != TRAINER:
            driver = event.actor
            callers.add(driver)
        place = _place(event, driver)
        there |= {place.source, place.target}
        if (event.rank, event.seq) in wanted:
            by_event[event.rank, event.seq] = (total, place)
    placed = [(line, *by_event[line.rank, line.seq]) for line in window]
    names = _lanes({name for _, _, place in placed for name in (place.source, place.target)}, there, callers)
    rows = tuple(
        _row(at, line, place, names, tuple(found.get((line.rank, line.seq), ()))) for line, at, place in placed
    )
    return Diagram(names, rows, rows[0].at, rows[-1].at, total)


def _lanes(named: set[str], there: set[str], callers: set[str]) -> tuple[str, ...]:
    """Who takes part: the suite, what it calls, roles, ranks, memory, engines.

    Ranks and engines of the run that are not `named` in the window have a lane too, so that one which was left out is
    seen to be; unless there are too many. Of very many in the window, the first.
    """

    def order(name: str) -> tuple[float, int, str]:
        if name == SUITE:
            return -1, 0, name
        if name == MEMORY:
            return 1.5, 0, name
        if name not in callers and lane_place(name)[0] == 0:
            return 0.5, 0, name
        return lane_place(name)

    whole = named | {name for name in there if name not in (SUITE, MEMORY)}
    return tuple(sorted(whole if len(whole) <= MOST_LANES else named, key=order)[:MOST_LANES])


def _row(at: int, line: Line, place: _Place, names: tuple[str, ...], found: tuple[Finding, ...]) -> Row:
    bare = _RANK_MARK.sub("", line.text)
    text = re.sub(r" {2,}", "  ", bare.strip())
    last = len(names) - 1
    source = names.index(place.source) if place.source in names else last
    target = names.index(place.target) if place.target in names else last
    told = place.source if place.source == place.target else f"{place.source} → {place.target}"
    depth = (len(bare) - len(bare.lstrip())) // 2
    return Row(at, source, target, place.arrow if place.target in names else "dot", told, depth, text, found)


def _who(event: AnyEvent) -> str:
    if event.owner == ENGINE:
        return f"{ENGINE} {event.rank}"
    return event.owner or f"rank {event.rank}"


def _place(event: AnyEvent, driver: str) -> _Place:
    """From whom to whom an event goes."""
    who = _who(event)
    if isinstance(event, (ev.CallBegin, ev.CallEnd, ev.CallRaise)):
        caller, called = (driver, who) if event.actor == TRAINER else (SUITE, event.actor)
        if isinstance(event, ev.CallBegin):
            return _Place(caller, called, "call")
        return _Place(called, caller, "back" if isinstance(event, ev.CallEnd) else "failed")
    if isinstance(event, ev.CallIssue):
        return _Place(driver, who, "call")
    if isinstance(event, ev.Ack):
        return _Place(who, driver, "back")
    if isinstance(event, ev.SaverCall):
        return _Place(who, MEMORY, "call")
    if isinstance(event, ev.SaverRefused):
        return _Place(MEMORY, who, "failed")
    if isinstance(event, (ev.Data, ev.Move)):
        return _Place(who, MEMORY, "send")
    if isinstance(event, (ev.SaverPause, ev.SaverResume, ev.SaverAlloc, ev.SaverFree, ev.SaverFatal, ev.SaverTouch)):
        return _Place(MEMORY, MEMORY, _SIGNS[type(event)])
    if isinstance(event, ev.Send):
        return _Place(who, f"{ENGINE} 0", "send")
    if isinstance(event, ev.Change) and event.what.startswith("rank."):
        return _Place(who, who, "end" if event.what == "rank.ended" else "in")
    if isinstance(event, ev.Believed) and driver != SUITE:
        return _Place(driver, driver, "dot")
    if isinstance(event, (ev.Config, ev.Change)):
        return _Place(SUITE, SUITE, "dot")
    return _Place(who, who, _SIGNS.get(type(event), "dot"))

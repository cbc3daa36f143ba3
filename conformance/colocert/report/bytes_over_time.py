"""Bytes over events: what was on the device and on the host after each event, by owner and tag, with the calls.

Knows the byte ledger of each rank and engine, and when a process ends. Does not know rules, nor how this is drawn.

The axis is the place of an event in its file: the first one after the header is 1. Bytes are summed over the ranks,
and over the engines. However long the trace, a series keeps a bounded number of columns: neighbours become one that
has the larger of their totals, so that no peak is lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from colocert.rules.fold import Finding
from colocert.trace import AnyEvent
from colocert.trace.events import (
    Ack,
    CallBegin,
    CallEnd,
    CallIssue,
    CallRaise,
    Change,
    ClaimsStated,
    Config,
    Fault,
    Header,
    Move,
    SaverAlloc,
    SaverFatal,
    SaverFree,
    SaverPause,
    SaverResume,
    SaverTouch,
)
from colocert.trace.ledger import Ledger

TRAINER, ENGINE = "trainer", "engine"
COLUMNS = 1200
"""Columns that a series keeps at most."""

_SPANS = 10_000
_ORDER = ("default", "param_buffer", "grad_buffer", "weights", "kv_cache", "cuda_graph")
_MOVES = (SaverAlloc, SaverPause, SaverResume, SaverFree)


class Layer(NamedTuple):
    """Whose memory it is (trainer, engine, or a role such as policy), and under which tag."""

    side: str
    tag: str


Held = dict[Layer, int]
"""Bytes by layer; layers of 0 bytes are absent."""


class Column(NamedTuple):
    """What was held from event `at` until the next column, in bytes."""

    at: int
    device: Held
    host: Held


class Span(NamedTuple):
    """A call from its first to its last event. `lane` is who carried it out: driver, rank 0, engine 1."""

    lane: str
    method: str
    begin: int
    end: int
    raised: bool = False


class Mark(NamedTuple):
    """A finding, at the event it is about."""

    at: int
    rule: str
    code: str
    said: str


class Series(NamedTuple):
    """The bytes of one trace of so many `events`; `profile`, `scenario`, `config` and `claims` as it states them.

    `calls` counts all calls; `spans` are fewer where there were very many.
    """

    events: int
    columns: tuple[Column, ...]
    spans: tuple[Span, ...]
    calls: int = 0
    profile: str = ""
    scenario: str = ""
    config: dict[str, Any] = {}  # noqa: RUF012
    claims: dict[str, Any] = {}  # noqa: RUF012

    @property
    def layers(self) -> list[Layer]:
        """All that was ever held, from the bottom of the stack to its top: the trainer below the engine."""
        return sorted({layer for c in self.columns for layer in (*c.device, *c.host)}, key=place)

    @property
    def lanes(self) -> list[str]:
        """Who carried out calls: drivers and groups, then ranks, then engines, each by number."""
        return sorted({span.lane for span in self.spans}, key=lane_place)

    def peak(self, where: str) -> tuple[int, int]:
        """The most bytes in a place (`device` or `host`), and the first event after which it held them."""
        best, at = 0, 0
        for column in self.columns:
            now = sum(getattr(column, where).values())
            if now > best:
                best, at = now, column.at
        return best, at

    def held(self, at: int) -> Column:
        """What was held after an event."""
        found = Column(0, {}, {})
        for column in self.columns:
            if column.at > at:
                break
            found = column
        return found


def place(layer: Layer) -> tuple[int, str, int, str]:
    """Where a layer stands in the stack: the trainer below roles, the engine on top."""
    side = 2 if layer.side == ENGINE else int(layer.side != TRAINER)
    return side, layer.side, _ORDER.index(layer.tag) if layer.tag in _ORDER else len(_ORDER), layer.tag


def lane_place(lane: str) -> tuple[int, int, str]:
    """Where a lane stands among the lanes: callers and roles, ranks, engines."""
    who, _, number = lane.partition(" ")
    return {"rank": 1, ENGINE: 2}.get(who, 0), int(number) if number.isdigit() else -1, who


class Recorder:
    """The series of a trace, event by event. `rank` restricts it to one rank and the engine of the same number."""

    def __init__(self, *, columns: int = COLUMNS, rank: int | None = None) -> None:
        self._most, self._rank = columns, rank
        self._ledgers: dict[tuple[str, int], Ledger] = {}
        self._device: Held = {}
        self._host: Held = {}
        self._columns: list[Column] = []
        self._spans: list[Span] = []
        self._open: dict[tuple[str, int], Span] = {}
        self._at = self._calls = 0
        self._grain = self._call_grain = 1
        self._facts: dict[str, Any] = {}

    def apply(self, event: AnyEvent) -> None:
        """Moves the series past one event of the trace."""
        if isinstance(event, Header):
            self._facts |= {"profile": event.profile, "scenario": event.scenario}
            return
        self._at += 1
        if self._rank not in (None, event.rank) and not self._whole_run(event):
            return
        if isinstance(event, _MOVES):
            self._move(event)
        elif isinstance(event, Move):
            self._storages(event)
        elif _ends(event):
            self._end(event)
        elif isinstance(event, (CallBegin, CallEnd, CallRaise, CallIssue, Ack)):
            self._call(event)
        elif isinstance(event, Config):
            self._facts.setdefault("config", event.facts)
        elif isinstance(event, ClaimsStated):
            self._facts.setdefault("claims", event.facts)

    def series(self) -> Series:
        """What was seen so far."""
        while len(self._columns) > self._most:
            self._thin()
        spans = [*self._spans, *(span._replace(end=self._at, raised=True) for span in self._open.values())]
        spans.sort(key=lambda s: (s.begin, s.lane))
        return Series(self._at, tuple(self._columns), tuple(spans), self._calls, **self._facts)

    @staticmethod
    def _whole_run(event: AnyEvent) -> bool:
        """Whether an event is about the whole run: its configuration, or a call of what drives the ranks."""
        called = isinstance(event, (CallBegin, CallEnd, CallRaise)) and event.actor != TRAINER
        return called or isinstance(event, (Config, ClaimsStated))

    def _move(self, event: SaverAlloc | SaverPause | SaverResume | SaverFree) -> None:
        ledger = self._ledgers.get((event.owner, event.rank))
        if ledger is None:
            ledger = self._ledgers[event.owner, event.rank] = Ledger()
        device, host = ledger.device_bytes, ledger.host_bytes
        ledger.apply(event)
        layer = Layer(event.owner or TRAINER, event.tag)
        self._add(layer, ledger.device_bytes - device, ledger.host_bytes - host)
        self._column()

    def _storages(self, event: Move) -> None:
        """A role's storages moved: to the host as a release does, to the device as a resume whose copy stays."""
        ledger = self._ledgers.get((event.owner, event.rank))
        if ledger is None:
            return
        for a in [ledger.allocations[name] for name in event.tensors if name in ledger.allocations]:
            if event.to == "host":
                self._move(SaverPause(a.tag, a.name, a.nbytes, a.backup, 0, owner=event.owner, rank=event.rank))
            else:
                back = SaverResume(a.tag, a.name, a.nbytes, a.backup, 0, owner=event.owner, rank=event.rank)
                back.retained = True
                self._move(back)

    def _end(self, event: AnyEvent) -> None:
        """A process ended: what it had is free again."""
        ledger = self._ledgers.pop((event.owner, event.rank), None)
        if ledger is None:
            return
        for name, a in ledger.allocations.items():
            layer = Layer(event.owner or TRAINER, a.tag)
            self._add(layer, 0 if name in ledger.out else -a.nbytes, -a.nbytes if name in ledger.copies else 0)
        self._column()

    def _add(self, layer: Layer, device: int, host: int) -> None:
        for held, change in ((self._device, device), (self._host, host)):
            now = held.get(layer, 0) + change
            if now:
                held[layer] = now
            else:
                held.pop(layer, None)

    def _column(self) -> None:
        new = Column(self._at, self._device.copy(), self._host.copy())
        if self._columns and new[1:] == self._columns[-1][1:]:
            return
        self._columns.append(new)
        while len(self._columns) > 4 * self._most:
            self._thin()

    def _thin(self) -> None:
        """Makes one column of those within a grain of twice the size: the larger of each place, first.

        What a grain ends with follows it where it lasts beyond the grain; the last column of all is what is held now.
        """
        self._grain *= 2
        kept: list[Column] = []
        groups = [list(group) for _, group in itertools.groupby(self._columns, lambda c: c.at // self._grain)]
        for group, following in zip(groups, [*groups[1:], None], strict=True):
            first, last = group[0], group[-1]
            device = max((c.device for c in group), key=_total)
            host = max((c.host for c in group), key=_total)
            kept.append(Column(first.at, device, host))
            after = (first.at // self._grain + 1) * self._grain if following else last.at
            if (device, host) != last[1:] and (following is None or following[0].at > after):
                kept.append(last._replace(at=after))
        self._columns = kept

    def _call(self, event: CallBegin | CallEnd | CallRaise | CallIssue | Ack) -> None:
        number = 0
        if isinstance(event, (CallIssue, Ack)):
            if event.owner != ENGINE:  # a rank's own call begins and ends with events of its own
                return
            lane, number = f"{ENGINE} {event.rank}", event.call
        else:
            lane = f"rank {event.rank}" if event.actor == TRAINER else event.actor
        if isinstance(event, (CallBegin, CallIssue)):
            self._open[lane, number] = Span(lane, event.method, self._at, self._at)
            self._calls += 1
            return
        span = self._open.pop((lane, number), None)
        if span is None:
            return
        self._spans.append(span._replace(end=self._at, raised=isinstance(event, CallRaise)))
        while len(self._spans) > _SPANS:
            self._call_grain *= 2
            self._spans = _longest(self._spans, self._call_grain)


def _longest(spans: list[Span], grain: int) -> list[Span]:
    """Of the calls of a lane that begin within one grain, one: the longest, or the longest that raised."""
    best: dict[tuple[str, int], Span] = {}
    for span in spans:
        key = (span.lane, span.begin // grain)
        kept = best.get(key)
        if kept is None or (span.raised, span.end - span.begin) > (kept.raised, kept.end - kept.begin):
            best[key] = span
    return list(best.values())


def _ends(event: AnyEvent) -> bool:
    """Whether the process of this event's rank ended here, or a new one took its place.

    A touch of released memory ends the process that manages it with the saver; a role's storage only refuses.
    """
    if isinstance(event, (SaverFatal, SaverTouch)):
        return event.owner in ("", ENGINE)
    if isinstance(event, Change):
        return event.what in ("rank.ended", "rank.started")
    return isinstance(event, Fault) and event.when == "killed"


def _total(held: Held) -> int:
    return sum(held.values())


def bytes_over_time(events: Iterable[AnyEvent], *, columns: int = COLUMNS, rank: int | None = None) -> Series:
    """The series of a trace, in one pass and bounded memory."""
    recorder = Recorder(columns=columns, rank=rank)
    for event in events:
        recorder.apply(event)
    return recorder.series()


def marks(events: Iterable[AnyEvent], findings: Sequence[Finding]) -> list[Mark]:
    """Where the findings lie on the axis, in its order."""
    wanted: dict[tuple[int, int], list[Finding]] = {}
    for finding in findings:
        wanted.setdefault((finding.rank, finding.seq), []).append(finding)
    return list(_marks(events, wanted))


def _marks(events: Iterable[AnyEvent], wanted: dict[tuple[int, int], list[Finding]]) -> Iterator[Mark]:
    at = 0
    for event in events:
        if isinstance(event, Header):
            continue
        at += 1
        for found in wanted.get((event.rank, event.seq), ()):
            yield Mark(at, found.rule, found.code, f"expected: {found.expected}; observed: {found.observed}")

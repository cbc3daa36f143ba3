"""The peaks of a hand-off: how much each side held at most, on the device and on the host, when, and what it was.

Knows the byte ledger of every rank and engine. Does not know rules, and judges nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from colocert.judge import Evidence
from colocert.record.manifest import COMPLETE, ScenarioRecord
from colocert.report.transcript import nbytes
from colocert.trace import AnyEvent, read_trace
from colocert.trace.events import (
    CallBegin,
    CallEnd,
    CallRaise,
    Config,
    Fault,
    SaverAlloc,
    SaverFatal,
    SaverPause,
    SaverResume,
    SaverTouch,
)
from colocert.trace.ledger import Ledger

DEVICE, HOST = "device", "host"
TRAINER, ENGINE, BOTH = "trainer", "engine", "together"
_SIDES = (TRAINER, ENGINE, BOTH)
_DOES: Mapping[type, str] = {SaverAlloc: "allocates", SaverPause: "releases", SaverResume: "resumes"}


class Peak(NamedTuple):
    """The most that a side held in one place, in bytes over all its ranks or engines; the first time, if often.

    `side` is trainer, engine or both together; `place` device or host. `contents` are (side, tag, bytes), largest
    first. `when` says what was under way, `seq` is that event's number.
    """

    side: str
    place: str
    nbytes: int
    when: str
    seq: int
    contents: tuple[tuple[str, str, int], ...]


class Peaks(NamedTuple):
    """One scenario's peaks. `mode` is its peak device, `kind` lora or full."""

    scenario: str
    mode: str
    kind: str
    peaks: tuple[Peak, ...]

    def of(self, side: str, place: str) -> Peak:
        return next(p for p in self.peaks if (p.side, p.place) == (side, place))


class Book:
    """The ledgers of all ranks and engines of a run, and the highest that each side reached."""

    def __init__(self) -> None:
        self.ledgers: dict[tuple[str, int], Ledger] = {}
        self.highest: dict[tuple[str, str], Peak] = {
            (side, place): Peak(side, place, 0, "never", 0, ()) for place in (DEVICE, HOST) for side in _SIDES
        }
        self.faults = 0
        self.config: dict[str, Any] = {}
        self._calls: dict[tuple[str, int], str] = {}
        self._driver: list[str] = []

    def apply(self, event: AnyEvent) -> None:
        """Moves the book past one event."""
        if isinstance(event, (SaverAlloc, SaverPause, SaverResume)):
            self._ledger(event).apply(event)
            self._note(event)
        elif isinstance(event, CallBegin):
            self._begin(event)
        elif isinstance(event, (CallEnd, CallRaise)):
            self._calls.pop((event.owner, event.rank), None)
        elif isinstance(event, Config):
            self.config = event.facts
        elif isinstance(event, (Fault, SaverFatal, SaverTouch)):
            self.faults += 1
        elif (event.owner, event.rank) in self.ledgers:
            self._ledger(event).apply(event)

    def _begin(self, event: CallBegin) -> None:
        if event.actor == "driver":
            self._driver.append(event.method)
        else:
            self._calls[event.owner, event.rank] = event.method

    def _ledger(self, event: AnyEvent) -> Ledger:
        return self.ledgers.setdefault((event.owner, event.rank), Ledger())

    def _note(self, event: SaverAlloc | SaverPause | SaverResume) -> None:
        for (side, place), peak in self.highest.items():
            now = sum(_bytes(ledger, place) for owner, ledger in self._of(side))
            if now > peak.nbytes:
                contents = self._contents(side, place)
                self.highest[side, place] = Peak(side, place, now, self._when(event), event.seq, contents)

    def _of(self, side: str) -> Iterator[tuple[str, Ledger]]:
        for (owner, _), ledger in self.ledgers.items():
            whose = ENGINE if owner == "engine" else TRAINER
            if side in (whose, BOTH):
                yield whose, ledger

    def _contents(self, side: str, place: str) -> tuple[tuple[str, str, int], ...]:
        found: dict[tuple[str, str], int] = {}
        for whose, ledger in self._of(side):
            for name, a in ledger.allocations.items():
                if name in ledger.copies if place == HOST else name not in ledger.out:
                    found[whose, a.tag] = found.get((whose, a.tag), 0) + a.nbytes
        return tuple((who, tag, n) for (who, tag), n in sorted(found.items(), key=lambda f: (-f[1], f[0])))

    def _when(self, event: SaverAlloc | SaverPause | SaverResume) -> str:
        run = sum(1 for method in self._driver if method == "run")
        whose = f"{event.owner} {event.rank}" if event.owner else f"rank {event.rank}"
        did = f"{whose} {_DOES[type(event)]} {event.tag}"
        inside = self._calls.get((event.owner, event.rank))
        return did + (f" in {inside}()" if inside else "") + (f", run {run}" if run else ", before the first run")


def _bytes(ledger: Ledger, place: str) -> int:
    return ledger.device_bytes if place == DEVICE else ledger.host_bytes


def peaks_of(scenario: str, events: Iterable[AnyEvent]) -> Peaks | None:
    """The peaks of one trace; None where no memory was seen, or where something was made to go wrong."""
    book = Book()
    for event in events:
        book.apply(event)
    if book.faults or not book.ledgers:
        return None
    kind = "lora" if book.config.get("lora") else "full"
    return Peaks(scenario, str(book.config.get("peak_device", "")), kind, tuple(book.highest.values()))


def highest_peaks(evidence: Evidence) -> tuple[Peaks, ...]:
    """For each mode, with LoRA and without, the hand-off scenario that holds most on the device; none without one."""
    best: dict[tuple[str, str], Peaks] = {}
    for kept in evidence.record.scenarios:
        found = _peaks(evidence, kept)
        if found is None:
            continue
        earlier = best.get((found.mode, found.kind))
        if earlier is None or _weight(found) > _weight(earlier):
            best[found.mode, found.kind] = found
    return tuple(best.values())


def _peaks(evidence: Evidence, kept: ScenarioRecord) -> Peaks | None:
    if kept.profile != "handoff" or kept.status != COMPLETE or kept.profile not in evidence.profiles():
        return None
    return peaks_of(kept.id, read_trace(evidence.folder / kept.trace))


def _weight(found: Peaks) -> tuple[int, int]:
    return found.of(BOTH, DEVICE).nbytes, found.of(BOTH, HOST).nbytes


def rows(found: Iterable[Peaks]) -> Iterator[tuple[str, ...]]:
    """For people: mode, place, side, peak, when, and what was in it."""
    for peaks in found:
        for peak in peaks.peaks:
            mode = f"{peaks.mode}-peak {peaks.kind}"
            yield mode, peak.place, peak.side, nbytes(peak.nbytes), peak.when, _held(peak.contents)


def _held(contents: Iterable[tuple[str, str, int]]) -> str:
    by_side: dict[str, list[str]] = {}
    for who, tag, n in contents:
        by_side.setdefault(who, []).append(f"{tag} {nbytes(n)}")
    return "; ".join(f"{who}: {', '.join(tags)}" for who, tags in by_side.items())


def facts(found: Iterable[Peaks]) -> list[dict[str, Any]]:
    """For the certificate."""
    return [
        {
            "scenario": peaks.scenario,
            "peak_device": peaks.mode,
            "lora": peaks.kind == "lora",
            "side": peak.side,
            "place": peak.place,
            "bytes": peak.nbytes,
            "when": peak.when,
            "event": peak.seq,
            "contents": [{"side": who, "tag": tag, "bytes": n} for who, tag, n in peak.contents],
        }
        for peaks in found
        for peak in peaks.peaks
    ]

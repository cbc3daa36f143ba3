"""Several recordings of one run as one stream of events, in the order in which things happened.

Knows clocks, marks and what a killed process leaves. Does not know what an event means.

The order. Within a file it is `seq`, which rises by one a line. Between processes of one machine it is the machine's
monotonic clock, which they share: what happened before in one process has the smaller reading in another that heard of
it. Machines do not share it; there the hand-off marks come first (what precedes mark n in any file precedes what
follows mark n in every file), and between two marks the time of day that each file's header ties its clock to. Memory
is one reader's buffer a file: the length of files costs none.
"""

from __future__ import annotations

import heapq
import os
import resource
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from colocert.trace.events import SCHEMA_VERSION, AnyEvent, Closed, HandOff, Header
from colocert.trace.files import TraceError, decoded

LONGEST_LINE = 4 << 20
_BLOCK = 1 << 16
_SMALLEST_BLOCK = 1 << 12
_BLOCKS_TOGETHER = 8 << 20
_LINES = 64
_SPARE_FILES = 32
_decoder = msgspec.json.Decoder(AnyEvent)
_TOLD_APART = frozenset({Header, HandOff, Closed})


class Place(NamedTuple):
    """Where an event stands: the file, as its number among those given, and the line."""

    file: int
    line: int


class Source:
    """One file. `header` is its first line; `line` where its reader is; `tail` is empty, or what its end shows.

    Read in blocks as long as they are sound, and a line at a time from the first that is not, to name the line.
    """

    def __init__(self, path: Path, index: int, block: int = _BLOCK) -> None:
        self.path, self.index = path, index
        self.line = 0
        self.tail = ""
        self.closed = False
        self.marks = 0
        self.shift = 0
        self._block, self._read, self._rest = block, 0, b""
        self._by_line = False
        try:
            self._stream: BinaryIO = path.open("rb", buffering=block)
        except OSError as error:
            raise TraceError(path, 0, f"a recording must be readable (got {error.strerror})") from error
        event = self.read()
        self.line = self._read
        if event is None:
            raise TraceError(path, 1, f"a recording begins with a header line (got {self.tail or 'an empty file'})")
        if not isinstance(event, Header):
            raise TraceError(path, 1, f"a recording begins with a header line (got a {type(event).__name__} event)")
        if event.schema != SCHEMA_VERSION:
            raise TraceError(
                path,
                1,
                f"schema must be {SCHEMA_VERSION} (got {event.schema}): judge it with the colocert that wrote it",
            )
        self.header = event
        self.marks = event.marks
        self._at = event.at
        self._seq: dict[int, int] = {}

    def batch(self) -> list[AnyEvent]:
        """The next events, checked against the ones before them; none at the end."""
        while not self._by_line:
            raw = self._stream.read(self._block)
            if not raw and not self._rest:
                self._stream.close()
                return []
            block = self._rest + raw
            cut = block.rfind(b"\n") + 1
            if raw and not cut and len(block) < LONGEST_LINE and b"\0" not in raw:
                self._rest = block
                continue
            events = decoded(block[:cut]) if raw and cut and b"\0" not in block[:cut] else []
            if not events:
                self._by_line = True
                self._stream.seek(-len(block), os.SEEK_CUR)
            else:
                self._rest = block[cut:]
                self._check(events)
                return events
        found: list[AnyEvent] = []
        while len(found) < _LINES and (event := self._next()) is not None:
            found.append(event)
        return found

    def _check(self, events: list[AnyEvent]) -> None:
        """All at once if nothing among them is told apart, and one by one otherwise, or to name the one at fault."""
        if self.header.live and not self.closed and _TOLD_APART.isdisjoint([event.__class__ for event in events]):
            clock = [event.at for event in events]
            through = self._read + len(events)
            rises = [event.seq for event in events] == list(range(self._read, through))
            if rises and clock[0] >= self._at and clock == sorted(clock):
                self._read, self._at = through, clock[-1]
                return
        for event in events:
            self._read += 1
            self._checked(event)

    def keys(self, events: list[AnyEvent], files: int, several: bool, marks: int) -> list[int]:
        """Where events stand in the order of the run, of so many files on one machine or several."""
        index, shift = self.index, self.shift
        if not several:
            return [event.at * files + index for event in events]
        found: list[int] = []
        for event in events:
            ahead = marks
            if isinstance(event, HandOff):
                marks += 1
            found.append(((ahead << _EPOCH) + event.at + shift) * files + index)
        return found

    def read(self) -> AnyEvent | None:
        """The next event as it stands, or None at the end. Raises `TraceError` for a line that is not one."""
        raw = self._stream.readline(LONGEST_LINE)
        if not raw:
            return None
        self._read += 1
        if raw[-1:] != b"\n" or raw[:1] == b"\0":
            self._torn(raw)
            return None
        try:
            return _decoder.decode(raw)
        except msgspec.ValidationError as error:
            raise TraceError(self.path, self._read, f"not an event of schema {SCHEMA_VERSION} ({error})") from error
        except msgspec.DecodeError as error:
            raise TraceError(
                self.path,
                self._read,
                f"a line must be one JSON object (got {raw[:60]!r}: {error}): the file is damaged",
            ) from error

    def _torn(self, raw: bytes) -> None:
        """An unterminated end: what a killed writer leaves, and nothing else."""
        if len(raw) >= LONGEST_LINE and raw.strip(b"\0"):
            raise TraceError(self.path, self._read, f"a line must be shorter than {LONGEST_LINE} bytes")
        rest = raw.lstrip(b"\0") if raw[:1] == b"\0" else raw.split(b"\0", 1)[-1] if b"\0" in raw else b""
        while True:
            if rest.strip(b"\0"):
                raise TraceError(self.path, self._read, "zero bytes may only be at the end (got lines after them)")
            rest = self._stream.read(LONGEST_LINE)
            if not rest:
                break
        written = raw.split(b"\0", 1)[0]
        self._read -= 1
        if written:
            self.tail = f"line {self._read + 1} is incomplete and was left out"

    def next(self) -> AnyEvent | None:
        """The next event, checked against the ones before it."""
        event = self._next()
        self.line = self._read
        return event

    def _next(self) -> AnyEvent | None:
        event = self.read()
        if event is None:
            self._by_line, self._rest = False, b""
            self._stream.close()
            self._stream = BytesIO()
            return None
        self._checked(event)
        return event

    def _checked(self, event: AnyEvent) -> None:
        if isinstance(event, Header):
            raise TraceError(self.path, self._read, "a header may only be the first line: two files were joined")
        if self.header.live:
            self._check_live(event)
        else:
            last = self._seq.get(event.rank, 0)
            if event.seq <= last:
                raise TraceError(
                    self.path,
                    self._read,
                    f"seq must rise within rank {event.rank} (got {event.seq} after {last}): {MOVED}",
                )
            self._seq[event.rank] = event.seq

    def _check_live(self, event: AnyEvent) -> None:
        if self.closed:
            raise TraceError(self.path, self._read, f"nothing follows the closing line (got {type(event).__name__})")
        if event.seq != self._read - 1:
            raise TraceError(
                self.path,
                self._read,
                f"seq must be {self._read - 1}, one more than in the line before (got {event.seq}): {MOVED}",
            )
        if event.at < self._at:
            raise TraceError(
                self.path, self._read, f"the clock must not fall (got {event.at} after {self._at}): {MOVED}"
            )
        self._at = event.at
        if isinstance(event, HandOff):
            self.marks += 1
            if event.number != self.marks:
                raise TraceError(
                    self.path, self._read, f"hand-off mark {self.marks} must come next (got {event.number})"
                )
        elif isinstance(event, Closed):
            self.closed = True


MOVED = "a line was added, removed or moved"

_EPOCH = 80
"""Bits below the number of marks in a place in the order: more than a clock has."""


def open_all(paths: Sequence[Path]) -> list[Source]:
    """Opens recordings of one run. Raises `TraceError` for files that cannot be one run."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(paths) + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise TraceError(paths[0], 0, f"{len(paths)} files must be open at once (got a limit of {hard}: ulimit -n)")
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    block = max(_SMALLEST_BLOCK, min(_BLOCK, _BLOCKS_TOGETHER // len(paths)))
    sources = [Source(path, i, block) for i, path in enumerate(paths)]
    if len(sources) > 1:
        for source in sources:
            if not source.header.live:
                raise TraceError(
                    source.path, 1, "a trace of the suite has no clock to merge by: judge it alone (got several files)"
                )
        seen: dict[str, Source] = {}
        for source in sources:
            other = seen.setdefault(source.header.process, source)
            if other is not source:
                raise TraceError(
                    source.path, 1, f"process {source.header.process} must be given once (got {other.path} too)"
                )
    return sources


def runs(sources: Sequence[Source]) -> Iterator[tuple[Source, list[AnyEvent]]]:
    """Every event after the headers, in order: stretches of one file, each with its file, read up to `source.line`."""
    boots: dict[str, Header] = {}
    for source in sources:
        boots.setdefault(source.header.boot, source.header)
    several, files = len(boots) > 1, len(sources)
    if several:
        for source in sources:
            first = boots[source.header.boot]
            source.shift = first.wall - first.at
    waiting: list[list[AnyEvent]] = []
    keys: list[list[int]] = []
    for source in sources:
        marks = source.marks
        waiting.append(source.batch())
        keys.append(source.keys(waiting[-1], files, several, marks))
    places = [0] * files
    heap = [mine[0] for mine in keys if mine]
    heapq.heapify(heap)
    while heap:
        index = heap[0] % files
        source, events, mine, place = sources[index], waiting[index], keys[index], places[index]
        end = len(mine)
        if len(heap) > 1:
            end = bisect_left(mine, min(heap[1:3]), place)
        yield source, events if end - place == len(events) else events[place:end]
        source.line += end - place
        if end < len(mine):
            places[index] = end
            heapq.heapreplace(heap, mine[end])
            continue
        marks = source.marks
        waiting[index] = events = source.batch()
        if events:
            places[index] = 0
            keys[index] = mine = source.keys(events, files, several, marks)
            heapq.heapreplace(heap, mine[0])
        else:
            keys[index] = []
            heapq.heappop(heap)
    if several and any(source.marks for source in sources):
        for source in sources:
            if not source.marks:
                raise TraceError(
                    source.path,
                    source.line,
                    "files of several machines need hand-off marks (got none here): call handoff() in all",
                )


def merged(sources: Sequence[Source]) -> Iterator[tuple[Source, AnyEvent]]:
    """Every event after the headers with its file, in order."""
    for source, events in runs(sources):
        for event in events:
            yield source, event

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
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from colocert.trace.events import SCHEMA_VERSION, AnyEvent, Closed, HandOff, Header
from colocert.trace.files import TraceError

LONGEST_LINE = 4 << 20
_BUFFER = 1 << 14
_SPARE_FILES = 32
_decoder = msgspec.json.Decoder(AnyEvent)


class Place(NamedTuple):
    """Where an event stands: the file, as its number among those given, and the line."""

    file: int
    line: int


class Source:
    """One file, read a line at a time. `header` is its first line; `tail` is empty, or what its end shows."""

    def __init__(self, path: Path, index: int) -> None:
        self.path, self.index = path, index
        self.line = 0
        self.tail = ""
        self.closed = False
        self.marks = 0
        self.shift = 0
        try:
            self._stream = path.open("rb", buffering=_BUFFER)
        except OSError as error:
            raise TraceError(path, 0, f"a recording must be readable (got {error.strerror})") from error
        event = self.read()
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

    def read(self) -> AnyEvent | None:
        """The next event as it stands, or None at the end. Raises `TraceError` for a line that is not one."""
        raw = self._stream.readline(LONGEST_LINE)
        if not raw:
            return None
        self.line += 1
        if raw[-1:] != b"\n" or raw[:1] == b"\0":
            self._torn(raw)
            return None
        try:
            return _decoder.decode(raw)
        except msgspec.ValidationError as error:
            raise TraceError(self.path, self.line, f"not an event of schema {SCHEMA_VERSION} ({error})") from error
        except msgspec.DecodeError as error:
            raise TraceError(
                self.path, self.line, f"a line must be one JSON object (got {raw[:60]!r}: {error}): the file is damaged"
            ) from error

    def _torn(self, raw: bytes) -> None:
        """An unterminated end: what a killed writer leaves, and nothing else."""
        if len(raw) >= LONGEST_LINE and raw.strip(b"\0"):
            raise TraceError(self.path, self.line, f"a line must be shorter than {LONGEST_LINE} bytes")
        rest = raw.lstrip(b"\0") if raw[:1] == b"\0" else raw.split(b"\0", 1)[-1] if b"\0" in raw else b""
        while True:
            if rest.strip(b"\0"):
                raise TraceError(self.path, self.line, "zero bytes may only be at the end (got lines after them)")
            rest = self._stream.read(LONGEST_LINE)
            if not rest:
                break
        written = raw.split(b"\0", 1)[0]
        self.line -= 1
        if written:
            self.tail = f"line {self.line + 1} is incomplete and was left out"

    def next(self) -> AnyEvent | None:
        """The next event, checked against the ones before it."""
        event = self.read()
        if event is None:
            self._stream.close()
            return None
        if isinstance(event, Header):
            raise TraceError(self.path, self.line, "a header may only be the first line: two files were joined")
        if self.header.live:
            self._check_live(event)
        else:
            last = self._seq.get(event.rank, 0)
            if event.seq <= last:
                raise TraceError(
                    self.path,
                    self.line,
                    f"seq must rise within rank {event.rank} (got {event.seq} after {last}): {MOVED}",
                )
            self._seq[event.rank] = event.seq
        return event

    def _check_live(self, event: AnyEvent) -> None:
        if self.closed:
            raise TraceError(self.path, self.line, f"nothing follows the closing line (got {type(event).__name__})")
        if event.seq != self.line - 1:
            raise TraceError(
                self.path,
                self.line,
                f"seq must be {self.line - 1}, one more than in the line before (got {event.seq}): {MOVED}",
            )
        if event.at < self._at:
            raise TraceError(
                self.path, self.line, f"the clock must not fall (got {event.at} after {self._at}): {MOVED}"
            )
        self._at = event.at
        if isinstance(event, HandOff):
            self.marks += 1
            if event.number != self.marks:
                raise TraceError(
                    self.path, self.line, f"hand-off mark {self.marks} must come next (got {event.number})"
                )
        elif isinstance(event, Closed):
            self.closed = True


MOVED = "a line was added, removed or moved"


def open_all(paths: Sequence[Path]) -> list[Source]:
    """Opens recordings of one run. Raises `TraceError` for files that cannot be one run."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(paths) + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise TraceError(paths[0], 0, f"{len(paths)} files must be open at once (got a limit of {hard}: ulimit -n)")
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    sources = [Source(path, i) for i, path in enumerate(paths)]
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


def merged(sources: Sequence[Source]) -> Iterator[tuple[Source, AnyEvent]]:
    """Every event after the headers with its file, in order. `source.line` is its line."""
    boots: dict[str, Header] = {}
    for source in sources:
        boots.setdefault(source.header.boot, source.header)
    several = len(boots) > 1
    if several:
        for source in sources:
            first = boots[source.header.boot]
            source.shift = first.wall - first.at
    heap: list[tuple[int, int, int]] = []
    ready: list[AnyEvent | None] = [source.next() for source in sources]
    for source in sources:
        event = ready[source.index]
        if event is not None:
            heap.append((0, event.at + source.shift, source.index))
    heapq.heapify(heap)
    while heap:
        _, _, index = heap[0]
        source = sources[index]
        event = ready[index]
        until = min(heap[1:3], default=None)
        while event is not None:
            epoch = source.marks if several else 0
            if isinstance(event, HandOff) and several:
                epoch -= 1
            if until is not None and (epoch, event.at + source.shift, index) > until:
                ready[index] = event
                heapq.heapreplace(heap, (epoch, event.at + source.shift, index))
                break
            yield source, event
            event = source.next()
        else:
            heapq.heappop(heap)
    if several and any(source.marks for source in sources):
        for source in sources:
            if not source.marks:
                raise TraceError(
                    source.path,
                    source.line,
                    "files of several machines need hand-off marks (got none here): call handoff() in all",
                )

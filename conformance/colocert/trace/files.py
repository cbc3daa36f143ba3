"""Traces in and out of JSON Lines files: one event a line, streamed both ways.

Knows files, lines and the schema's version. Does not know what any event means.

A writer puts each line out with a single `write(2)`, so every complete line survives the death of the process. A reader
names a damaged line by its number; only an unterminated last line, which such a death can leave, may be dropped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import msgspec

from colocert.trace.events import SCHEMA_VERSION, AnyEvent, Event, Header

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyEvent)
_BLOCK = 1 << 16


class TraceError(ValueError):
    """A trace file that cannot be judged: which file, which line, what must hold and what was found."""

    def __init__(self, path: Path, line: int, problem: str) -> None:
        super().__init__(f"{path}:{line}: {problem}")
        self.path, self.line, self.problem = path, line, problem


class TraceWriter:
    """Appends events to a file, a line each, durable against the death of this process."""

    def __init__(self, path: Path, header: Header) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self(header)

    def __call__(self, event: Event) -> None:
        line = _encoder.encode(event) + b"\n"
        while line:
            line = line[os.write(self._fd, line) :]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_trace(path: Path, *, allow_torn_tail: bool = False) -> Iterator[AnyEvent]:
    """Yields the events of a file, header first.

    Raises `TraceError` for an unreadable file, a missing or unknown header, a damaged line, or a sequence number that
    does not rise within its rank. `allow_torn_tail` drops an unterminated last line: what a killed writer leaves.
    """
    return chain.from_iterable(_read(path, allow_torn_tail))


def _read(path: Path, allow_torn_tail: bool) -> Iterator[list[AnyEvent]]:
    """Events, a block of lines at a time; before an error come those in front of it."""
    last: dict[int, int] = {}
    number = 0
    for lines in _blocks(path, allow_torn_tail):
        events, error = decoded(lines), None
        if not events:
            events, error = _up_to_the_damage(path, number, lines)
        if number == 0 and events:
            _check_header(path, events[0])
        first = 0 if number else 1
        for place, event in enumerate(events[first:] if first else events, first):
            rank, seq = event.rank, event.seq
            if seq <= last.get(rank, 0):
                yield events[:place]
                raise _out_of_order(path, number + place + 1, event, last.get(rank, 0))
            last[rank] = seq
        yield events
        number += len(events)
        if error is not None:
            raise error
    if number == 0:
        raise TraceError(path, 1, "a trace begins with a header line (got an empty file)")


def _out_of_order(path: Path, number: int, event: AnyEvent, before: int) -> TraceError:
    return TraceError(
        path,
        number,
        f"seq must rise within rank {event.rank} (got {event.seq} after {before}): a line was added, removed or moved",
    )


def _blocks(path: Path, allow_torn_tail: bool) -> Iterator[bytes]:
    """The lines of a file, some at a time."""
    try:
        stream = path.open("rb")
    except OSError as error:
        raise TraceError(path, 0, f"a trace file must be readable (got {error.strerror})") from error
    rest = b""
    with stream:
        while block := stream.read(_BLOCK):
            cut = block.rfind(b"\n") + 1
            if cut:
                yield rest + block[:cut]
                rest = block[cut:]
            else:
                rest += block
    if rest and not allow_torn_tail:
        yield rest


def _up_to_the_damage(path: Path, number: int, lines: bytes) -> tuple[list[AnyEvent], TraceError | None]:
    """The events of lines that are not all sound, one by one, and what is wrong with the first that is not."""
    events: list[AnyEvent] = []
    for line in lines.removesuffix(b"\n").split(b"\n"):
        try:
            events.append(_decode(path, number + len(events) + 1, line))
        except TraceError as error:
            return events, error
    return events, None


def decoded(lines: bytes) -> list[AnyEvent]:
    """The events of whole lines, or none if some line is not one event."""
    try:
        events: list[AnyEvent] = _decoder.decode_lines(lines)
    except msgspec.MsgspecError:
        return []
    return events if len(events) == lines.count(b"\n") else []


def _decode(path: Path, number: int, line: bytes) -> AnyEvent:
    try:
        return _decoder.decode(line)
    except msgspec.ValidationError as error:
        raise TraceError(path, number, f"not an event of schema {SCHEMA_VERSION} ({error})") from error
    except msgspec.DecodeError as error:
        raise TraceError(path, number, f"a line must be one JSON object (got {line[:60]!r}: {error})") from error


def _check_header(path: Path, event: AnyEvent) -> None:
    if not isinstance(event, Header):
        raise TraceError(path, 1, f"a trace begins with a header line (got a {type(event).__name__} event)")
    if event.schema != SCHEMA_VERSION:
        raise TraceError(
            path, 1, f"schema must be {SCHEMA_VERSION} (got {event.schema}): record it again with this colocert"
        )

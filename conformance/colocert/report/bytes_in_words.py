"""Bytes in words: sizes, what was held, round numbers for axes, and a series as a sentence or as rows.

Knows the byte series. Does not know how a picture is laid out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from colocert.report.bytes_over_time import Held, Mark, Series, place

PLACES = ("device", "host")
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_STEPS = (1, 2, 5)
_NAMED = 6
"""Findings that a sentence names."""


def size(nbytes: int) -> str:
    """Bytes for people, in powers of two: 64 MiB, 1.3 GiB."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if value == int(value) or value >= 100 else f"{value:.1f} {_UNITS[unit]}"


def byte_ticks(top: float) -> list[int]:
    """Powers of two and their multiples, from 0 up, five at most."""
    each = 1
    while top / each >= 5:
        each *= 2
    return [i * each for i in range(int(top / each) + 1)]


def event_ticks(span: float) -> list[int]:
    """Round numbers of events from 0 up, about eight at most."""
    for power in range(12):
        for step in _STEPS:
            each: int = step * 10**power
            if span / each <= 8:
                return [i * each for i in range(int(span / each) + 1)]
    return [0]


def described(series: Series, marks: Sequence[Mark], title: str) -> str:
    """The picture in a sentence, for those who do not see it."""
    peaks = "; ".join(
        f"{where} at most {size(most)}, first after event {at}"
        for where, (most, at) in ((w, series.peak(w)) for w in PLACES)
        if most
    )
    found = "; ".join(f"{m.rule} {m.code} at event {m.at}" for m in marks[:_NAMED])
    return ". ".join(part for part in (title, f"{series.events} events", peaks, found) if part)


def table(series: Series, most: int = 60) -> list[tuple[str, str, str, str]]:
    """The same in rows: event, what call it was in, and the device and the host after it. Every row moved bytes."""
    rows = []
    step = max(1, math.ceil(len(series.columns) / most))
    for column in series.columns[::step]:
        inside = [s for s in series.spans if s.begin <= column.at <= s.end]
        call = ", ".join(f"{s.lane} {s.method}" for s in inside[:3])
        rows.append((str(column.at), call, held_in_words(column.device), held_in_words(column.host)))
    return rows


def held_in_words(held: Held) -> str:
    """What was held, in total and by owner and tag."""
    if not held:
        return "nothing"
    parts = []
    for side in dict.fromkeys(layer.side for layer in sorted(held, key=place)):
        mine = [f"{layer.tag} {size(n)}" for layer, n in held.items() if layer.side == side]
        if mine:
            parts.append(f"{side}: {', '.join(mine)}")
    return f"{size(sum(held.values()))} ({'; '.join(parts)})"

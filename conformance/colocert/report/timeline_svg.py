"""The byte ledger of a trace as SVG: the device above, the host below, the calls along the axis, findings as lines.

Knows layout. Does not know how the bytes were counted or what a finding means. Colours come from classes: a page gives
them (`figure_css`), and a picture of its own carries both grounds.

    legend
    device   stacked by owner and tag, a step for each event that moved bytes
    host
    driver   |run ------------------------|
    rank 0      |sleep---|     |wake_up|
    engine 0 |release|     |resume|
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

from colocert.report.bytes_in_words import byte_ticks, described, event_ticks, held_in_words, size
from colocert.report.bytes_over_time import ENGINE, TRAINER, Column, Layer, Mark, Series, Span
from colocert.report.palette import DARK, LIGHT, figure_css, others, tag_class
from colocert.svg import rect, rule, text

WIDE, NARROW = 1080, 372
_LEFT, _RIGHT = 74, 10
_PLACES = (("device", 200), ("host", 116))
_GAP, _LANE, _LEGEND = 22, 19, 20
_APART = 14
"""Between the tags of one side and the name of the next, in the legend."""

_LANES = 10
"""Lanes that are drawn; a run of a thousand ranks shows its drivers, its first ranks and its first engines."""

_MARKS = 6
_TICK = 34
_THIN = 0.8
_FLAG = 16
_CHAR = 6.4

PATTERNS = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path d="M0 0V6" class="g-hatch"/></pattern>'
    '<pattern id="dots" width="7" height="7" patternUnits="userSpaceOnUse">'
    '<circle cx="3" cy="3" r="1.3" class="g-dots"/></pattern>'
)
"""The patterns that tell owners apart; a page defines them once."""


class Frame(NamedTuple):
    """Which events are drawn and where: `first` to `last` on `left` to `left + width`."""

    first: float
    last: float
    left: float
    width: float

    def x(self, at: float) -> float:
        inside = min(max(at, self.first), self.last)
        return self.left + self.width * (inside - self.first) / max(1.0, self.last - self.first)

    def has(self, at: float) -> bool:
        return self.first <= at <= self.last


class Panel(NamedTuple):
    """One place's chart: its upper edge, its height, and the bytes at the upper edge."""

    y: float
    height: float
    top: float

    def up(self, nbytes: float) -> float:
        return self.y + self.height * (1 - nbytes / self.top)


def timeline(
    series: Series,
    marks: Sequence[Mark] = (),
    *,
    width: int = WIDE,
    window: tuple[int, int] | None = None,
    title: str = "",
    alone: bool = False,
    capacity: int = 0,
    axis: str = "event",
) -> str:
    """The picture. `window` draws some events only; `alone` makes it a document with a style sheet of its own.

    `capacity`, in bytes, is a line across the device; `axis` is what the series counts. Patterns are defined here only
    where the picture stands alone.
    """
    first, last = window or (0, series.events)
    frame = Frame(first, max(last, first + 1), _LEFT, width - _LEFT - _RIGHT)
    parts: list[str] = []
    y = 0.0
    if alone:
        parts.append(text(12, 24, title, size_=16, weight="bold", cls="g-ink"))
        y = 38.0
    y = _legend(parts, series, y, width) + (_FLAG if marks else 0)
    top = y
    for where, height in _PLACES:
        if where == "host" and not series.peak("host")[0]:
            continue
        y += 18
        parts.append(text(_LEFT, y - 5, where, weight="bold", cls="g-ink"))
        limit = capacity if where == "device" else 0
        panel = Panel(y, height, max(_top(series, where), 1.08 * limit))
        parts += _panel(series, frame, where, panel)
        parts += _capacity(frame, panel, limit) if limit else ()
        y += height + 4
    y = _lanes(parts, series, frame, y + 4)
    bottom = y
    y = _axis(parts, frame, y + 14, axis)
    y = _flags(parts, series, marks, frame, (top, bottom), y, width)
    return _document(parts, width, math.ceil(y + 6), series, marks, title, alone=alone)


def _document(
    parts: list[str],
    width: int,
    height: int,
    series: Series,
    marks: Sequence[Mark],
    title: str,
    *,
    alone: bool,
) -> str:
    said = quoteattr(described(series, marks, title))
    sized = f'width="{width}" height="{height}" ' if alone else ""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {sized}role="img" aria-label={said}'
    head += ' font-family="system-ui, Helvetica, Arial, sans-serif">'
    if alone:
        dark = f"@media (prefers-color-scheme:dark){{{figure_css(DARK)}}}"
        head += f"<title>{escape(title)}</title><style>{figure_css(LIGHT)}{dark}</style>"
        head += f"<defs>{PATTERNS}</defs>" + rect(0, 0, width, height, cls="g-bg")
    return head + "".join(parts) + "</svg>\n"


# ---- the stacks


def _top(series: Series, where: str) -> float:
    return 1.08 * max(1, series.peak(where)[0])


def _panel(series: Series, frame: Frame, where: str, panel: Panel) -> Iterator[str]:
    yield rect(frame.left, panel.y, frame.width, panel.height, cls="g-panel")
    for level in byte_ticks(panel.top):
        yield rule(frame.left, frame.left + frame.width, panel.up(level), cls="g-line")
        yield text(frame.left - 7, panel.up(level) + 4, size(level), anchor="end", cls="g-muted")
    columns = _visible(series, frame)
    rest = others(layer.tag for layer in series.layers)
    below = [0] * len(columns)
    labels: list[str] = []
    for layer in series.layers:
        heights = [getattr(c, where).get(layer, 0) for c in columns]
        if any(heights):
            path = _area(frame, panel, columns, below, heights, series.events)
            said = f"<title>{escape(f'{layer.side} {layer.tag}')}</title>"
            yield f'<path d="{path}" class="{tag_class(layer.tag, rest)} g-edge">{said}</path>'
            if pattern := pattern_of(layer, series.layers):
                yield f'<path d="{path}" fill="url(#{pattern})"/>'
            labels += _label(frame, panel, columns, below, heights, layer, series.events)
        below = [b + h for b, h in zip(below, heights, strict=True)]
    yield from labels


def _capacity(frame: Frame, panel: Panel, limit: int) -> Iterator[str]:
    """The line that the device's bytes must stay below."""
    yield rule(frame.left, frame.left + frame.width, panel.up(limit), cls="g-mark", dash="6 4", width=1.5)
    right = frame.left + frame.width - 4
    yield text(right, panel.up(limit) - 3, f"capacity {size(limit)}", size_=11, anchor="end", cls="g-said")


def _visible(series: Series, frame: Frame) -> list[Column]:
    inside = [c for c in series.columns if frame.first < c.at <= frame.last]
    return [series.held(int(frame.first))._replace(at=int(frame.first)), *inside]


def _area(frame: Frame, panel: Panel, columns: list[Column], below: list[int], heights: list[int], end: int) -> str:
    """The outline of one layer: pieces where it is not empty, each there along its top and back along its bottom."""
    edges = [*(frame.x(c.at) for c in columns), frame.x(end)]
    pieces: list[str] = []
    there: list[str] = []
    back: list[str] = []

    def close() -> None:
        if there:
            pieces.append("M" + "L".join([*there, *reversed(back)]) + "Z")
            there.clear()
            back.clear()

    for i, height in enumerate(heights):
        if not height:
            close()
            continue
        top, bottom = panel.up(below[i] + height), panel.up(below[i])
        same = bool(there) and there[-1].endswith(f" {top:.1f}") and back[-1].endswith(f" {bottom:.1f}")
        if same:
            there.pop()
            back.pop()
        for x in (edges[i + 1],) if same else (edges[i], edges[i + 1]):
            there.append(f"{x:.1f} {top:.1f}")
            back.append(f"{x:.1f} {bottom:.1f}")
    close()
    return "".join(pieces)


def _label(
    frame: Frame, panel: Panel, columns: list[Column], below: list[int], heights: list[int], layer: Layer, end: int
) -> Iterator[str]:
    """The tag, where the layer is longest and high enough to hold it."""
    edges = [*(frame.x(c.at) for c in columns), frame.x(end)]
    best, at, y = 0.0, 0.0, 0.0
    i = 0
    while i < len(heights):
        j = i
        while j + 1 < len(heights) and heights[j + 1] == heights[i] and below[j + 1] == below[i]:
            j += 1
        length = edges[j + 1] - edges[i]
        if panel.height * heights[i] / panel.top >= 14 and length > best:
            best, at = length, (edges[i] + edges[j + 1]) / 2
            y = panel.up(below[i] + heights[i] / 2) + 4
        i = j + 1
    name = layer.tag if layer.side in (TRAINER, ENGINE) else f"{layer.side} {layer.tag}"
    if best > len(name) * _CHAR + 6:
        yield text(at, y, name, size_=11, anchor="middle", cls="g-halo")


def pattern_of(layer: Layer, layers: Sequence[Layer]) -> str:
    """The pattern over an owner's memory: none for the first, hatched for the engine, dotted for further roles."""
    if layer.side == ENGINE:
        return "hatch"
    return "" if layer.side == next(other.side for other in layers) else "dots"


def _legend(parts: list[str], series: Series, y: float, width: int) -> float:
    x = float(_LEFT)
    side = ""
    rest = others(layer.tag for layer in series.layers)
    for layer in series.layers:
        lead = f"{layer.side}: " if layer.side != side else ""
        x += _APART if lead and x > _LEFT else 0
        length = 19 + (len(lead) + len(layer.tag)) * _CHAR + 14
        if x + length > width - _RIGHT and x > _LEFT:
            x, y = float(_LEFT), y + _LEGEND
        if lead:
            parts.append(text(x, y + 14, lead.strip(), weight="bold", cls="g-ink"))
            x += len(lead) * _CHAR + 4
            side = layer.side
        parts.append(rect(x, y + 3, 13, 13, cls=tag_class(layer.tag, rest)))
        if pattern := pattern_of(layer, series.layers):
            parts.append(rect(x, y + 3, 13, 13, fill=f"url(#{pattern})"))
        parts.append(text(x + 18, y + 14, layer.tag, cls="g-ink"))
        x += 19 + len(layer.tag) * _CHAR + 14
    return y + _LEGEND


# ---- the calls


def shown_lanes(series: Series) -> list[str]:
    """The lanes that are drawn: all, or the first of each kind where there are many."""
    lanes = series.lanes
    if len(lanes) <= _LANES:
        return lanes
    kinds: dict[str, list[str]] = {}
    for lane in lanes:
        kinds.setdefault(lane.partition(" ")[0], []).append(lane)
    each = max(1, _LANES // len(kinds))
    return [lane for names in kinds.values() for lane in names[:each]]


def _lanes(parts: list[str], series: Series, frame: Frame, y: float) -> float:
    lanes = shown_lanes(series)
    for lane in lanes:
        parts.append(text(frame.left - 7, y + 13, lane, size_=11, anchor="end", cls="g-ink"))
        parts.append(rule(frame.left, frame.left + frame.width, y + _LANE - 1, cls="g-line"))
        drawn = -math.inf
        for span in series.spans:
            if span.lane != lane or span.end < frame.first or span.begin > frame.last:
                continue
            if (
                span.raised or frame.x(span.end) - drawn >= _THIN
            ):  # of calls at one place, the first and those that fail
                parts += _span(span, frame, y)
                drawn = frame.x(span.end)
        y += _LANE
    if series.calls > len(series.spans):
        said = f"of {series.calls} calls, the longest at each place is drawn"
        parts.append(text(frame.left, y + 13, said, size_=11, cls="g-muted"))
        y += _LANE
    if left := len(series.lanes) - len(lanes):
        parts.append(text(frame.left, y + 13, f"and {left} more ranks or engines", size_=11, cls="g-muted"))
        y += _LANE
    return y


def _span(span: Span, frame: Frame, y: float) -> Iterator[str]:
    x, to = frame.x(span.begin), frame.x(span.end)
    width = max(1.5, to - x)
    said = f"{span.lane}: {span.method}, events {span.begin} to {span.end}" + (", raised" if span.raised else "")
    yield rect(x, y + 1, width, _LANE - 4, cls="g-failed" if span.raised else "g-call", title=said)
    label = span.method + (" !" if span.raised else "")
    letters = int((width - 5) / 5.7)
    if letters < len(label):
        label = f"{label[: letters - 1]}…" if letters > 3 else ""
    if label:
        yield text(x + 3, y + 12, label, size_=10, cls="g-ink")


def _axis(parts: list[str], frame: Frame, y: float, counted: str) -> float:
    parts.append(text(frame.left - 7, y, counted, size_=11, anchor="end", cls="g-muted"))
    after = -math.inf
    for at in event_ticks(frame.last - frame.first):
        x = frame.x(frame.first + at)
        if x - after < _TICK:
            continue
        after = x
        anchor = "middle" if 20 < x - frame.left < frame.width - 20 else "start" if x - frame.left <= 20 else "end"
        parts.append(text(x, y, str(int(frame.first + at)), size_=11, anchor=anchor, cls="g-muted"))
    return y


# ---- the findings


def _flags(
    parts: list[str],
    series: Series,
    marks: Sequence[Mark],
    frame: Frame,
    edges: tuple[float, float],
    y: float,
    width: int,
) -> float:
    """A line for each finding, a numbered flag at its head, and below the axis what the numbers stand for."""
    top, bottom = edges
    seen = [m for m in marks if frame.has(m.at)]
    drawn = seen[:_MARKS]
    for at in dict.fromkeys(mark.at for mark in drawn):
        parts.append(f'<path d="M{frame.x(at):.1f} {top - 2:.1f}V{bottom:.1f}" class="g-mark" stroke-width="2"/>')
    for x, label in _labels([frame.x(mark.at) for mark in drawn]):
        half = 4 + 3.5 * len(label)
        parts.append(rect(x - half, top - _FLAG, 2 * half, _FLAG - 1, cls="g-flag"))
        parts.append(text(x, top - 4, label, size_=11, weight="bold", anchor="middle", cls="g-onflag"))
    for at, together in itertools.groupby(enumerate(drawn, 1), lambda numbered: numbered[1].at):
        for number, mark in together:
            said = f"{number}  event {at}: {mark.rule} {mark.code}; {mark.said}"
            y = _wrapped(parts, said, y, width, "g-said")
        held = series.held(at)
        y = _wrapped(parts, f"device after it: {held_in_words(held.device)}", y, width, "g-muted")
        if held.host:
            y = _wrapped(parts, f"host after it: {held_in_words(held.host)}", y, width, "g-muted")
    if len(seen) > _MARKS:
        y += 17
        parts.append(text(_RIGHT, y, f"and {len(seen) - _MARKS} more findings", cls="g-said"))
    return y


def _labels(places: list[float]) -> Iterator[tuple[float, str]]:
    """The numbers of findings, those together that would cover each other."""
    first = 0
    for i, x in enumerate(places):
        if i + 1 == len(places) or places[i + 1] - x > _FLAG:
            numbers = [str(n + 1) for n in range(first, i + 1)]
            yield places[first], ", ".join(numbers) if len(numbers) < 3 else f"{numbers[0]}–{numbers[-1]}"
            first = i + 1


def _wrapped(parts: list[str], said: str, y: float, width: int, cls: str) -> float:
    for line in textwrap.wrap(said, int((width - 2 * _RIGHT) / _CHAR), break_long_words=False):
        y += 17
        parts.append(text(_RIGHT, y, line, cls=cls))
    return y

"""The timeline of a plan as SVG: both peak modes side by side, the device above and the host below.

Knows layout and colours. Does not know how the figures came about; needs no plotting library.

Each step is a column, each movement of bytes in it a slice of that column; what is held is stacked by owner and kind,
under a line for the capacity. A host copy of the frozen base is hatched: file-backed, it could be dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple
from xml.sax.saxutils import escape

from colocert.plan import FROZEN, Bytes, Category, ModePlan, Moment, Plan, Step, size
from colocert.rules.run import ENGINE
from colocert.svg import INK as _INK
from colocert.svg import rect as _rect
from colocert.svg import rule as _rule
from colocert.svg import text as _text

WIDTH, HEIGHT = 1640, 850
_LEFT, _RIGHT, _BETWEEN = 84, 24, 40
_TOP, _ROWS, _LABELS = 96, (270, 230), 128
_BAND = 20
_TICKS = 4
_ABOVE = 1.12
"""The panel's upper edge over what is highest in it: leaves a line for text."""
_CHAR = 5.3
"""Width of a letter of the phase names."""

_COLOURS = {
    "base": "#3d6098",
    "adapter": "#4f9d69",
    "optimizer": "#7c6bb0",
    "other": "#97a3b0",
    "grads": "#c0404a",
    "communicators": "#a08c2c",
    "activations": "#6fb7cf",
    "weights": "#dd8244",
    "kv_cache": "#f2c98a",
    "cuda_graph": "#8d7058",
}
_NAMES = {
    "base": "frozen base",
    "other": "rest of the backup",
    "grads": "gradient buffers",
    "kv_cache": "KV cache",
    "cuda_graph": "graphs",
}
_STACK = tuple(_COLOURS)
_FAINT, _LINE, _OVER = "#8a94a0", "#d9dee3", "#b3001b"

_HEAD = f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"
 font-family="Helvetica, Arial, sans-serif" font-size="12">
<defs><pattern id="evictable" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<path d="M0 0V7" stroke="#ffffff" stroke-width="3" stroke-opacity="0.55"/></pattern></defs>
<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>"""


class _Panel(NamedTuple):
    """One chart: a mode's device or host, where it is drawn, and the bytes at its upper edge."""

    x: float
    y: float
    width: float
    height: float
    top: float
    capacity: int
    held: Callable[[Moment], Bytes]
    hatched: bool

    def up(self, nbytes: float) -> float:
        return self.y + self.height * (1 - nbytes / self.top)


def svg(plan: Plan) -> str:
    """The picture as one SVG document."""
    parts = [
        _HEAD,
        f"<title>{escape(plan.shape.title)}</title>",
        _text(_LEFT, 32, plan.shape.title, size_=18, weight="bold"),
        _text(_LEFT, 52, "device: bytes on one GPU; host: bytes of copies on one node", fill=_FAINT),
    ]
    width = (WIDTH - _LEFT - _RIGHT - _BETWEEN) / 2
    capacities = (plan.device_capacity, plan.host_capacity)
    held: tuple[Callable[[Moment], Bytes], ...] = (lambda m: m.device, lambda m: m.host)
    tops = [
        _ABOVE * max(capacity, *(sum(f(m).values()) for mode in plan.modes.values() for m in mode.moments))
        for capacity, f in zip(capacities, held, strict=True)
    ]
    for column, mode in enumerate(plan.modes.values()):
        x, y = _LEFT + column * (width + _BETWEEN), float(_TOP)
        parts.append(_text(x, _TOP - 14, f"{mode.mode}-peak", size_=15, weight="bold"))
        for row, height in enumerate(_ROWS):
            panel = _Panel(x, y + _BAND, width, height, tops[row], capacities[row], held[row], row == 1)
            parts += _panel(panel, mode, "GPU" if row == 0 else "host", axis=column == 0)
            y += _BAND + height + 14
        parts += _step_labels(x, y, width, mode)
    parts += _legend(plan)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _panel(panel: _Panel, mode: ModePlan, what: str, *, axis: bool) -> Iterator[str]:
    yield _rect(panel.x, panel.y, panel.width, panel.height, fill="#f7f8fa")
    for i in range(_TICKS + 1):
        level = panel.capacity * i / _TICKS
        yield _rule(panel.x, panel.x + panel.width, panel.up(level), stroke=_LINE)
        if axis:
            yield _text(panel.x - 8, panel.up(level) + 4, size(round(level)) if i else "0", anchor="end", fill=_INK)
    columns = _columns(mode)
    each = panel.width / len(columns)
    for i, (step, moments) in enumerate(columns):
        slice_ = each / len(moments)
        for k, moment in enumerate(moments):
            yield from _stack(panel, panel.x + i * each + k * slice_, slice_, step, moment)
    yield from _bands(panel, mode, each)
    over = any(sum(panel.held(m).values()) > panel.capacity for m in mode.moments)
    colour = _OVER if over else _INK
    yield _rule(panel.x, panel.x + panel.width, panel.up(panel.capacity), stroke=colour, dash="6 3", width=1.6)
    said = f"{what} capacity {size(panel.capacity)}" + (", exceeded" if over else "")
    yield _text(panel.x + panel.width - 6, panel.y + 15, said, anchor="end", fill=colour)


def _stack(panel: _Panel, x: float, width: float, step: Step, moment: Moment) -> Iterator[str]:
    base = 0
    held = panel.held(moment)
    for category in sorted(held, key=_place):
        nbytes = held[category]
        y, height = panel.up(base + nbytes), panel.height * nbytes / panel.top
        said = f"{step.phase}: {step.label}; {category.owner} {_name(category)} {size(nbytes)}"
        yield _rect(x, y, width + 0.4, height, fill=_COLOURS[category.kind], title=said)
        if panel.hatched and category == FROZEN:
            yield _rect(x, y, width + 0.4, height, fill="url(#evictable)")
        base += nbytes


def _bands(panel: _Panel, mode: ModePlan, each: float) -> Iterator[str]:
    at = panel.x
    for phase, steps in itertools.groupby(step.phase for step, _ in _columns(mode)):
        width = each * len(list(steps))
        yield _rect(at, panel.y - _BAND, width - 1, _BAND - 2, fill="#e8ecf1")
        if len(phase) * _CHAR < width:
            yield _text(at + width / 2, panel.y - 7, phase, anchor="middle", size_=10)
        at += width
        yield f'<path d="M{at:.1f} {panel.y:.1f}V{panel.y + panel.height:.1f}" stroke="#ffffff" stroke-width="1.5"/>'


def _step_labels(x: float, y: float, width: float, mode: ModePlan) -> Iterator[str]:
    columns = _columns(mode)
    each = width / len(columns)
    for i, (step, _) in enumerate(columns):
        at = x + (i + 0.5) * each + 4
        turn = f' transform="rotate(-52 {at:.1f} {y:.1f})"'
        yield _text(at, y, step.label, anchor="end", size_=11, extra=turn)


def _legend(plan: Plan) -> Iterator[str]:
    held = {c for mode in plan.modes.values() for m in mode.moments for c in (*m.device, *m.host)}
    for row, owner in enumerate(sorted({c.owner for c in held}, key=lambda o: o == ENGINE)):
        x, y = float(_LEFT), _TOP + sum(_ROWS) + 2 * (_BAND + 14) + _LABELS + 22 * row
        yield _text(x, y + 10, owner, weight="bold")
        x += 64
        for category in sorted((c for c in held if c.owner == owner), key=_place):
            name = _name(category) + (f" ({category.tag})" if category.tag != category.kind else "")
            yield _rect(x, y, 13, 13, fill=_COLOURS[category.kind])
            yield _text(x + 19, y + 11, name)
            x += 44 + 6.4 * len(name)
        if owner == ENGINE:
            yield _rect(x, y, 13, 13, fill=_COLOURS["base"])
            yield _rect(x, y, 13, 13, fill="url(#evictable)")
            yield _text(x + 19, y + 11, "frozen base on the host: evictable where file-backed")


def _columns(mode: ModePlan) -> list[tuple[Step, list[Moment]]]:
    return [(step, list(moments)) for step, moments in itertools.groupby(mode.moments, key=lambda m: m.step)]


def _place(category: Category) -> int:
    return _STACK.index(category.kind)


def _name(category: Category) -> str:
    return _NAMES.get(category.kind, category.kind)

"""Words of SVG: text, rectangles, horizontal rules. What every figure of this project is drawn with.

Knows attributes and escaping. Does not know what is drawn. A shape is painted either with a colour of its own (`fill`,
`stroke`) or by a class (`cls`), whose colour a style sheet gives.
"""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

INK = "#1f2933"


def text(
    x: float,
    y: float,
    said: str,
    *,
    size_: int = 12,
    weight: str = "normal",
    anchor: str = "start",
    fill: str = INK,
    cls: str = "",
    extra: str = "",
) -> str:
    """A line of text; `y` is its base line."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size_}" font-weight="{weight}" text-anchor="{anchor}"'
        f"{_paint('fill', fill, cls)}{extra}>{escape(said)}</text>"
    )


def rect(x: float, y: float, width: float, height: float, *, fill: str = "", cls: str = "", title: str = "") -> str:
    """A filled rectangle; `title` is shown where a pointer rests on it."""
    head = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"{_paint("fill", fill, cls)}'
    return f"{head}><title>{escape(title)}</title></rect>" if title else f"{head}/>"


def rule(x: float, to: float, y: float, *, stroke: str = "", cls: str = "", dash: str = "", width: float = 1) -> str:
    """A horizontal line from `x` to `to`."""
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    painted = _paint("stroke", stroke, cls)
    return f'<path d="M{x:.1f} {y:.1f}H{to:.1f}"{painted} stroke-width="{width}" fill="none"{dashed}/>'


def _paint(what: str, colour: str, cls: str) -> str:
    return f" class={quoteattr(cls)}" if cls else f' {what}="{colour}"'

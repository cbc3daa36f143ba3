"""What the benches said, as one page: a table with every row, a plot a bench, and the figures of `docs/performance.md`.

    python bench/_report.py build/bench            build/bench.md and build/bench/NAME.svg from build/bench/NAME.json
    python bench/_report.py build/bench --docs     puts the table of this run into docs/performance.md too

Knows rows (`_rows`) and how to draw them. Does not measure.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from _rows import LIMIT, MET, MISSED, PEER, Row, number

from colocert.report.palette import DARK, LIGHT, figure_css
from colocert.svg import rect, rule, text

DOCS = Path(__file__).parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- figures of one run: written by bench/_report.py -->", "<!-- end of the figures -->"
HEAD = ("bench", "what", "unit", "ours", "peer", "limit", "ratio", "target", "met")

WIDTH, LEFT, BAR, GAP, TOP = 840, 300, 16, 26, 56
_CLASS = {"ours": "m-default", PEER: "m-weights", LIMIT: "m-other-0"}

Told = tuple[str, str, list[Row]]
"""A bench's name, its title and its rows."""


def read(folder: Path) -> list[Told]:
    """What every bench of a run said, by name."""
    found = []
    for path in sorted(folder.glob("*.json")):
        told: dict[str, Any] = json.loads(path.read_text())
        found.append((told["bench"], told["title"], [Row(**row) for row in told["rows"]]))
    return found


# ---- the table


def table(benches: Sequence[Told]) -> Iterator[str]:
    """Every row, as Markdown."""
    yield "| " + " | ".join(HEAD) + " |"
    yield "|" + "---|" * len(HEAD)
    for name, _, rows in benches:
        for row in rows:
            other = "" if row.theirs is None else f"{row.beside} {number(row.theirs)}"
            spread = "" if row.low == row.high else f" ({number(row.low)} … {number(row.high)})"
            cells = (
                *(name, row.what, row.unit, number(row.ours) + spread),
                *(other if row.kind == PEER else "", other if row.kind == LIMIT else ""),
                *("" if row.ratio is None else number(row.ratio), row.target, row.met),
            )
            yield "| " + " | ".join(cells) + " |"


def machine() -> str:
    """Where and when, in words."""
    model = next((x.split(":")[1].strip() for x in _lines("/proc/cpuinfo") if x.startswith("model name")), "")
    memory = next((int(x.split()[1]) >> 20 for x in _lines("/proc/meminfo") if x.startswith("MemTotal")), 0)
    day = datetime.datetime.now(datetime.timezone.utc).date()
    load = os.getloadavg()[0]
    python = platform.python_version()
    return (
        f"{day}: {model or platform.machine()}, {os.cpu_count()} cores, {memory} GiB, Python {python}, "
        f"Linux {platform.release().split('-')[0]}; load {load:.1f} at the end."
    )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


# ---- plots


def plot(name: str, title: str, rows: Sequence[Row]) -> str:
    """One bench: what was measured as groups of bars, each group on a scale of its own; a line where the target is."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.what, row.unit), []).append(row)
    body, y = [], TOP
    for (what, unit), mine in groups.items():
        body += _group(what, unit, mine, y)
        y += GAP + BAR * (1 + sum(row.theirs is not None for row in mine))
    height = y + 8
    legend, x = [], LEFT
    for label, cls in (("ours", "ours"), ("peer", PEER), ("limit", LIMIT)):
        legend += [rect(x, 30, 11, 11, cls=_CLASS[cls]), text(x + 16, 40, label, size_=11, cls="g-muted")]
        x += 74
    legend += [_target(x + 6, 28, 14), text(x + 14, 40, "target", size_=11, cls="g-muted")]
    dark = f"@media(prefers-color-scheme:dark){{{figure_css(DARK)}}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="system-ui,sans-serif" role="img" aria-label="{name}"><style>{figure_css(LIGHT)}{dark}</style>'
        + rect(0, 0, WIDTH, height, cls="g-bg")
        + text(12, 20, _short(f"{name}: {title}", 92), size_=13, weight="bold", cls="g-ink")
        + "".join([*legend, *body])
        + "</svg>\n"
    )


def _group(what: str, unit: str, rows: Sequence[Row], y: float) -> Iterator[str]:
    bars = [("ours", "ours", rows[0].ours)]
    bars += [(row.beside, row.kind, row.theirs) for row in rows if row.theirs is not None]
    bounds = [bound for row in rows if (bound := _bound(row)) is not None]
    most = max([value for *_, value in bars] + bounds) or 1
    room = WIDTH - LEFT - 96
    missed = any(row.met == MISSED for row in rows)
    yield rule(12, WIDTH - 12, y - 8, cls="g-line")
    yield text(12, y + 11, _short(what, 44), size_=11, weight="bold", cls="g-ink")
    yield text(
        12, y + 25, f"{unit}{', target missed' if missed else ''}", size_=10, cls="g-said" if missed else "g-muted"
    )
    for place, (label, kind, value) in enumerate(bars):
        at, width = y + place * BAR, max(1.0, value / most * room)
        yield rect(LEFT, at, width, BAR - 4, cls=_CLASS[kind], title=f"{label}: {number(value)} {unit}")
        said = number(value) if kind == "ours" else f"{number(value)}  {label}"
        inside = width > 0.6 * room and kind != "ours"
        x, anchor = (LEFT + width - 6, "end") if inside else (LEFT + width + 5, "start")
        yield text(x, at + 10, said, size_=10, anchor=anchor, cls="g-onflag" if inside else "g-ink")
    for bound in bounds:
        yield _target(LEFT + bound / most * room, y - 2, BAR)


def _bound(row: Row) -> float | None:
    """Where ours may be at most, or must be at least, in the unit of the row."""
    if not row.target:
        return None
    value = float(row.target[1:].replace(",", ""))
    if row.theirs is None:
        return value
    inverse = row.ratio is not None and row.target.startswith("≥")
    return row.theirs / value if inverse else row.theirs * value


def _target(x: float, y: float, height: float) -> str:
    return f'<path d="M{x:.1f} {y:.1f}v{height}" class="g-mark" stroke-width="2" fill="none"/>'


def _short(said: str, length: int) -> str:
    return said if len(said) <= length else said[: length - 1] + "…"


# ---- the files


def main(arguments: Sequence[str]) -> None:
    folder = Path(arguments[0])
    benches = read(folder)
    if not benches:
        sys.exit(f"{folder} must hold what benches wrote with --json (got no *.json)")
    said = [f"## {name}\n\n{title}.\n\n![{name}](bench/{name}.svg)\n" for name, title, _ in benches]
    for name, title, rows in benches:
        (folder / f"{name}.svg").write_text(plot(name, title, rows))
    every = [row for _, _, rows in benches for row in rows]
    held = [row for row in every if row.met]
    summary = f"{sum(row.met == MET for row in held)} of {len(held)} targets met."
    page = "\n".join(["# Benches\n", machine(), "", *said, "## All rows\n", *table(benches), "", summary, ""])
    folder.with_suffix(".md").write_text(page)
    print(f"wrote {folder.with_suffix('.md')}: {summary}")
    if "--docs" in arguments:
        before, _, rest = DOCS.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        figures = "\n".join([BEGIN, "", machine(), "", *table(benches), "", summary, "", END])
        DOCS.write_text(before + figures + after)
        print(f"wrote {DOCS}")


if __name__ == "__main__":
    main(sys.argv[1:])

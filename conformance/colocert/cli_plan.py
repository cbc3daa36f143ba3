"""`colocert plan SHAPE`: the peaks of a shape as tables, what does not fit in plain sentences, the timeline as SVG.

Knows the command's arguments and how a plan is laid out in a terminal. Does not know how a plan is made.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

USAGE = 4
WIDTH = 160
"""Columns of what is printed where nobody says how wide it may be: to a file or into a pipe."""


def register(commands: Any) -> None:
    """Adds the command to those of `colocert`."""
    command = commands.add_parser("plan", help="what a shape needs in each mode and phase, and what does not fit")
    command.add_argument("shape", metavar="SHAPE", help="a shape that ships (a wrong name lists them), or a .toml file")
    command.add_argument("--svg", type=Path, metavar="FILE", help="draw the timeline of both modes")
    command.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    from colocert.plan import plan
    from colocert.shapes import ShapeError, load

    try:
        found = plan(load(arguments.shape))
        if arguments.svg is not None:
            from colocert.plan_svg import svg

            arguments.svg.parent.mkdir(parents=True, exist_ok=True)
            arguments.svg.write_text(svg(found), encoding="utf-8")
    except (ShapeError, OSError) as error:
        print("colocert: " + " ".join(str(error).split()), file=sys.stderr)
        return USAGE
    _show(found)
    if arguments.svg is not None:
        print(f"wrote {arguments.svg}")
    return 0


def _show(found: Any) -> None:
    from rich.console import Console
    from rich.text import Text

    from colocert.plan import verdicts

    told = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(highlight=False, width=None if told else WIDTH)
    console.print(Text(found.shape.title, style="bold"))
    for mode in found.modes.values():
        console.print(_peaks(found, mode))
    for line in verdicts(found):
        console.print(Text(line))
    console.print(_inputs(found.shape))


def _peaks(found: Any, mode: Any) -> Any:
    """A row a phase, and one for the whole: the peaks, and what each is made of."""
    from rich.table import Table

    from colocert.plan import size

    table = Table(title=f"{mode.mode}-peak: device of one GPU, host of one node", title_justify="left")
    for name in ("phase", "device", "of it", "host", "of it", "host, file-backed"):
        table.add_column(name, justify="right" if name.startswith(("device", "host")) else "left")
    for phase in (*mode.phases(), None):
        device, host = mode.device_peak(phase), mode.host_peak(phase)
        backed = mode.host_peak(phase, file_backed=True).on_host(file_backed=True)
        table.add_row(
            phase or "peak",
            size(device.on_device),
            _parts(device.device),
            size(host.on_host()),
            _parts(host.host),
            size(backed),
            style="bold" if phase is None else "",
        )
    written = max(m.written for m in mode.moments)
    table.caption = (
        f"capacity: {size(found.device_capacity)} a GPU, {size(found.host_capacity)} a node; "
        f"file-backed: beside {size(written)} of evictable file pages"
    )
    return table


def _parts(held: Any) -> str:
    """What a peak is made of, by owner, the largest first."""
    from colocert.plan import size

    owners: dict[str, list[str]] = {}
    for category, nbytes in sorted(held.items(), key=lambda item: -item[1]):
        owners.setdefault(category.owner, []).append(f"{category.kind} {size(nbytes)}")
    return "\n".join(f"{owner}: {', '.join(parts)}" for owner, parts in sorted(owners.items())) or "nothing"


def _inputs(shape: Any) -> Any:
    """Every figure of the shape, marked measured or computed."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="inputs", title_justify="left")
    for name in ("figure", "value", "kind", "source or formula"):
        table.add_column(name, justify="right" if name == "value" else "left", no_wrap=name == "kind")
    for name, figure in shape.figures():
        table.add_row(Text(name), number(name, figure.number), figure.kind, Text(figure.origin, overflow="fold"))
    return table


def number(name: str, value: float) -> str:
    """A figure for people: bytes with a unit where the name says that they are bytes, else the number."""
    from colocert.plan import size

    section, _, field = name.partition(".")
    is_bytes = section in ("trainer", "engine") or field.endswith(("_bytes", "_per_node", "_reserved"))
    if is_bytes and field != "gpus_per_node":
        return size(round(value))
    return f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:.3g}"

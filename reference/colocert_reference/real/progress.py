"""A run of the learning pair as it goes: a line an iteration, or on a terminal a table that grows, with a bar of bytes.

Knows samples, iterations and rich. Does not know how a run goes, and imports neither torch nor the kit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colocert_reference.real.loop import Iteration
    from colocert_reference.real.pair import Sample

MIB = 1 << 20
PHASES = ("rollout", "to training", "training", "to rollout")
COLUMNS = (
    "iter",
    "reward",
    "loss",
    "gap",
    "adapter",
    "device",
    "host",
    *(f"{phase} s" for phase in PHASES),
    "best sample",
)
TITLES = {"device": "device MiB", "host": "host MiB"}
WIDTHS = (4, 6, 8, 8, 7, 10, 8, 9, 13, 10, 12, 12)
_SHOWN, _BAR = 12, 48
_SIDES = {"trainer": "blue", "engine": "dark_orange3"}


class Progress:
    """Told of each step and each iteration. `device` and `host` are both sides' peaks since the last iteration."""

    def __init__(self, title: str, capacity: int, tell: Callable[[str], None] = print) -> None:
        self.title, self.capacity, self.tell = title, capacity, tell
        self.rows: list[tuple[str, ...]] = []
        self.last: Sample | None = None
        self._clear()

    def _clear(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.device = self.host = 0

    def step(self, sample: Sample) -> None:
        self.last = sample
        if sample.phase in self.seconds:
            self.seconds[sample.phase] += sample.seconds
        self.device, self.host = max(self.device, sample.on_device), max(self.host, sample.on_host)
        self.redraw()

    def iteration(self, done: Iteration) -> None:
        self.rows.append(self.row(done))
        self._clear()
        self.added()

    def row(self, done: Iteration) -> tuple[str, ...]:
        """An iteration's cells, in the order of `COLUMNS`."""
        return (
            str(done.number),
            f"{done.reward:.3f}",
            f"{done.loss:+.4f}",
            f"{done.gap:.1e}",
            f"v{done.version}",
            f"{self.device / MIB:.1f}",
            f"{self.host / MIB:.1f}",
            *(f"{self.seconds[phase]:.2f}" for phase in PHASES),
            done.sample,
        )

    def __enter__(self) -> Progress:
        self.tell(self.title)
        self.tell(_line(tuple(TITLES.get(name, name) for name in COLUMNS)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to put back."""

    def transcript(self) -> list[str]:
        """The lines of the run so far, whatever was shown of them."""
        return [self.title, _line(tuple(TITLES.get(name, name) for name in COLUMNS)), *map(_line, self.rows)]

    def redraw(self) -> None:
        """Lines do not change."""

    def added(self) -> None:
        self.tell(_line(self.rows[-1]))


class LiveProgress(Progress):
    """On a terminal: the last iterations, and what both sides hold at the moment."""

    def __init__(self, title: str, capacity: int, console: Any) -> None:
        from rich.live import Live

        super().__init__(title, capacity)
        self.live = Live(console=console, refresh_per_second=8, transient=False)

    def __enter__(self) -> Progress:
        self.live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.redraw(ended=True)
        self.live.__exit__(kind, error, trace)

    def added(self) -> None:
        self.redraw()

    def redraw(self, *, ended: bool = False) -> None:
        self.live.update(self.drawn(ended=ended))

    def drawn(self, *, ended: bool = False) -> Any:
        from rich.console import Group
        from rich.table import Table

        table = Table(title=self.title, title_justify="left", pad_edge=False)
        for name in COLUMNS:
            justify: Any = "left" if name == "best sample" else "right"
            table.add_column(TITLES.get(name, name), justify=justify, no_wrap=True)
        for cells in self.rows[-_SHOWN:]:
            table.add_row(*cells)
        return table if ended or self.last is None else Group(table, *self._now(self.last))

    def _now(self, sample: Sample) -> list[Any]:
        """The step that ended last, and a bar of the device: trainer, engine, free."""
        from rich.text import Text

        whole = self.capacity or max(1, sample.on_device)
        bar, used = Text("device "), 0
        for side, colour in _SIDES.items():
            cells = round(_BAR * sample.device.get(side, 0) / whole)
            bar.append("█" * cells, style=colour)
            used += cells
        bar.append("░" * max(0, _BAR - used), style="bright_black")
        held = ", ".join(f"{side} {sample.device.get(side, 0) / MIB:.0f}" for side in _SIDES)
        bar.append(f" {held} of {whole / MIB:.0f} MiB; host {sample.on_host / MIB:.0f} MiB")
        return [Text(f"{sample.phase}: {sample.step}", style="bold"), bar]


def progress(title: str, capacity: int) -> Progress:
    """A table by rich where standard output is a terminal; else lines."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            return LiveProgress(title, capacity, Console())
    return Progress(title, capacity, lambda line: print(line, flush=True))


def _line(cells: tuple[str, ...]) -> str:
    *numbers, words = (cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True))
    return "  ".join((*numbers, words.strip()))

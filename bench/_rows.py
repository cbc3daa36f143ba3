"""What every bench does alike: rounds that alternate, medians and spread, ratios beside their targets, rows as JSON.

Knows numbers and how they are told. Does not know what is measured.

A script measures, says its rows (`beside` for a ratio, `alone` for a figure by itself) and calls `finish`, which writes
them to the file that `--json` names. `--quick` asks for few rounds and small sizes: it shows that a script works, not
what it measures.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

PEER, LIMIT = "peer", "limit"
MET, MISSED, NO_TARGET = "yes", "no", ""


@dataclass(frozen=True)
class Row:
    """One line of the table: ours, beside one other, in `unit`; `ratio` is held against `target`.

    `kind` says what the other is: a peer, or what the machine allows. `low` and `high` are the spread of ours.
    """

    what: str
    unit: str
    ours: float
    low: float
    high: float
    beside: str = ""
    kind: str = ""
    theirs: float | None = None
    ratio: float | None = None
    target: str = ""
    met: str = NO_TARGET


@dataclass
class Bench:
    """One script's rows."""

    name: str
    title: str
    quick: bool = False
    path: Path | None = None
    rows: list[Row] = field(default_factory=list)
    arguments: argparse.Namespace = field(default_factory=argparse.Namespace)

    @classmethod
    def started(
        cls, script: str, doc: str | None, *, options: Callable[[argparse.ArgumentParser], None] | None = None
    ) -> Bench:
        """The bench of a script, with what its command line says."""
        lines = (doc or "").strip().splitlines()
        parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--json", type=Path, metavar="FILE", help="writes the rows there")
        parser.add_argument("--quick", action="store_true", help="few rounds, small sizes")
        if options is not None:
            options(parser)
        given = parser.parse_args()
        return cls(Path(script).stem, lines[0].rstrip("."), given.quick, given.json, arguments=given)

    def rounds(self, usual: int) -> int:
        """How many rounds: so many, or 2 if it has to be quick."""
        return min(usual, 2) if self.quick else usual

    def beside(
        self,
        what: str,
        unit: str,
        ours: Sequence[float],
        beside: str,
        theirs: Sequence[float],
        *,
        kind: str = PEER,
        scale: float = 1,
        at_most: float | None = None,
        at_least: float | None = None,
        inverse: bool = False,
    ) -> Row:
        """Ours as a ratio of theirs, of the same rounds; the other way round with `inverse`."""
        each = [b / a if inverse else a / b for a, b in zip(ours, theirs, strict=True)]
        ratio = statistics.median(each)
        target, met = _held(ratio, at_most, at_least)
        mine = [value * scale for value in ours]
        other = statistics.median(theirs) * scale
        row = Row(what, unit, statistics.median(mine), min(mine), max(mine), beside, kind, other, ratio, target, met)
        return self._say(row)

    def alone(
        self,
        what: str,
        unit: str,
        ours: Sequence[float],
        *,
        at_most: float | None = None,
        at_least: float | None = None,
    ) -> Row:
        """A figure with a target of its own, or none."""
        value = statistics.median(ours)
        target, met = _held(value, at_most, at_least)
        return self._say(Row(what, unit, value, min(ours), max(ours), target=target, met=met))

    def _say(self, row: Row) -> Row:
        if not self.rows:
            print(HEAD)
        print(line(row))
        self.rows.append(row)
        return row

    def finish(self) -> None:
        """Writes the rows where they were asked for."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            told = {"bench": self.name, "title": self.title, "rows": [asdict(row) for row in self.rows]}
            self.path.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")


def alternate(ways: Mapping[str, Callable[[], float]], rounds: int, *, warm: int = 1) -> dict[str, list[float]]:
    """What each way measures, all in turn in every round; the first rounds only warm up."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + warm):
        for name, way in ways.items():
            value = way()
            if turn >= warm:
                found[name].append(value)
    return found


def number(value: float) -> str:
    """A figure with three digits that count."""
    if value == 0:
        return "0"
    size = abs(value)
    return (
        f"{value:,.0f}"
        if size >= 100
        else f"{value:.1f}"
        if size >= 10
        else f"{value:.2f}"
        if size >= 0.1
        else f"{value:.3g}"
    )


HEAD = f"{'what':<46}{'unit':<12}{'ours':>9}{'spread':>18}  {'beside':<34}{'':>9}{'ratio':>8}  {'target':<8}met"


def line(row: Row) -> str:
    """A row as a line of text."""
    theirs = "" if row.theirs is None else number(row.theirs)
    ratio = "" if row.ratio is None else number(row.ratio)
    spread = "" if row.low == row.high else f"{number(row.low)} … {number(row.high)}"
    return (
        f"{row.what:<46}{row.unit:<12}{number(row.ours):>9}{spread:>18}  {row.beside:<34}{theirs:>9}{ratio:>8}"
        f"  {row.target:<8}{row.met}"
    )


def _held(value: float, at_most: float | None, at_least: float | None) -> tuple[str, str]:
    if at_most is not None:
        return f"≤ {number(at_most)}", MET if value <= at_most else MISSED
    if at_least is not None:
        return f"≥ {number(at_least)}", MET if value >= at_least else MISSED
    return "", NO_TARGET

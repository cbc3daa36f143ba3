"""Seeded faults: what is broken on purpose, and the check of its row that must go red for it.

A row's scenario is given the fault's name and behaves as code with that fault would. `mutants/test_faults.py` runs each
row with each of its faults. A kill is the named check; a crash, a hang or another check is none.

    @pytest.mark.row("G02")
    @seeded({"pauses-one-tag": "released"})
    def test_...(row: Row) -> None:
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
_ROWS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Seeded:
    """One fault of one row, on the device `host`."""

    row: str
    fault: str
    red: str
    test: Callable[..., Any]
    torch: bool


def seeded(faults: Mapping[str, str]) -> Callable[[F], F]:
    """Names a row's faults, each with the check that must go red."""

    def mark(function: F) -> F:
        function.seeded_faults = dict(faults)  # type: ignore[attr-defined]
        return function

    return mark


def all_seeded() -> Iterator[Seeded]:
    """Every seeded fault of every row, in the order of the rows."""
    for row, test in all_rows():
        torch = any(mark.name == "torch" for mark in test.pytestmark)  # type: ignore[attr-defined]
        for fault, red in getattr(test, "seeded_faults", {}).items():
            yield Seeded(row, fault, red, test, torch)


def all_rows() -> list[tuple[str, Callable[..., Any]]]:
    """Every row and its test."""
    tests = [found for path in sorted(_ROWS.glob("test_*.py")) for found in _tests(path)]
    return sorted(tests, key=lambda found: found[0])


def _tests(path: Path) -> Iterator[tuple[str, Callable[..., Any]]]:
    module = importlib.import_module(f"gpu_tests.{path.stem}")
    for name, value in vars(module).items():
        marks = {mark.name: mark for mark in getattr(value, "pytestmark", [])}
        if name.startswith("test_") and "row" in marks:
            yield marks["row"].args[0], value

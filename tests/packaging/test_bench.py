"""The benches' table and plots: a target is held against what it is of, and every row is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    import _rows

    return _rows


def _bench(rows: ModuleType) -> object:
    return rows.Bench("mine", "Mine beside others")


def test_a_ratio_is_the_median_of_the_rounds_and_held_against_its_target(rows: ModuleType) -> None:
    bench = _bench(rows)
    row = bench.beside("x", "ms", [0.002, 0.004, 0.03], "other", [0.001, 0.004, 0.01], scale=1e3, at_most=1.5)
    assert (row.ours, row.low, row.high, row.theirs) == (4, 2, 30, 4)
    assert (row.ratio, row.target, row.met) == (2, "≤ 1.50", "no")
    faster = bench.beside("x", "ms", [1, 1, 1], "other", [50, 60, 70], inverse=True, at_least=55)
    assert (faster.ratio, faster.target, faster.met) == (60, "≥ 55.0", "yes")
    assert bench.alone("x", "s", [1, 9, 2], at_most=2).met == "yes"
    assert bench.alone("x", "s", [1.0]).met == ""


def test_rounds_alternate_and_the_first_warms_up(rows: ModuleType) -> None:
    order: list[str] = []
    found = rows.alternate({"a": lambda: float(order.append("a") or 1), "b": lambda: float(order.append("b") or 2)}, 2)
    assert order == ["a", "b"] * 3
    assert found == {"a": [1, 1], "b": [2, 2]}


def test_the_page_has_every_row_and_a_plot_that_is_sound(rows: ModuleType, tmp_path: Path) -> None:
    bench = rows.Bench("mine", "Mine & others", path=tmp_path / "bench" / "mine.json")
    bench.beside("a < b", "ms", [1.0], "a peer", [2.0], at_most=0.25)
    bench.beside("a < b", "ms", [1.0], "a limit", [0.5], kind=rows.LIMIT)
    bench.alone("memory", "MiB", [0.0], at_most=64)
    bench.finish()
    assert len(json.loads(bench.path.read_text())["rows"]) == 3
    subprocess.run([sys.executable, BENCH / "_report.py", tmp_path / "bench"], check=True, capture_output=True)
    page = (tmp_path / "bench.md").read_text()
    assert "| mine | a < b | ms | 1.00 | a peer 2.00 |  | 0.50 | ≤ 0.25 | no |" in page
    assert "| mine | a < b | ms | 1.00 |  | a limit 0.50 | 2.00 |  |  |" in page
    assert "1 of 2 targets met." in page
    drawn = ElementTree.parse(tmp_path / "bench" / "mine.svg")
    said = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "ms, target missed", "2.00  a peer", "0.50  a limit", "memory"} <= set(said)


def test_a_folder_without_rows_is_told(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, BENCH / "_report.py", tmp_path], capture_output=True, text=True)
    assert done.returncode == 1
    assert "must hold what benches wrote with --json" in done.stderr

"""Every row of the table has a test, and every test a seeded fault, or the table says why it has none."""

from __future__ import annotations

import re
from pathlib import Path

from gpu_tests.harness.faults import all_seeded
from gpu_tests.table import load

SOURCES = sorted(Path(__file__).parents[1].glob("test_*.py"))


def test_each_row_of_the_table_has_a_test() -> None:
    marked = {row for path in SOURCES for row in re.findall(r'mark\.row\("(\w+)"\)', path.read_text())}
    assert sorted(marked) == sorted(load())


def test_each_row_has_a_seeded_fault_or_a_reason() -> None:
    assert {one.row for one in all_seeded()} == {row.id for row in load().values() if not row.unseeded}

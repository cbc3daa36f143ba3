"""Each row goes red by the named check with each of its seeded faults, on the stand-in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_tests.harness.checks import RowRed
from gpu_tests.harness.faults import Seeded, all_seeded
from gpu_tests.harness.row import Row

Note = Callable[[str, object], None]


def _cases() -> list[object]:
    return [
        pytest.param(one, id=f"{one.row}-{one.fault}", marks=[pytest.mark.torch] if one.torch else [])
        for one in all_seeded()
    ]


@pytest.mark.usefixtures("needs_the_saver")
@pytest.mark.parametrize("seeded", _cases())
def test_the_named_check_goes_red(seeded: Seeded, tmp_path: Path, record_property: Note) -> None:
    if seeded.torch:
        pytest.importorskip("torch")
    with Row(seeded.row, "host", tmp_path, fault=seeded.fault) as row, pytest.raises(RowRed) as caught:
        seeded.test(row)
    record_property("red", sorted(caught.value.names))
    assert seeded.red in caught.value.names, f"void: {caught.value}"

"""The fixture `row`. A conftest imports it; `device_name` is the conftest's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from colocert.device import BuildFailed, Machine, NoCompiler, NoSaver
from colocert.device.machine import DeviceName
from gpu_tests.harness.row import Row


@pytest.fixture
def row(request: pytest.FixtureRequest, device_name: DeviceName, tmp_path: Path) -> Iterator[Row]:
    """The row that the test's mark names, on the device of this run."""
    mark = request.node.get_closest_marker("row")
    assert mark is not None, "a row's test is marked with its id: @pytest.mark.row('G02')"
    if device_name == "host":
        _needs_the_standin()
    failed = request.session.testsfailed
    with Row(mark.args[0], device_name, tmp_path) as row:
        row.properties = request.node.user_properties
        yield row
    if request.session.testsfailed == failed:  # a test that failed by itself says why
        assert row.judged, f"the test of {row.name} must end with row.judge(...), else nothing is held against it"


def _needs_the_standin() -> None:
    """Skips, with the reason, where there is no saver or no compiler. Where rows are required the gate fails a skip."""
    try:
        Machine().environment()
    except (NoSaver, NoCompiler, BuildFailed) as error:
        pytest.skip(str(error))

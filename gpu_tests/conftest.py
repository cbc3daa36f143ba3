"""The gate of gpu_tests, and what every row is given.

A row is a test with `@pytest.mark.row("G02")`, in `test_<topic>.py`; its id stands in rows.toml. What a row measured
goes through `row.record` into the result file.
"""

from __future__ import annotations

import os

import pytest

from . import gate
from .harness.fixtures import row

__all__ = ["row"]


def pytest_addoption(parser: pytest.Parser) -> None:
    gate.add_options(parser)


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    return gate.start(config)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", 'row("G02"): the row of rows.toml that this test judges')
    config.addinivalue_line("markers", "calibration: measures a machine; runs with --calibrate only")
    config.pluginmanager.register(gate.Gate(config), "gpu-tests-gate")
    wanted = gate.asked(config)
    # What a child process of a row reads too: the launcher lets COLOCERT_* through.
    os.environ.update(COLOCERT_KIND=wanted.kind, COLOCERT_WORLD=str(wanted.world))


@pytest.fixture(scope="session")
def device_name(request: pytest.FixtureRequest) -> str:
    """`host` or `cuda`."""
    return gate.asked(request.config).device

"""Stands in for the gate's until that is merged."""

from __future__ import annotations

import pytest

from gpu_tests.harness.fixtures import row

__all__ = ["row"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="host")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "row: id")


@pytest.fixture(scope="session")
def device_name(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("--device")

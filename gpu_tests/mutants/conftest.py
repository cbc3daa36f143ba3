"""Fixtures for what is tested of the rows themselves."""

from __future__ import annotations

import pytest

from colocert.device import NoSaver
from colocert.device.machine import find_preload


@pytest.fixture(scope="session")
def needs_the_saver() -> None:
    """Skips, with the reason, where torch_memory_saver is not installed."""
    try:
        find_preload()
    except NoSaver as error:
        pytest.skip(str(error))

"""The stand-in device, for the tests that need one."""

from __future__ import annotations

import pytest

from colocert.rig.live_device import lacking


@pytest.fixture
def stand_in() -> None:
    """Skips where this machine has no compiler or no saver."""
    why = lacking("host")
    if why:
        pytest.skip(why)

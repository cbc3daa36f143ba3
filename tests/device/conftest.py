"""Fixtures for rows on the stand-in device."""

from __future__ import annotations

from pathlib import Path

import pytest

from colocert.device import Machine

GIB = 1 << 30


@pytest.fixture
def shared(tmp_path: Path) -> Machine:
    """A device of 1 GiB that several children share."""
    return Machine(capacity=GIB, ledger=tmp_path / "ledger")

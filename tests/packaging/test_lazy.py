"""`import colocert` costs next to nothing: its names are there and are imported when they are asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import colocert

HEAVY = ("colocert.rig", "msgspec", "asyncio", "torch", "ray", "rich", "matplotlib")


@pytest.mark.parametrize("module", ["colocert", "colocert.plugin"])
def test_the_import_brings_in_nothing_heavy(module: str) -> None:
    """Beside what pytest itself has."""
    code = f"import sys, pytest; before = set(sys.modules); import {module}; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(HEAVY) & set(done.stdout.split())


def test_every_public_name_is_there_and_no_other() -> None:
    for name in colocert.__all__:
        assert getattr(colocert, name) is not None
    assert set(colocert.__all__) <= set(dir(colocert))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        colocert.Nothing  # noqa: B018

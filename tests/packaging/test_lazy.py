"""`import colocert` costs next to nothing: its names are there and are imported when they are asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import colocert

HEAVY = ("colocert.rig", "msgspec", "asyncio", "torch", "ray", "rich", "matplotlib")


@pytest.mark.parametrize("module", ["colocert", "colocert.plugin"])
def test_the_import_brings_in_nothing_heavy(module: str) -> None:
    """Beside what pytest itself has."""
    code = f"import sys, pytest; before = set(sys.modules); import {module}; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(HEAVY) & set(done.stdout.split())


FRAMEWORKS = ("torch", "ray", "transformers", "megatron", "peft", "matplotlib", "numpy")
ASKED = """
import runpy, sys
sys.argv = {argv!r}
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
except SystemExit as end:
    print("exit", end.code)
print("imported", *sys.modules)
"""


def _imported(tmp_path: Path, *argv: str) -> tuple[str, set[str]]:
    """How a command ended, and what it had imported by then."""
    code = ASKED.format(argv=list(argv))
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    *_, end, modules = done.stdout.splitlines()
    return end, set(modules.split())


def test_listing_the_rules_imports_no_framework_and_no_fold(tmp_path: Path) -> None:
    end, modules = _imported(tmp_path, "colocert.cli", "rules")
    assert end == "exit 0"
    assert not {"asyncio", "pytest", "colocert.rules.fold", "colocert.judge", *FRAMEWORKS} & modules


def test_a_run_of_pytest_with_an_implementation_imports_no_framework(tmp_path: Path) -> None:
    """The implementation is imported by the runner's child and nowhere else, whatever it brings along."""
    (tmp_path / "mine.py").write_text("from colocert_reference.colocert_impl import implementation\n")
    narrow = ("--profile=lifecycle", "--depth=1", "--faults=none")
    end, modules = _imported(tmp_path, "pytest", "-q", "-p", "no:cacheprovider", "--impl=mine.py", *narrow, ".")
    assert end == "exit 10", "nothing was collected, and the exploration is narrowed"
    assert "colocert.suite.run" in modules
    assert not {"mine", "colocert_reference", *FRAMEWORKS} & modules


def test_every_public_name_is_there_and_no_other() -> None:
    for name in colocert.__all__:
        assert getattr(colocert, name) is not None
    assert set(colocert.__all__) <= set(dir(colocert))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        colocert.Nothing  # noqa: B018

"""Running the command line in a process of its own, as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

IMPLS = Path(__file__).parents[1] / "plugin" / "impls"
Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Runs `colocert …` in an empty folder, as its script does: without that folder on the path."""

    def run(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith("PYTEST_") and k not in ("CI", "GITHUB_ACTIONS")
        }
        start = "import sys; sys.path.remove(''); from colocert.cli import main; sys.exit(main())"
        return subprocess.run(
            [sys.executable, "-c", start, *words],
            cwd=tmp_path,
            env={**kept, **(env or {})},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


@pytest.fixture
def small() -> str:
    """An implementation that does nothing and claims nothing: the quickest to certify."""
    return str(IMPLS / "small.py")


@pytest.fixture
def broken() -> str:
    """One that breaks rules."""
    return str(IMPLS / "releases_again.py")

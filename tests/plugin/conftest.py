"""Running pytest with the plugin in a process of its own, as a user does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

IMPLS = Path(__file__).parent / "impls"
_APART = ("CI", "PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_CURRENT_TEST", "PYTEST_DISABLE_PLUGIN_AUTOLOAD")


class Ended(NamedTuple):
    """How a process ended, and what it left."""

    code: int
    out: str
    err: str
    certificate: dict[str, Any] | None

    @property
    def last(self) -> str:
        return self.out.rstrip().rpartition("\n")[2]


Environment = Callable[..., dict[str, str]]


@pytest.fixture
def environment() -> Environment:
    """This process's, less what belongs to the outer pytest run."""

    def make(**more: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k not in _APART and not k.startswith("PYTEST_XDIST")}
        return {**kept, **more}

    return make


@pytest.fixture
def run(tmp_path: Path, environment: Environment) -> Callable[..., Ended]:
    """Runs pytest in an empty folder; `suite=False` leaves the suite out of the arguments."""

    def run_pytest(*words: str, suite: bool = True, cwd: Path = tmp_path, env: dict[str, str] | None = None) -> Ended:
        path = tmp_path / "certificate.json"
        path.unlink(missing_ok=True)
        collected = ["--pyargs", "colocert.suite"] if suite else []
        if any(word.startswith("--impl=") for word in words):
            evidence = tmp_path / "evidence"
            collected += [f"--certificate={path}", f"--evidence={evidence}"]
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *collected, *words]
        done = subprocess.run(
            command, cwd=cwd, env=environment(**(env or {})), capture_output=True, text=True, timeout=300
        )
        certificate = json.loads(path.read_text()) if path.exists() else None
        return Ended(done.returncode, done.stdout, done.stderr, certificate)

    return run_pytest


@pytest.fixture
def impl() -> Callable[[str], str]:
    """The `--impl` option for one of the implementations beside these tests."""
    return lambda name: f"--impl={IMPLS / name}.py"

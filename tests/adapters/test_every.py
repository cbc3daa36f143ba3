"""What holds for the adapter of every published framework. Needs none of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from colocert.record.manifest import Options
from colocert.record.runner import record

ADAPTERS = ("areal", "miles", "skyrl")
FRAMEWORKS = ("torch", "ray", "vllm", "megatron", "transformers", "aiohttp", "numpy", *ADAPTERS)


@pytest.mark.parametrize("name", ADAPTERS)
def test_importing_it_imports_no_framework(name: str) -> None:
    """Nor does asking for its claims, its version, or whether it has a factory that needs torch."""
    code = (
        f"import sys, colocert.adapters.{name} as m; m.implementation.claims; m.implementation.version\n"
        "hasattr(m.implementation, 'frozen_offload')\n"
        f"print(*sorted({set(FRAMEWORKS)!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_missing_framework_ends_a_run_with_11(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = f"COLOCERT_{name.upper()}_PATH"
    monkeypatch.setenv(variable, str(tmp_path))
    problem = record(f"colocert.adapters.{name}", tmp_path / "evidence", Options(depth=0, controls=False)).problem
    assert problem is not None
    assert problem.exit_code == 11
    assert variable in problem.message

"""The adapter for verl: what it costs and claims without the framework, and the verdict on the published wheel.

The verdict needs an unpacked wheel of verl 0.9.1: `COLOCERT_VERL_PATH`, or where `make fetch-verl` put it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from colocert.adapters import verl
from colocert.judge import Evidence, judge
from colocert.record.manifest import COMPLETE, Options
from colocert.record.runner import record
from colocert.rig.contract import check_implementation
from colocert.rig.payload_rig import has_torch

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "colocert", "verl-0.9.1")
NEEDS = ("torch", "ray", "peft", "transformers", "megatron")
RED = {"SP-03": {"nothing-matched", "tensor-dropped", "tensor-missed"}}
"""What 0.9.1 fails, explained in docs/certified.md."""


def wheel() -> Path | None:
    """The unpacked wheel, where there is one."""
    folder = Path(os.environ.get("COLOCERT_VERL_PATH") or CACHE)
    return folder if (folder / "verl" / "__init__.py").is_file() else None


def test_the_adapter_imports_without_the_framework() -> None:
    """And without torch; it claims sync-payload only where torch is installed."""
    told = "import sys; import colocert.adapters.verl; sys.exit(bool({'torch', 'verl', 'ray'} & set(sys.modules)))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", told], env=env).returncode == 0
    _, _, _, profiles = check_implementation(verl.implementation, "verl")
    assert profiles == (("sync-payload",) if has_torch() else ())


def test_a_folder_without_verl_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLOCERT_VERL_PATH", str(tmp_path))
    with pytest.raises(ImportError, match="COLOCERT_VERL_PATH must name a folder"):
        verl.VERL.load(verl.WORKER)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif(wheel() is None, reason="no wheel of verl 0.9.1: make fetch-verl, or COLOCERT_VERL_PATH")
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDS),
    reason=f"needs {', '.join(NEEDS)}: the reference extra",
)
def test_the_verdict_on_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SP-03 alone is red; every other rule is exercised and passes."""
    monkeypatch.setenv("COLOCERT_VERL_PATH", str(wheel()))
    recorded = record("colocert.adapters.verl", tmp_path, Options(profiles=("sync-payload",), depth=0, controls=False))
    assert recorded.problem is None
    assert (recorded.version, {scenario.status for scenario in recorded.scenarios}) == ("0.9.1", {COMPLETE})
    judged = judge(Evidence(tmp_path))
    outcomes = {row.id: row.outcome for row in judged.rules if row.profile == "sync-payload"}
    assert outcomes == {f"SP-0{n}": "fail" if n == 3 else "pass" for n in range(1, 8)}
    codes = {row.id: {f.code for case in row.cases for f in case.findings} for row in judged.rules if row.id in RED}
    assert codes == RED

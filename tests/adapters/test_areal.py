"""The adapter for AReaL: what it costs and claims without the framework, and what its engine does on the rig.

The verdict on areal 1.0.4 is kept in docs/certified/ and run again by test_certified_runs. The last test needs the
wheel: `COLOCERT_AREAL_PATH`, or where `make fetch-areal` put it.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from colocert.adapters import areal
from colocert.judge import Evidence, judge
from colocert.record.manifest import Options
from colocert.record.runner import record
from colocert.rig import Config, Rig
from colocert.rig.contract import check_implementation

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "colocert", "areal-1.0.4")
NEEDS = ("torch", "megatron", "torch_memory_saver", "ray", "transformers", "numpy")
ENGINE = "areal/engine/megatron_engine.py"


def test_a_missing_framework_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(areal.AREAL.variable, str(tmp_path))
    rig = Rig(Config(lora=True), areal.CLAIMS, lambda event: None)
    with pytest.raises(ImportError, match=r"areal must be installed .*COLOCERT_AREAL_PATH.*an unpacked wheel"):
        areal.implementation.trainer(rig)
    rig.close()
    assert areal.implementation.version == "not found"


def test_the_lifecycle_alone_is_claimed() -> None:
    name, _, claims, profiles = check_implementation(areal.implementation, "areal")
    assert (name, profiles) == ("areal", ("lifecycle",))
    assert {claims.early_grad_release, claims.group_teardown, claims.gradients_traced} == {False}


def test_without_its_hook_the_saver_refuses_every_call() -> None:
    """As torch_memory_saver 0.0.10 does: `enable_offload` off starts the process without LD_PRELOAD."""
    for call in (areal.NotPreloaded().pause, areal.NotPreloaded().resume):
        with pytest.raises(AssertionError, match="LD_PRELOAD"):
            call()


GUARDS = {
    "offload": ("        torch_memory_saver.pause()\n", "        if self.is_offload:\n            return\n"),
    "onload": ("        torch_memory_saver.resume()\n", "        if not self.is_offload:\n            return\n"),
}
"""Where each call reaches for the saver, and what would keep it from a second one."""


@pytest.mark.slow
@pytest.mark.torch
def test_with_both_calls_guarded_only_the_order_after_the_resume_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a copy of AReaL's own source: LC-05 has no other cause, and LC-04 only that of LC-14: the flag is last."""
    root = Path(os.environ.get(areal.AREAL.variable) or CACHE)
    if not (root / ENGINE).is_file():
        pytest.skip("no areal 1.0.4 here: make fetch-areal, or set COLOCERT_AREAL_PATH")
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        pytest.skip(f"areal needs {', '.join(missing)}: pip install 'colocert[reference]'")
    for entry in root.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / "areal").unlink()
    _copied(root / "areal", tmp_path / "areal", Path(ENGINE).relative_to("areal").parts)
    text = (root / ENGINE).read_text(encoding="utf-8")
    for call, guard in GUARDS.values():
        assert text.count(call) == 1
        text = text.replace(call, guard + call)
    (tmp_path / ENGINE).write_text(text, encoding="utf-8")
    monkeypatch.setenv(areal.AREAL.variable, str(tmp_path))
    record(
        "colocert.adapters.areal",
        tmp_path / "evidence",
        Options(profiles=("lifecycle",), depth=0, workers=2, controls=False),
    )
    rows = {row.id: row for row in judge(Evidence(tmp_path / "evidence")).rules}
    assert [rows[rule].outcome for rule in ("LC-05", "LC-12", "LC-14")] == ["pass", "fail", "fail"]
    red = {case.scenario for case in rows["LC-04"].cases if case.findings}
    assert red == {"lora-fault-clear-memory-wake", "full-fault-clear-memory-wake"}


def _copied(source: Path, target: Path, way: tuple[str, ...]) -> None:
    """A folder of links to what is in `source`; along `way` folders are folders, and its last name is left out."""
    target.mkdir()
    for entry in source.iterdir():
        if entry.name != way[0]:
            (target / entry.name).symlink_to(entry)
        elif len(way) > 1:
            _copied(entry, target / entry.name, way[1:])

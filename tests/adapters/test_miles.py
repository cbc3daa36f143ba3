"""The adapter for miles: what it costs and claims without the framework.

The verdicts on its versions are kept in docs/certified/ and run again by test_certified_runs.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import pytest

from colocert.adapters import miles
from colocert.rig import Claims, Config, Rig, Trainer


@pytest.fixture
def tree(make_tree: Callable[..., Path]) -> Callable[..., Path]:
    """Makes a folder with a package `miles` of these modules, and names it in the adapter's variable."""
    return lambda modules=MappingProxyType({}): make_tree("miles", miles.MILES.variable, modules)


def test_a_missing_framework_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(miles.MILES.variable, str(tmp_path))
    claims = miles.implementation.claims
    rig = Rig(Config(lora=True), claims, lambda event: None)
    with pytest.raises(ImportError, match=r"miles must be installed .*COLOCERT_MILES_PATH.*an unpacked wheel"):
        miles.implementation.trainer(rig)
    rig.close()
    assert miles.implementation.version == "not found"


def test_claims_follow_the_source_at_hand(tree: Callable[..., Path]) -> None:
    tree()
    plain = miles.claims()
    tree(
        {
            "backends/megatron_utils/actor": "def offload_grad_buffer(self): rematerialize_param_from_master_weight",
            "utils/arguments": '"--colocate-memory-peak-device"',
        }
    )
    newer = miles.claims()
    assert (plain.early_grad_release, plain.rematerialize) == (False, False)
    assert (newer.early_grad_release, newer.rematerialize) == (True, True)
    assert sorted(plain.peak_device) == ["cpu"]
    assert sorted(newer.peak_device) == ["cpu", "gpu"]


def test_adapters_without_backup_are_claimed_resident(tree: Callable[..., Path]) -> None:
    tree({"backends/megatron_utils/lora_utils": 'kwargs["disable_param_buffers_cpu_backup"] = True'})
    claims = miles.claims()
    assert claims.resident_while_released == {"adapters"}
    assert claims.adapter_source == "resident"


def test_the_version_comes_from_the_metadata_beside_the_package(tree: Callable[..., Path]) -> None:
    root = tree()
    assert miles.implementation.version == "unknown"
    (root / "miles_rl-1.2.3.dist-info").mkdir()
    (root / "miles_rl-1.2.3.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: miles-rl\nVersion: 1.2.3\n"
    )
    assert miles.implementation.version == "1.2.3"


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_version_of_a_checkout_is_its_commit(tree: Callable[..., Path]) -> None:
    git = ["git", "-C", str(tree()), "-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    assert miles.implementation.version == f"commit {head[:12]}"


def test_the_implementation_has_the_shape_of_one() -> None:
    claims: Claims = miles.implementation.claims
    factory: Callable[[Rig], Trainer] = miles.implementation.trainer
    assert (miles.implementation.name, miles.implementation.build_cost) == ("miles", "high")
    assert callable(factory)
    assert not claims.gradients_traced

"""The adapter for miles: what it costs and claims without the framework, and the verdicts on the published wheel.

The verdicts need an unpacked wheel of miles-rl 0.0.2: `COLOCERT_MILES_PATH`, or where `make certify IMPL=miles` put it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import pytest

from colocert.adapters import miles
from colocert.judge import Evidence, Judged, judge
from colocert.record.manifest import Options
from colocert.record.runner import record
from colocert.rig import Claims, Config, Rig, Trainer

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "colocert", "miles-rl-0.0.2")
NEEDS = ("torch", "megatron.core", "torch_memory_saver", "ray", "transformers", "numpy")

RED = {
    "LC-01": {"grads-kept"},
    "LC-02": {"grads-not-resumed"},
    "LC-04": {"saver-call"},
    "LC-05": {"double-release", "double-resume"},
    "LC-07": {"resumed-while-resident"},
    "LC-13": {"still-due"},
    "LC-14": {"stuck", "moved-twice"},
    "LC-16": {"rebuilt-differently"},
}
"""What 0.0.2 fails in the scenarios, explained one by one in docs/certified.md."""

GREEN = {"LC-06", "LC-08", "LC-09", "LC-10", "LC-12", "LC-15", "LC-17", "LC-20"}


def lacks() -> list[str]:
    """The packages that the adapter needs and that are not installed."""
    missing = []
    for name in NEEDS:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            missing.append(name)
    return missing


@pytest.fixture
def tree(make_tree: Callable[..., Path]) -> Callable[..., Path]:
    """Makes a folder with a package `miles` of these modules, and names it in the adapter's variable."""
    return lambda modules=MappingProxyType({}): make_tree("miles", miles.MILES.variable, modules)


def test_importing_it_imports_no_framework() -> None:
    code = (
        "import sys, colocert.adapters.miles as m; m.implementation.claims; m.implementation.version\n"
        "print(*sorted({'torch', 'ray', 'megatron', 'transformers', 'miles', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_missing_framework_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(miles.MILES.variable, str(tmp_path))
    claims = miles.implementation.claims
    rig = Rig(Config(lora=True), claims, lambda event: None)
    with pytest.raises(ImportError, match=r"miles must be installed .*COLOCERT_MILES_PATH.*an unpacked wheel"):
        miles.implementation.trainer(rig)
    rig.close()
    assert miles.implementation.version == "not found"


def test_a_missing_framework_ends_a_run_with_11(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(miles.MILES.variable, str(tmp_path))
    problem = record("colocert.adapters.miles", tmp_path / "evidence", Options(depth=0, controls=False)).problem
    assert problem is not None
    assert problem.exit_code == 11
    assert "COLOCERT_MILES_PATH" in problem.message


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


@pytest.fixture(scope="module")
def verdict(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    given = os.environ.get(miles.MILES.variable)
    root = Path(given) if given else CACHE
    if not (root / "miles").is_dir():
        pytest.skip("no miles-rl 0.0.2 here: `make certify IMPL=miles` fetches it, or set COLOCERT_MILES_PATH")
    if missing := lacks():
        pytest.skip(f"miles needs {', '.join(missing)}: pip install 'colocert[reference]'")
    folder = tmp_path_factory.mktemp("miles")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(miles.MILES.variable, str(root))
        if miles.implementation.version != "0.0.2":
            pytest.skip(f"the known verdicts are those of miles-rl 0.0.2 (got {miles.implementation.version})")
        record("colocert.adapters.miles", folder, Options(profiles=("lifecycle",), depth=0, controls=False))
    return judge(Evidence(folder))


@pytest.mark.slow
@pytest.mark.torch
class TestThePublishedWheel:
    """miles-rl 0.0.2 in every scenario, exploration left out."""

    def test_it_is_not_conformant(self, verdict: Judged) -> None:
        assert verdict.record.problem is None
        assert (verdict.record.name, verdict.record.version) == ("miles", "0.0.2")
        assert verdict.verdict == "not-conformant"

    @pytest.mark.parametrize("rule", sorted(RED))
    def test_a_red_rule_has_its_codes(self, verdict: Judged, rule: str) -> None:
        row = next(r for r in verdict.rules if r.id == rule)
        found = {finding.code for case in row.cases for finding in case.findings}
        assert (row.outcome, found) == ("fail", RED[rule])

    @pytest.mark.parametrize("rule", sorted(GREEN))
    def test_a_green_rule_was_exercised(self, verdict: Judged, rule: str) -> None:
        row = next(r for r in verdict.rules if r.id == rule)
        assert row.outcome == "pass"
        assert row.exercised > 0

    def test_every_rule_is_accounted_for(self, verdict: Judged) -> None:
        rest = {r.id for r in verdict.rules if r.profile == "lifecycle"} - set(RED) - GREEN
        outcomes = {r.outcome for r in verdict.rules if r.id in rest}
        assert rest == {"LC-03", "LC-11", "LC-19", "LC-21", "LC-22"}
        assert outcomes == {"not-applicable"}

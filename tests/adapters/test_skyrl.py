"""The adapter for SkyRL: what it costs and claims without the framework, and the verdicts on the published wheel.

The verdicts need an unpacked wheel of skyrl 0.4.0: `COLOCERT_SKYRL_PATH`, or where `make certify IMPL=skyrl` put it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from colocert.adapters import skyrl
from colocert.judge import Evidence, Judged, judge
from colocert.record.manifest import Options
from colocert.record.runner import record

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "colocert", "skyrl-0.4.0")
UTILS, DISPATCH = "backends/skyrl_train/distributed/megatron/megatron_utils", "backends/skyrl_train/workers"

RED = {
    "AS-03": {"emptied-storage"},
    "AS-06": {"belief-differs"},
    "AS-12": {"belief-differs", "left-on-device", "not-delivered"},
    "AS-18": {"read-released"},
}
"""What 0.4.0 fails, after an error only; explained one by one in docs/certified.md."""

GREEN = {"AS-01", "AS-02", "AS-04", "AS-05", "AS-09", "AS-10", "AS-16"}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes a folder with a package `skyrl` of these modules, and names it in `COLOCERT_SKYRL_PATH`."""

    def make(modules: Mapping[str, str] = MappingProxyType({})) -> Path:
        root = tmp_path / f"tree{len(list(tmp_path.iterdir()))}"
        for name, text in {"__init__": "", **modules}.items():
            path = root / "skyrl" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setenv(skyrl.SKYRL.variable, str(root))
        return root

    return make


def test_importing_it_imports_no_framework() -> None:
    code = (
        "import sys, colocert.adapters.skyrl as m; m.implementation.claims; m.implementation.version\n"
        "print(*sorted({'torch', 'ray', 'vllm', 'skyrl', 'aiohttp', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_missing_framework_ends_a_run_with_11(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(skyrl.SKYRL.variable, str(tmp_path))
    problem = record("colocert.adapters.skyrl", tmp_path / "evidence", Options(depth=0, controls=False)).problem
    assert problem is not None
    assert problem.exit_code == 11
    assert "COLOCERT_SKYRL_PATH" in problem.message


@pytest.mark.parametrize("marker", ["is_lora", "_chunk_has_lora_adapters"])
def test_adapters_that_stay_are_claimed_resident(tree: Callable[..., Path], marker: str) -> None:
    tree()
    assert (skyrl.claims().adapter_source, skyrl.claims().resident_while_released) == ("host", frozenset())
    tree({UTILS: f"def offload(models, {marker}): _FROZEN_OFFLOAD_DIR"})
    claims = skyrl.claims()
    assert (claims.adapter_source, claims.resident_while_released) == ("resident", {"adapters"})
    assert claims.file_backed_frozen


def test_claims_follow_the_dispatch_at_hand(tree: Callable[..., Path]) -> None:
    tree()
    assert (skyrl.claims().multi_lora, skyrl.claims().versions) == (False, False)
    tree({f"{DISPATCH}/worker_dispatch": "def ensure_active_adapter(self): increment_weight_version"})
    assert (skyrl.claims().multi_lora, skyrl.claims().versions) == (True, True)


@pytest.fixture(scope="module")
def verdict(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    given = os.environ.get(skyrl.SKYRL.variable)
    root = Path(given) if given else CACHE
    if not (root / "skyrl").is_dir():
        pytest.skip("no skyrl 0.4.0 here: `make certify IMPL=skyrl` fetches it, or set COLOCERT_SKYRL_PATH")
    if sys.version_info < (3, 11):
        pytest.skip("skyrl 0.4.0 needs Python 3.11 at least")
    folder = tmp_path_factory.mktemp("skyrl")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(skyrl.SKYRL.variable, str(root))
        if skyrl.implementation.version != "0.4.0":
            pytest.skip(f"the known verdicts are those of skyrl 0.4.0 (got {skyrl.implementation.version})")
        record("colocert.adapters.skyrl", folder, Options(profiles=("adapter-sync",), depth=0, controls=False))
    return judge(Evidence(folder))


class TestThePublishedWheel:
    """skyrl 0.4.0 in every scenario."""

    def test_it_is_not_conformant(self, verdict: Judged) -> None:
        assert verdict.record.problem is None
        assert (verdict.record.name, verdict.record.version) == ("skyrl", "0.4.0")
        assert verdict.verdict == "not-conformant"

    @pytest.mark.parametrize("rule", sorted(RED))
    def test_a_red_rule_has_its_codes_and_only_where_an_error_was_injected(self, verdict: Judged, rule: str) -> None:
        row = next(r for r in verdict.rules if r.id == rule)
        found = {finding.code for case in row.cases for finding in case.findings}
        assert (row.outcome, found) == ("fail", RED[rule])
        assert all("-faults-" in case.scenario for case in row.cases if case.findings)

    @pytest.mark.parametrize("rule", sorted(GREEN))
    def test_a_green_rule_was_exercised(self, verdict: Judged, rule: str) -> None:
        row = next(r for r in verdict.rules if r.id == rule)
        assert row.outcome == "pass"
        assert row.exercised > 0

    def test_every_rule_is_accounted_for(self, verdict: Judged) -> None:
        assert {r.id for r in verdict.rules if r.profile == "adapter-sync"} == set(RED) | GREEN

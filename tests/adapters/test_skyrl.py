"""The adapter for SkyRL: what it costs and claims without the framework, and when the published wheel fails.

The verdicts are kept in docs/certified/ and run again by test_certified_runs. The last test needs an
unpacked wheel of skyrl 0.4.0: `COLOCERT_SKYRL_PATH`, or where `make certify IMPL=skyrl` put it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import pytest

from colocert.adapters import skyrl
from colocert.extras import has_torch
from colocert.judge import Evidence, judge
from colocert.judge_trace import judge_events
from colocert.record.manifest import Options
from colocert.record.registry import BY_ID, run
from colocert.record.runner import record
from colocert.rig.contract import check_implementation
from colocert.rules.catalogue import catalogue
from colocert.trace import AnyEvent

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "colocert", "skyrl-0.4.0")
UTILS, DISPATCH = "backends/skyrl_train/distributed/megatron/megatron_utils", "backends/skyrl_train/workers"

GREEN = {"AS-01", "AS-02", "AS-04", "AS-05", "AS-09", "AS-10", "AS-16"}


@pytest.fixture
def tree(make_tree: Callable[..., Path]) -> Callable[..., Path]:
    """Makes a folder with a package `skyrl` of these modules, and names it in the adapter's variable."""
    return lambda modules=MappingProxyType({}): make_tree("skyrl", skyrl.SKYRL.variable, modules)


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


OFFLOAD = """
import os
import torch
from loguru import logger
from megatron.core.distributed import DistributedDataParallel as DDP

_FROZEN_OFFLOAD_DIR = "/nowhere"


def offload_megatron_model_to_cpu(models, is_lora=False):
    for chunk in models:
        assert isinstance(chunk, DDP)
        for buffer in [] if is_lora else chunk.buffers + chunk.expert_parallel_buffers:
            buffer.offload_to_cpu(move_params=True, move_grads=False)
        for number, (_, p) in enumerate(chunk.named_parameters()):
            if p.is_cuda and not p.requires_grad and p.numel():
                if not hasattr(p, "kept"):
                    p.kept = on_file(p.data, f"{_FROZEN_OFFLOAD_DIR}/{torch.distributed.get_rank()}-{number}.bin")
                p.data = torch.empty(0, dtype=p.dtype)


def on_file(data, path):
    nbytes = data.numel() * data.element_size()
    if not (TRUSTS and os.path.exists(path) and os.path.getsize(path) == nbytes):
        with open(path, "wb") as file:
            file.write(data.contiguous().reshape(-1).view(torch.uint8).cpu().numpy())
    mapped = torch.from_file(path, shared=False, size=nbytes, dtype=torch.uint8)
    if not TRUSTS:
        os.unlink(path)
    return mapped.view(data.dtype).view(data.shape)


def load_megatron_model_to_gpu(models, is_lora=False):
    for chunk in models:
        for buffer in [] if is_lora else chunk.buffers + chunk.expert_parallel_buffers:
            buffer.reload_from_cpu(move_params=True, move_grads=False)
        for _, p in chunk.named_parameters():
            if hasattr(p, "kept") and not p.numel():
                p.data = p.kept.to(torch.cuda.current_device(), non_blocking=True)
"""
"""An offload in the shape of SkyRL's; where it trusts, it does so by name and size."""


def claimed() -> tuple[str, ...]:
    return check_implementation(skyrl.implementation, "skyrl")[3]


def test_the_frozen_offload_is_claimed_where_there_is_one(tree: Callable[..., Path]) -> None:
    tree()
    assert claimed() == ("adapter-sync",)
    tree({UTILS: OFFLOAD})
    driven = has_torch() and importlib.util.find_spec("numpy") is not None
    assert claimed() == (("adapter-sync", "frozen-offload") if driven else ("adapter-sync",))


@pytest.mark.torch
@pytest.mark.parametrize("trusts", [False, True])
def test_an_offload_in_the_shape_of_its_own_is_judged_by_what_it_does(tree: Callable[..., Path], trusts: bool) -> None:
    """The way through the adapter adds no finding, and hides none."""
    for module in ("torch", "numpy"):
        pytest.importorskip(module)
    tree({"backends/__init__": "", UTILS: f"TRUSTS = {trusts}\n{OFFLOAD}"})
    rules = [rule for rule in catalogue().values() if rule.profile == "frozen-offload"]
    found, met = set(), set()
    for name in ("cycle", "another-checkpoint", "full-cycle"):
        events: list[AnyEvent] = []
        run(skyrl.implementation, skyrl.claims(), BY_ID[f"frozen-{name}"], events.append)
        judged = judge_events(events, rules)
        found |= {(name, finding.rule, finding.code) for finding in judged.findings}
        met |= {rule for rule, counts in judged.exercised.items() if counts}
    assert found == ({("another-checkpoint", "FO-02", "trusted-file")} if trusts else set())
    assert {"FO-01", "FO-02", "FO-03", "FO-10", "FO-11", "FO-12"} <= met


@pytest.fixture(scope="module")
def wheel() -> Path:
    root = Path(os.environ.get(skyrl.SKYRL.variable) or CACHE)
    if not (root / "skyrl").is_dir():
        pytest.skip("no skyrl 0.4.0 here: `make certify IMPL=skyrl` fetches it, or set COLOCERT_SKYRL_PATH")
    return root


def test_the_published_dispatch_fails_only_where_an_error_was_injected(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("skyrl needs Python 3.11 at least")
    monkeypatch.setenv(skyrl.SKYRL.variable, str(wheel))
    if skyrl.implementation.version != "0.4.0":
        pytest.skip(f"the known verdicts are those of skyrl 0.4.0 (got {skyrl.implementation.version})")
    record("colocert.adapters.skyrl", tmp_path, Options(profiles=("adapter-sync",), depth=0, controls=False))
    verdict = judge(Evidence(tmp_path))
    red = {row.id: [case for case in row.cases if case.findings] for row in verdict.rules if row.outcome == "fail"}
    assert red
    assert all("-faults-" in case.scenario for cases in red.values() for case in cases)
    assert {row.id for row in verdict.rules if row.outcome == "pass"} == GREEN

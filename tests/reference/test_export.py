"""The trainer's export, judged by logits: an engine of another code base computes what the trainer computes.

Tolerances. Both sides compute in FP32 and differ in the order of sums of at most 96 terms and in how they fuse; the
logits here are of order 1, where one rounding is 6e-8, and two layers are some dozens of roundings: 5e-6. A split
that is wrong in any row moves logits by more than 1e-3.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from .children import child, needs, ranks

pytestmark = needs("torch", "megatron.core", "torch_memory_saver", "transformers", "peft", "safetensors")

SCENARIOS = Path(__file__).with_name("export_scenarios.py")
ROUNDING, WRONG = 5e-6, 1e-3
PARALLEL = {"alone": (1, 1), "tensor": (2, 2), "data": (1, 2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What each rank of each layout saw."""
    results = {}
    for layout, (tensor, size) in PARALLEL.items():
        where = folder / layout
        where.mkdir()
        results[layout] = ranks(SCENARIOS, "agrees", size, folder=str(where), tensor=tensor, size=size)
    return results


@pytest.mark.parametrize("layout", PARALLEL)
def test_trainer_and_engine_agree_on_base_and_on_adapter(seen: dict[str, Any], layout: str) -> None:
    for rank in seen[layout]:
        assert rank["apart"]["base"] < ROUNDING
        assert rank["apart"]["adapter"] < ROUNDING
        assert rank["delta"] > 0.1  # of an adapter that does something


@pytest.mark.parametrize("layout", PARALLEL)
def test_what_a_sync_sends_asleep_is_what_it_sends_awake_and_the_same_on_all_ranks(
    seen: dict[str, Any], layout: str
) -> None:
    """Asleep under tensor parallelism, shards are gathered although the groups are gone."""
    [sent] = {tuple(rank["sent"]) for rank in seen[layout]}
    awake, asleep = sent
    assert awake == asleep


@pytest.mark.parametrize("layout", PARALLEL)
def test_all_ranks_export_identical_bytes_after_training(seen: dict[str, Any], layout: str) -> None:
    [exported] = {rank["exported"] for rank in seen[layout]}
    assert exported != seen[layout][0]["sent"][0]


def test_the_same_seed_gives_the_same_base_bit_for_bit_however_it_is_sharded(seen: dict[str, Any]) -> None:
    assert len({rank["base"] for ranks in seen.values() for rank in ranks}) == 1


def test_the_same_seed_trains_alike_with_one_and_with_two_tensor_parallel_ranks(seen: dict[str, Any]) -> None:
    """Eight steps, four of the optimizer; sums that are split in two round otherwise."""
    [alone], [zero, one] = seen["alone"], seen["tensor"]
    assert zero["losses"] == one["losses"]
    assert len(alone["losses"]) == 8
    assert zero["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    assert alone["losses"][-1] < alone["losses"][0] - 0.1


def test_gradients_of_the_adapter_are_the_same_with_one_and_with_two_tensor_parallel_ranks(
    seen: dict[str, Any], folder: Path
) -> None:
    """Of all A and B, whichever is sharded, from both ranks."""
    from safetensors.torch import load_file

    alone = load_file(folder / "alone" / "gradients-1-0.safetensors")
    assert all(gradient.count_nonzero() for gradient in alone.values())
    for rank in (0, 1):
        halves = load_file(folder / "tensor" / f"gradients-2-{rank}.safetensors")
        assert halves.keys() == alone.keys()
        for name, gradient in alone.items():
            assert float((halves[name] - gradient).abs().max()) < 1e-3 * float(gradient.abs().max()), name


def test_data_parallel_ranks_see_other_data(seen: dict[str, Any]) -> None:
    zero, one = seen["data"]
    assert zero["losses"] != one["losses"]


def test_a_wrong_split_of_a_fused_tensor_shows_in_the_logits() -> None:
    apart = child(SCENARIOS, "mistakes").wait().expect("ok")
    for way, difference in apart.items():
        assert (difference < ROUNDING) if way.startswith("right.") else (difference > WRONG), (way, apart)
    assert len(apart) == 8


def test_without_lora_the_whole_model_is_sent_by_the_engines_names() -> None:
    facts = child(SCENARIOS, "full").wait().expect("ok")
    assert facts["same"]
    assert facts["apart"] < ROUNDING
    no_adapter, no_split = facts["refused"]
    assert "lora_rank=0" in no_adapter
    assert "kv_heads must be a multiple of the tensor-parallel size 4" in no_split


def test_over_the_calls_of_the_process_the_engine_gets_base_and_adapter(tmp_path: Path) -> None:
    """The base as a file, awake and asleep; the adapter over the wire, asleep."""
    facts = (
        child(SCENARIOS, "process_calls", folder=str(tmp_path), wire=f"colocert-test-{os.getpid()}").wait().expect("ok")
    )
    assert "init() first" in facts["early"]
    assert facts["tokens"] == 8
    assert facts["loss"] == pytest.approx(0.0, abs=0.1)  # advantages sum to zero, and at first all are as likely
    assert facts["base"]["tensors"] == 3 + 2 * 9
    assert facts["same_asleep"]
    assert facts["apart"] < ROUNDING
    assert facts["saved"] == facts["loaded"] == {"iteration": 7, "version": 0}
    assert facts["version"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["asleep.safetensors", "base.safetensors", "checkpoint"]

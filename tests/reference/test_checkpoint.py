"""Checkpoints of the reference trainer: N steps are k steps, a new process, and N-k steps, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from .children import child, needs, ranks

pytestmark = needs("torch", "megatron.core", "torch_memory_saver", "safetensors")

SCENARIOS = Path(__file__).with_name("checkpoint_scenarios.py")
STEPS, SAVED = 6, 3


def ran(body: str, **arguments: Any) -> Any:
    return child(SCENARIOS, body, **arguments).wait().expect("ok")


def both(**arguments: Any) -> list[dict[str, Any]]:
    """What two ranks saw."""
    return ranks(SCENARIOS, "two_ranks", 2, **arguments)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_run_that_was_interrupted_is_bit_for_bit_one_that_was_not(tmp_path: Path, lora: bool) -> None:
    """Losses, parameters, moments, counters; fed and seeded steps. In place: every address and byte as before."""
    whole = ran("straight", steps=STEPS, lora=lora)
    begun = ran("begins", folder=str(tmp_path), steps=SAVED, lora=lora)
    assert begun["told"] == {"iteration": SAVED - 1, "version": SAVED}
    resumed = ran("goes_on", folder=str(tmp_path / "asleep"), steps=STEPS, lora=lora)
    assert resumed.pop("told") == begun["told"]
    assert resumed.pop("in_place")
    assert resumed == whole
    assert len(whole["losses"]) == STEPS
    # What is saved asleep, out of the host backup, is byte for byte what is saved awake, and nothing older is left.
    assert begun["awake"] == begun["asleep"]
    assert len(begun["asleep"]) == 2


def test_what_cannot_be_loaded_is_one_line_that_names_file_and_fix_and_changes_nothing(tmp_path: Path) -> None:
    facts = ran("refusals", folder=str(tmp_path))
    told = facts["told"]
    fixes = {
        "flipped": (".safetensors must have the SHA-256", "restore it"),
        "cut": (".safetensors must have the SHA-256", "restore it"),
        "gone": (".safetensors must be readable", "restore it"),
        "no_json": ("checkpoint.json must be JSON", "restore it"),
        "edited": ("checkpoint.json must be as it was saved", "restore it"),
        "foreign": ("checkpoint.json must be of", "name the folder"),
        "no_folder": ("nowhere/checkpoint.json must be readable", "name the folder"),
        "ffn": ("shape, ffn=96 (got ffn=64)", "build the trainer"),
        "full": ("shape, lora_rank=8 (got lora_rank=0)", "build the trainer"),
        "seed": ("this frozen base", "build the trainer"),
        "early": ("resident memory (got grad_buffer released)", "wake_up() first"),
        "asleep": ("resident memory (got default, grad_buffer released)", "wake_up() first"),
        "accumulating": ("between optimizer steps", "train() first"),
    }
    assert told.keys() == fixes.keys()
    for name, parts in fixes.items():
        assert "\n" not in told[name]
        assert all(part in told[name] for part in parts), told[name]
    assert facts["same"]
    assert facts["after"] == {"iteration": 4, "version": 0}


def test_a_crash_at_any_point_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Before the one rename that counts it is the previous one, after it the new one; the next save tidies up."""
    facts = ran("crash_points", folder=str(tmp_path))
    iterations = [iteration for _, iteration, _ in facts["loaded"]]
    assert all(whole for _, _, whole in facts["loaded"]), facts["loaded"]
    assert iterations == sorted(iterations)
    assert set(iterations) == {1, 2}
    renames = [n for n, (point, _, _) in enumerate(facts["loaded"]) if point == "after replace"]
    assert iterations.index(2) == renames[1]
    assert ["half a file", 1, True] in facts["loaded"]
    assert len(facts["left"]) == len(facts["work"]) == 2


def test_after_a_kill_in_the_middle_of_a_save_a_new_process_goes_on_from_the_previous_one(tmp_path: Path) -> None:
    outcome = child(SCENARIOS, "killed", folder=str(tmp_path)).wait()
    assert (outcome.kind, outcome.signal) == ("signal", "SIGKILL")
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    resumed = ran("goes_on", folder=str(tmp_path), steps=STEPS)
    assert resumed["told"] == {"iteration": 2, "version": 3}
    assert resumed["losses"] == ran("straight", steps=STEPS)["losses"]


def test_two_tensor_parallel_ranks_save_and_load_together(tmp_path: Path) -> None:
    """What one rank cannot read, no rank loads."""
    whole = both(folder=str(tmp_path), steps=STEPS, load=False)
    assert whole[0]["saved"] == whole[1]["saved"] == {"iteration": 2, "version": 3}
    shutil.copytree(tmp_path / "good", tmp_path / "broken")
    next((tmp_path / "broken").glob("rank1-*")).write_bytes(b"")
    resumed = both(folder=str(tmp_path), steps=STEPS, load=True)
    assert [rank["state"] for rank in resumed] == [rank["state"] for rank in whole]
    assert whole[0]["state"]["tensors"] != whole[1]["state"]["tensors"]
    (peer, said), (own, why) = (rank["errors"] for rank in resumed)
    assert (peer, own) == ("PeerFailed", "BadCheckpoint")
    assert "rank1-" in why
    assert why in said

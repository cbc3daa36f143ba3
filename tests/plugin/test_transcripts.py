"""Transcripts: written beside the evidence, compared with golden files only where a folder is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from colocert.record.handoff_scenarios import HANDOFF_SCENARIOS

Pytest = Callable[..., Any]
REPOSITORY = Path(__file__).parents[2]


GOLDEN = REPOSITORY / "reference" / "transcripts"
REFERENCE = ("--impl=reference", "--profile=lifecycle", "--depth=0", "-q")
Impl = Callable[[str], str]


def saver_calls(scenario: str) -> list[tuple[str, ...]]:
    lines = (GOLDEN / "lifecycle" / f"{scenario}.txt").read_text().splitlines()
    return [tuple(line.split()) for line in lines if line.startswith(("  pause", "  resume"))]


def test_the_reference_makes_its_golden_transcripts(run: Pytest, tmp_path: Path) -> None:
    ended = run("--impl=reference", "--profile=lifecycle,handoff", "--depth=0", f"--snapshot-dir={GOLDEN}", "-n", "2")
    assert ended.code == 10, ended.out  # --depth=0; every transcript is as it was
    written = {p.name for p in (tmp_path / "evidence" / "transcripts" / "lifecycle").iterdir()}
    assert written == {p.name for p in (GOLDEN / "lifecycle").iterdir()}


def test_scenarios_with_a_golden_transcript_are_those_that_are_read_in_a_review() -> None:
    kept = {p.stem for p in (GOLDEN / "handoff").iterdir()}
    assert kept == {s.id for s in HANDOFF_SCENARIOS if s.golden}
    assert {f"{peak}-{kind}-one" for peak in ("gpu", "cpu") for kind in ("lora", "full")} <= kept
    assert not {name for name in kept if "fault" in name or "acks" in name}


HAND_OFFS = {
    "gpu-lora": (
        "offload_grad_buffer, weights in, sleep, update_weights, kv_cache in",
        "kv_cache out, wake_up, weights out, train",
    ),
    "gpu-full": ("weights in, sleep, update_weights, kv_cache in", "kv_cache out, wake_up, weights out, train"),
    "cpu-lora": ("sleep, weights in, sleep, update_weights, kv_cache in", "kv_cache out, weights out, wake_up, train"),
    "cpu-full": ("sleep, weights in, sleep, update_weights, kv_cache in", "kv_cache out, weights out, wake_up, train"),
}
"""train→rollout and rollout→train, as the first seed tells them."""


@pytest.mark.parametrize("mode", HAND_OFFS)
def test_both_hand_offs_read_as_the_first_seed_tells_them(mode: str) -> None:
    told = []
    for line in (GOLDEN / "handoff" / f"{mode}-one.txt").read_text().splitlines():
        match line.replace("engine 0|", "").split():
            case ["call", "trainer", method] if method not in ("init", "clear_memory"):
                told.append(method)
            case ["release" | "resume" as verb, "weights" | "kv_cache" as tag] if not line.startswith("engine 0|  "):
                told.append(f"{tag} {'out' if verb == 'release' else 'in'}")
    to_rollout, to_train = HAND_OFFS[mode]
    assert ", ".join(told).endswith(f"{to_train}, {to_rollout}, sleep")  # the last one is close()


def test_a_changed_a_missing_and_a_left_over_transcript_fail_and_are_accepted(run: Pytest, tmp_path: Path) -> None:
    golden = tmp_path / "golden"
    shutil.copytree(GOLDEN, golden)
    changed, missing, left = (golden / "lifecycle" / f"{n}.txt" for n in ("lora-cycle", "full-cycle", "no-such"))
    changed.write_text(changed.read_text().replace("to host", "to nowhere"))
    missing.unlink()
    left.write_text("# left over\n")
    ended = run(*REFERENCE, f"--snapshot-dir={golden}")
    assert ended.code == 1
    assert ended.last.startswith("colocert: incomplete"), "a transcript never changes the verdict"
    assert "\x1b" not in ended.out
    assert "3 failed" in ended.out
    run(*REFERENCE, f"--snapshot-dir={golden}", "-k", "transcript", "--snapshot-update", "-n", "2")
    assert changed.read_text() == (GOLDEN / "lifecycle" / changed.name).read_text()
    assert missing.exists()
    assert not left.exists()


def test_a_narrowed_update_leaves_the_other_transcripts(run: Pytest, tmp_path: Path) -> None:
    golden = tmp_path / "golden"
    shutil.copytree(GOLDEN, golden)
    run(*REFERENCE, f"--snapshot-dir={golden}", "-k", "transcript[lora-cycle]", "--snapshot-update")
    assert len(list(golden.rglob("*.txt"))) == len(list(GOLDEN.rglob("*.txt")))


def test_lora_sleep_pauses_the_grad_buffers_and_wake_up_resumes_them() -> None:
    cycle = [("pause", "grad_buffer"), ("pause", "default"), ("resume", "default"), ("resume", "grad_buffer")]
    assert saver_calls("lora-plain-cycle") == cycle * 2


def test_an_early_release_and_sleep_pause_the_grad_buffers_once_between_them() -> None:
    cycle = [("pause", "grad_buffer"), ("pause", "default"), ("resume", "default"), ("resume", "grad_buffer")]
    assert saver_calls("lora-early-release") == cycle * 2

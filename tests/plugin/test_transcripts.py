"""Transcripts: written beside the evidence, compared with golden files only where a folder is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

Pytest = Callable[..., Any]
REPOSITORY = Path(__file__).parents[2]


GOLDEN = REPOSITORY / "reference" / "transcripts"
REFERENCE = ("--impl=reference", "--profile=lifecycle", "--depth=0", "-q")
Impl = Callable[[str], str]


def saver_calls(scenario: str) -> list[tuple[str, ...]]:
    lines = (GOLDEN / "lifecycle" / f"{scenario}.txt").read_text().splitlines()
    return [tuple(line.split()) for line in lines if line.startswith(("  pause", "  resume"))]


def test_the_reference_makes_its_golden_transcripts(run: Pytest, tmp_path: Path) -> None:
    ended = run(*REFERENCE, f"--snapshot-dir={GOLDEN}", "-n", "2")
    assert ended.code == 10, ended.out  # --depth=0; every transcript is as it was
    written = sorted(p.name for p in (tmp_path / "evidence" / "transcripts" / "lifecycle").iterdir())
    assert written == sorted(p.name for p in (GOLDEN / "lifecycle").iterdir())


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

"""The failure text says what is asked, what happened, where, what it means, and how to see it again."""

from __future__ import annotations

from typing import Any

import msgspec

from colocert.judge import Evidence
from colocert.report.terminal import failure_text


def test_a_broken_rule(broken: Evidence, snapshot: Any) -> None:
    case = broken.case("LC-03", "lora-early-release")
    assert failure_text(case, broken.record, broken.folder) == snapshot


def test_a_finding_of_exploration_has_its_calls_and_a_scenario_to_paste(broken: Evidence, snapshot: Any) -> None:
    case = broken.case("LC-03", "lora-early-release")
    explored = msgspec.structs.replace(
        case,
        scenario="explore-lora",
        steps=("offload_grad_buffer", "offload_grad_buffer"),
        paste='Scenario(\n    "explore-lora-LC-03-released-again",\n)',
        detail="released-again in 28 sequences",
    )
    assert failure_text(explored, broken.record, broken.folder) == snapshot


def test_a_hang_shows_the_end_of_the_transcript(hung: Evidence, snapshot: Any) -> None:
    case = hung.case("LC-03", "lora-early-release")
    assert failure_text(case, hung.record, hung.folder) == snapshot


def test_no_line_is_longer_than_a_terminal_of_120_columns(broken: Evidence) -> None:
    for case in broken.cases:
        if case.outcome == "fail":
            text = failure_text(case, broken.record, broken.folder)
            assert [line for line in text.splitlines() if len(line) > 120] == []

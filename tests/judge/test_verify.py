"""A certificate is borne out by its evidence, or each difference is a line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from colocert.judge import Evidence, Selection, judge, narrowed_by
from colocert.record.manifest import EvidenceError, read_record, write_record
from colocert.report.certificate import certificate, digests
from colocert.verify import CertificateError, explored_again, read_certificate, verify


def certified(folder: Path, **selected: Any) -> dict[str, Any]:
    """The certificate of a run over all of it, as it reads from a file."""
    evidence = Evidence(folder)
    options = evidence.record.options
    selection = Selection(options.profiles, narrowed=narrowed_by(options), **selected)
    made = certificate(judge(evidence, selection), digests(folder, evidence.record))
    return dict(json.loads(json.dumps(made)))


@pytest.fixture
def stated(recorded: Path) -> dict[str, Any]:
    return certified(recorded)


def rule(stated: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in stated["rules"] if row["id"] == name)


def trace_of(folder: Path, scenario: str) -> Path:
    return folder / "traces" / "lifecycle" / f"{scenario}.jsonl"


def test_evidence_bears_its_certificate_out_wherever_it_lies(stated: dict[str, Any], evidence: Path) -> None:
    assert verify(stated, evidence) == []


def test_what_a_person_left_out_is_taken_as_given(evidence: Path) -> None:
    assert verify(certified(evidence, left_out=("LC-01[lora-cycle]",)), evidence) == []


Change = Callable[[dict[str, Any]], Any]

FORGED: dict[str, tuple[Change, str]] = {
    "verdict": (lambda c: c.update(verdict="conformant"), "verdict: must be not-conformant, as the evidence gives it"),
    "profile": (
        lambda c: c["profiles"]["lifecycle"].update(verdict="conformant"),
        "profiles.lifecycle.verdict: must be not-conformant",
    ),
    "outcome": (
        lambda c: rule(c, "LC-03").update(outcome="pass"),
        "rules.LC-03.outcome: must be fail, as the evidence gives it (got pass in the certificate)",
    ),
    "code": (lambda c: rule(c, "LC-03").update(code="never-released"), "rules.LC-03.code: must be released-again"),
    "exercised": (lambda c: rule(c, "LC-01").update(exercised=10**6), "rules.LC-01.exercised: must be "),
    "no-rule": (lambda c: c["rules"].pop(0), "rules.LC-01: must be {"),
    "rule-twice": (lambda c: c["rules"].append(c["rules"][0]), "rules: must be {"),
    "claims": (lambda c: c["claims"].update(multi_lora=False), "claims.multi_lora: must be true"),
    "name": (lambda c: c["implementation"].update(name="yours"), "implementation.name: must be colocert-reference"),
    "controls": (
        lambda c: c["controls"].append({"name": "inert", "rule": "", "code": "", "outcome": "red", "detail": ""}),
        "controls: must be []",
    ),
    "narrowed": (lambda c: c["selection"].update(narrowed=[]), 'selection.narrowed: must be ["--depth=2"'),
    "reasons": (lambda c: c["selection"].update(reasons=["none"]), "selection.reasons: must be "),
    "left-out": (
        lambda c: c["selection"].update(left_out=["LC-01[nowhere]"]),
        "selection.left_out: LC-01[nowhere] must be a case of the evidence",
    ),
    "sequences": (
        lambda c: c["profiles"]["lifecycle"]["explorations"][0].update(sequences=5**9),
        "profiles.lifecycle.explorations.explore-lora.sequences: must be ",
    ),
    "scenario": (
        lambda c: c["profiles"]["lifecycle"]["scenarios"].update({"lora-cycle": "died"}),
        "profiles.lifecycle.scenarios.lora-cycle: must be complete",
    ),
    "unknown-key": (lambda c: c.update(seal="gold"), "seal: must be absent, as the evidence gives it (got gold"),
    "no-digests": (lambda c: c["run"].pop("traces"), "run.traces and run.record: must hold the digests"),
    "catalogue": (
        lambda c: c["environment"].update(catalogue="sha256:" + "0" * 64),
        "environment.catalogue: must be that of this installation",
    ),
    "suite": (
        lambda c: c["environment"].update(suite="sha256:" + "0" * 64),
        "environment.suite: must be that of this installation",
    ),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_changed_certificate_is_named_where_it_was_changed(
    stated: dict[str, Any], recorded: Path, forged: str
) -> None:
    change, told = FORGED[forged]
    change(stated)
    differences = verify(stated, recorded)
    assert any(line.startswith(told) for line in differences), differences
    assert all("\n" not in line for line in differences)


@pytest.mark.parametrize("forged", ["verdict", "outcome", "claims", "sequences", "unknown-key", "catalogue", "suite"])
def test_one_changed_fact_is_one_line(stated: dict[str, Any], recorded: Path, forged: str) -> None:
    FORGED[forged][0](stated)
    assert len(verify(stated, recorded)) == 1


def test_a_certificate_of_another_python_and_platform_agrees(stated: dict[str, Any], recorded: Path) -> None:
    stated["environment"].update(python="3.99", platform="Plan9", colocert="0.0.9")
    stated["run"].update(host="elsewhere", folder="/nowhere", workers=64)
    assert verify(stated, recorded) == []


def test_a_missing_trace_is_one_line(stated: dict[str, Any], evidence: Path) -> None:
    trace_of(evidence, "lora-cycle").unlink()
    assert verify(stated, evidence) == [
        "traces/lifecycle/lora-cycle.jsonl: must be in the evidence folder (got no such file)"
    ]


def test_an_edited_event_is_found_by_its_file_and_by_what_it_changes(stated: dict[str, Any], evidence: Path) -> None:
    """The second release becomes one of another tag: the rule passes there now."""
    path = trace_of(evidence, "lora-early-release")
    lines = path.read_text().splitlines(keepends=True)
    calls = [i for i, line in enumerate(lines) if '"saver.call"' in line and '"grad_buffer"' in line]
    path.write_text("".join(line for i, line in enumerate(lines) if i != calls[1]))
    differences = verify(stated, evidence)
    assert differences[0].startswith("traces/lifecycle/lora-early-release.jsonl: must be as it was certified, sha256:")


def test_an_event_edited_without_any_effect_is_found_too(stated: dict[str, Any], evidence: Path) -> None:
    path = trace_of(evidence, "full-cycle")
    path.write_text(path.read_text().replace(',"seq":', ', "seq":', 1))
    (difference,) = verify(stated, evidence)
    assert difference.startswith("traces/lifecycle/full-cycle.jsonl: must be as it was certified")


def test_a_damaged_trace_is_one_line(stated: dict[str, Any], evidence: Path) -> None:
    path = trace_of(evidence, "lora-cycle")
    path.write_bytes(path.read_bytes()[:-20])
    (difference,) = verify(stated, evidence)
    assert difference.startswith("traces/lifecycle/lora-cycle.jsonl: must be as it was certified")


def test_a_scenario_taken_out_of_the_index_is_missed(stated: dict[str, Any], evidence: Path) -> None:
    record = read_record(evidence)
    kept = tuple(s for s in record.scenarios if s.id != "lora-cycle")
    write_record(evidence, msgspec.structs.replace(record, scenarios=kept))
    differences = verify(stated, evidence)
    assert any(line.startswith("record.json: must be as it was certified") for line in differences)
    assert "traces/lifecycle/lora-cycle.jsonl: must be in the index of the evidence (got none)" in differences
    assert any(line.startswith("profiles.lifecycle.scenarios.lora-cycle: must be absent") for line in differences)


def test_a_scenario_that_the_certificate_does_not_know_is_named(stated: dict[str, Any], recorded: Path) -> None:
    del stated["run"]["traces"]["traces/lifecycle/lora-cycle.jsonl"]
    assert verify(stated, recorded) == ["traces/lifecycle/lora-cycle.jsonl: must be in the certificate (got no digest)"]


def test_an_edited_transcript_is_named(stated: dict[str, Any], evidence: Path) -> None:
    path = evidence / "transcripts" / "lifecycle" / "lora-cycle.txt"
    path.write_text(path.read_text().replace("pause", "resume", 1))
    assert verify(stated, evidence) == [
        "transcripts/lifecycle/lora-cycle.txt: must say what its trace says (got another text)"
    ]
    shutil.rmtree(evidence / "transcripts")
    assert verify(stated, evidence) == []


def test_a_damaged_index_is_one_line(stated: dict[str, Any], evidence: Path) -> None:
    (evidence / "record.json").write_text("{")
    (difference,) = verify(stated, evidence)
    assert "record.json must be an index of schema" in difference


def test_a_folder_that_holds_no_evidence_is_an_error(stated: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match=r"no record\.json in it"):
        verify(stated, tmp_path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "JSON"),
        ("[]", "got list"),
        ("{}", "got None"),
        ('{"schema": "colocert-certificate/9"}', "got colocert-certificate/9"),
        ('{"schema": "colocert-certificate/1"}', "missing required field"),
    ],
)
def test_a_file_that_is_no_certificate_is_one_line(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(CertificateError, match=r"c\.json must be a certificate") as wrong:
        read_certificate(path)
    assert told in str(wrong.value)
    assert "\n" not in str(wrong.value)


def test_a_selection_of_another_shape_is_no_certificate(stated: dict[str, Any], tmp_path: Path) -> None:
    stated["selection"]["left_out"] = 3
    (tmp_path / "c.json").write_text(json.dumps(stated))
    with pytest.raises(CertificateError, match=r"selection\.left_out"):
        read_certificate(tmp_path / "c.json")


# ---- exploration


def test_a_second_exploration_with_the_same_counts_agrees(recorded: Path) -> None:
    record = read_record(recorded)
    again = msgspec.structs.replace(
        record, explorations=tuple(msgspec.structs.replace(e, seconds=99.0) for e in record.explorations)
    )
    assert explored_again(record, again) == []


def test_another_count_and_another_finding_are_a_line_each(recorded: Path) -> None:
    record = read_record(recorded)
    first, *rest = record.explorations
    assert first.findings
    other = msgspec.structs.replace(first, sequences=first.sequences + 1, findings=first.findings[1:])
    differences = explored_again(record, msgspec.structs.replace(record, explorations=(other, *rest)))
    assert len(differences) == 2
    assert differences[0].startswith(
        f"explore-lora.sequences: must be {other.sequences}, as the second exploration gives it (got {first.sequences}"
    )
    lost = first.findings[0]
    assert differences[1].startswith(f"explore-lora.findings.{lost.rule} {lost.code}: must be absent")


def test_an_exploration_that_does_not_run_any_more_is_named(recorded: Path) -> None:
    record = read_record(recorded)
    fewer = msgspec.structs.replace(record, explorations=record.explorations[1:])
    assert explored_again(record, fewer) == ["explore-lora must be explored again (got nothing: the claims are others)"]
    assert explored_again(fewer, record) == ["explore-lora must be in the evidence (got nothing)"]

"""A difference is one of behaviour: two recordings of the same are equal, one changed event is one changed line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from colocert.judge import Evidence, judge
from colocert.record.manifest import EvidenceError, Options, Problem, Record, write_record
from colocert.report.certificate import certificate, write_certificate
from colocert.report.diff import DIFFERS, EQUAL, ONLY_A, ONLY_B, compare, page, side
from colocert_fixtures.mutants.lifecycle import releases_twice
from colocert_reference.colocert_impl import Reference

Into = Callable[..., Evidence]


@pytest.fixture
def two(record_into: Into, tmp_path: Path) -> tuple[str, str]:
    """The reference, and a mutant that has one scenario more and lacks one."""
    a = record_into(tmp_path / "a", Reference(), "reference", "lora-cycle", "full-cycle", "gpu-lora-one")
    b = record_into(tmp_path / "b", releases_twice.implementation, "mutant", "lora-cycle", "full-cycle", "multi-lora")
    return str(a.folder), str(b.folder)


def test_two_recordings_of_the_same_are_equal(record_into: Into, tmp_path: Path) -> None:
    names = ("lora-cycle", "gpu-lora-acks-1", "cpu-full-one")
    for name in "ab":
        record_into(tmp_path / name, Reference(), "reference", *names)
    found = compare(side(str(tmp_path / "a")), side(str(tmp_path / "b")))
    assert found.equal
    assert [c.status for c in found.changes] == [EQUAL] * 3


def test_scenarios_are_compared_one_by_one(two: tuple[str, str]) -> None:
    found = compare(*map(side, two))
    assert not found.equal
    assert {c.scenario: c.status for c in found.changes} == {
        "lora-cycle": DIFFERS,
        "full-cycle": EQUAL,
        "gpu-lora-one": ONLY_A,
        "multi-lora": ONLY_B,
    }
    change = found.changes[0]
    assert (change.minus, change.plus) == (0, 8)
    added = [line for line in change.lines if line.startswith("+")]
    assert [line.split()[1] for line in added] == ["pause", "out", "out", "out", "resume", "in", "in", "in"]


def test_profiles_can_be_chosen(two: tuple[str, str]) -> None:
    found = compare(*map(side, two), ("lifecycle",))
    assert {c.profile for c in found.changes} == {"lifecycle"}


def test_one_changed_event_is_one_changed_line(record_into: Into, tmp_path: Path) -> None:
    for name in "ab":
        record_into(tmp_path / name, Reference(), "reference", "lora-cycle")
    trace = tmp_path / "b" / "traces" / "lifecycle" / "lora-cycle.jsonl"
    trace.write_text(trace.read_text().replace('"nbytes":8388608', '"nbytes":8388609', 1))
    (change,) = compare(side(str(tmp_path / "a")), side(str(tmp_path / "b"))).changes
    assert (change.minus, change.plus) == (1, 1)


def test_how_a_scenario_ended_is_part_of_it(record_into: Into, tmp_path: Path) -> None:
    for name in "ab":
        evidence = record_into(tmp_path / name, Reference(), "reference", "lora-cycle")
    lost = msgspec.structs.replace(evidence.record.scenarios[0], status="hang")
    write_record(tmp_path / "b", msgspec.structs.replace(evidence.record, scenarios=(lost,)))
    (change,) = compare(side(str(tmp_path / "a")), side(str(tmp_path / "b"))).changes
    assert change.lines[-1] == "+(hang)"


def test_claims_that_differ_are_told_and_no_difference_by_themselves(record_into: Into, tmp_path: Path) -> None:
    for name in "ab":
        evidence = record_into(tmp_path / name, Reference(), "reference", "lora-cycle")
    claims = {**evidence.record.claims, "rematerialize": False, "peak_device": []}
    write_record(tmp_path / "b", msgspec.structs.replace(evidence.record, claims=claims))
    found = compare(side(str(tmp_path / "a")), side(str(tmp_path / "b")))
    assert found.claims == (("peak_device", "cpu, gpu", "none"), ("rematerialize", "yes", "no"))
    assert found.equal


def test_a_certificate_stands_for_the_evidence_it_names(two: tuple[str, str], tmp_path: Path) -> None:
    evidence = Evidence(Path(two[1]))
    path = tmp_path / "c.json"
    write_certificate(path, certificate(judge(evidence), {"evidence": two[1]}))
    assert side(str(path)).folder == Path(two[1])
    write_certificate(path, certificate(judge(evidence), {"evidence": "/moved/away/b"}))
    assert side(str(path)).folder == tmp_path / "b"  # beside the certificate, as both were copied together


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "must be an evidence folder or a certificate (got No such file"),
        ("{", "certificate that names one (got no `run.evidence` in it)"),
        ("[]", "certificate that names one (got no `run.evidence` in it)"),
        ("{}", "certificate that names one (got no `run.evidence` in it)"),
        ('{"run": {"evidence": "/nowhere/e"}, "implementation": {"name": "x"}}', "which must be there (got none)"),
    ],
)
def test_what_is_neither_is_one_line(tmp_path: Path, text: str | None, told: str) -> None:
    path = tmp_path / "c.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(EvidenceError) as error:
        side(str(path))
    assert told in str(error.value)


def test_a_certificate_of_another_implementation_is_refused(two: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"run": {"evidence": two[0]}, "implementation": {"name": "mypkg"}}))
    with pytest.raises(EvidenceError, match=r"must hold the evidence of mypkg.*got that of colocert-reference"):
        side(str(path))


def test_a_recording_that_failed_is_refused(tmp_path: Path) -> None:
    write_record(tmp_path, Record(impl="x", options=Options(), problem=Problem("import", "x must import", 11)))
    with pytest.raises(EvidenceError, match="x was not recorded: x must import"):
        side(str(tmp_path))


def test_the_page_has_every_difference_and_names_what_is_equal(two: tuple[str, str]) -> None:
    text = page(compare(*map(side, two)))
    assert "<script" not in text
    assert text.count('<div class="plus">+ ') == 8
    for words in ("different", "gpu-lora-one: only in A", "multi-lora: only in B", "1 equal scenario"):
        assert words in text
    assert re.findall(r'<(?:link|img|script)[^>]+(?:href|src)="(?!data:,)', text) == []


def test_a_page_of_two_equal_recordings_says_so(two: tuple[str, str]) -> None:
    text = page(compare(side(two[0]), side(two[0])))
    assert "Every scenario has the same transcript on both sides." in text
    assert "</span> equal</p>" in text

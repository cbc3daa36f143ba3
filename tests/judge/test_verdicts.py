"""Outcomes and verdicts follow from the evidence, in the precedence that the design gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from colocert.judge import Evidence, Selection, judge, narrowed_by
from colocert.record.manifest import (
    ControlRecord,
    EvidenceError,
    Options,
    Problem,
    Record,
    ScenarioRecord,
    read_record,
    write_record,
)
from colocert.record.runner import record
from colocert.rules.catalogue import PROFILES, catalogue
from colocert.trace import TraceError
from colocert_reference.colocert_impl import CLAIMS


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference") / "evidence"
    record("colocert_reference", folder, Options(profiles=("lifecycle",), depth=2, fault_depth=2, controls=False))
    return folder


def edited(folder: Path, into: Path, **changes: Any) -> Evidence:
    into.mkdir(exist_ok=True)
    if not (into / "traces").exists():
        (into / "traces").symlink_to(folder / "traces")
    write_record(into, msgspec.structs.replace(read_record(folder), **changes))
    return Evidence(into)


def outcome(judged: Any, rule: str) -> Any:
    return next(o for o in judged.rules if o.id == rule)


def test_the_reference_is_conformant_and_every_rule_is_accounted_for(reference: Path) -> None:
    judged = judge(Evidence(reference))
    assert (judged.verdict, judged.exit_code) == ("conformant", 0)
    assert [o.id for o in judged.rules] == list(catalogue())
    lifecycle = [o for o in judged.rules if o.profile == "lifecycle"]
    assert all(o.outcome == "pass" and o.exercised for o in lifecycle)
    assert {o.outcome for o in judged.rules if o.profile != "lifecycle"} <= {"not-run", "not-claimed", "not-applicable"}


@pytest.mark.parametrize(
    ("profile", "double"), [("lifecycle", "rig.saver"), ("adapter-sync", "rig.workers or rig.engine")]
)
def test_a_double_that_nothing_reached_is_named(profile: str, double: str, tmp_path: Path) -> None:
    """What an adapter that forgets a patch is told, beside rules that were not exercised."""
    options = Options(profiles=(profile,), depth=1, faults="none", controls=False)
    record("colocert_fixtures.adversaries.inert", tmp_path / "evidence", options)
    told = [reason for reason in judge(Evidence(tmp_path / "evidence")).reasons if double in reason]
    assert [reason.partition(":")[0] for reason in told] == [f"no {profile} scenario reached {double}"]


def test_doubles_that_were_reached_are_not_spoken_of(reference: Path) -> None:
    assert not [reason for reason in judge(Evidence(reference)).reasons if "reached" in reason]


def test_without_a_named_profile_missing_factories_make_it_partial(reference: Path, tmp_path: Path) -> None:
    judged = judge(edited(reference, tmp_path / "e", options=Options(), claimed=("lifecycle",)))
    assert (judged.verdict, judged.exit_code) == ("partial", 0)
    assert "engine" in judged.reasons[0]


def test_a_named_profile_without_a_factory_is_incomplete(reference: Path, tmp_path: Path) -> None:
    options = Options(profiles=("lifecycle", "live"))
    judged = judge(edited(reference, tmp_path / "e", options=options, claimed=("lifecycle",)))
    assert (judged.verdict, judged.exit_code) == ("incomplete", 10)
    assert judged.profiles == {"lifecycle": "conformant", "live": "incomplete"}


def test_no_factory_at_all_is_incomplete(tmp_path: Path) -> None:
    write_record(tmp_path, Record(impl="x", options=Options(), claims=CLAIMS.facts()))
    judged = judge(Evidence(tmp_path))
    assert judged.verdict == "incomplete"
    assert {o.outcome for o in judged.rules} == {"not-claimed"}


def test_a_claim_that_is_not_made_is_not_applicable(reference: Path, tmp_path: Path) -> None:
    claims = {**CLAIMS.facts(), "multi_lora": False}
    judged = judge(edited(reference, tmp_path / "e", claims=claims))
    assert outcome(judged, "LC-22").outcome == "not-applicable"
    assert judged.verdict == "conformant"


def test_a_code_that_a_claim_does_not_bind_is_not_judged(reference: Path, tmp_path: Path) -> None:
    rule = catalogue()["LC-08"]
    assert rule.bound({**CLAIMS.facts(), "early_grad_release": False}) == ("computed-on-released",)


@pytest.mark.parametrize(
    ("selection", "why"),
    [
        pytest.param(Selection(profiles=("lifecycle",), narrowed=("-k",)), "-k", id="narrowed"),
        pytest.param(Selection(profiles=("lifecycle",), left_out=("LC-01[lora-cycle]",)), "1 cases", id="left-out"),
    ],
)
def test_a_run_of_less_than_everything_is_incomplete(reference: Path, selection: Selection, why: str) -> None:
    judged = judge(Evidence(reference), selection)
    assert (judged.verdict, judged.exit_code) == ("incomplete", 10)
    assert why in " ".join(judged.reasons)


def test_a_rule_whose_every_case_was_left_out_is_not_run(reference: Path) -> None:
    evidence = Evidence(reference)
    left_out = tuple(f"{c.rule}[{c.scenario}]" for c in evidence.cases if c.rule == "LC-10")
    judged = judge(evidence, Selection(profiles=("lifecycle",), left_out=left_out))
    assert outcome(judged, "LC-10").outcome == "not-run"


def test_a_bound_rule_without_an_occurrence_is_not_exercised(reference: Path, tmp_path: Path) -> None:
    kept = tuple(s for s in read_record(reference).scenarios if not s.id.endswith("offload-off"))
    judged = judge(edited(reference, tmp_path / "e", scenarios=kept, explorations=()))
    assert outcome(judged, "LC-10").outcome == "fail"
    assert outcome(judged, "LC-10").code == "untestable"
    kept = tuple(s for s in kept if s.id == "lora-plain-cycle")
    judged = judge(edited(reference, tmp_path / "e", scenarios=kept, explorations=()))
    assert outcome(judged, "LC-13").outcome == "not-exercised"


def test_a_failing_should_is_shown_and_binds_only_when_asked(reference: Path, tmp_path: Path) -> None:
    path = tmp_path / "should"
    evidence = edited(reference, path)
    broken = [c for c in evidence.cases if c.rule != "LC-21"]
    case = msgspec.structs.replace(
        next(c for c in evidence.cases if c.rule == "LC-21"), outcome="fail", code="no-raise"
    )
    evidence.__dict__["cases"] = (*broken, case)
    lenient = judge(evidence)
    assert (outcome(lenient, "LC-21").outcome, lenient.verdict) == ("fail", "conformant")
    strict = judge(evidence, Selection(profiles=("lifecycle",), level="should"))
    assert strict.verdict == "not-conformant"


def test_a_failure_outweighs_an_incomplete_run(reference: Path, tmp_path: Path) -> None:
    scenarios = tuple(
        msgspec.structs.replace(s, status="died", detail="exit code 1") if s.id == "lora-cycle" else s
        for s in read_record(reference).scenarios
    )
    evidence = edited(reference, tmp_path / "e", scenarios=scenarios)
    judged = judge(evidence, Selection(profiles=("lifecycle",), narrowed=("-x",)))
    assert (judged.verdict, judged.exit_code) == ("not-conformant", 1)
    assert outcome(judged, "LC-01").code == "died"


def test_a_green_control_is_a_harness_error(reference: Path, tmp_path: Path) -> None:
    controls = (ControlRecord("inert", "", "", "green", "passes LC-04"),)
    judged = judge(edited(reference, tmp_path / "e", controls=controls))
    assert (judged.verdict, judged.exit_code) == ("harness-error", 11)
    assert "LC-04" in judged.reasons[0]


def test_a_control_that_could_not_run_is_none(reference: Path, tmp_path: Path) -> None:
    controls = (ControlRecord("mutant", "LC-01", "", "not-run", "there is none"),)
    assert judge(edited(reference, tmp_path / "e", controls=controls)).verdict == "conformant"


@pytest.mark.parametrize(("exit_code", "verdict"), [(4, "usage-error"), (11, "harness-error")])
def test_a_problem_of_the_run_is_its_verdict(tmp_path: Path, exit_code: int, verdict: str) -> None:
    write_record(tmp_path, Record(impl="x", options=Options(), problem=Problem("import", "no", exit_code)))
    judged = judge(Evidence(tmp_path))
    assert (judged.verdict, judged.exit_code, judged.reasons) == (verdict, exit_code, ("no",))


def test_a_missing_or_damaged_trace_is_an_error_by_name(reference: Path, tmp_path: Path) -> None:
    ghost = ScenarioRecord("lora-cycle", "lifecycle", "complete", "traces/lifecycle/ghost.jsonl")
    with pytest.raises(TraceError, match=r"ghost\.jsonl"):
        _ = edited(reference, tmp_path / "e", scenarios=(ghost,)).cases


@pytest.mark.parametrize("text", ["", "{", '{"schema": 1}', '{"impl": "x", "options": {}, "schema": 9}'])
def test_a_damaged_index_is_an_error_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(EvidenceError, match=r"record\.json"):
        read_record(tmp_path)


def test_a_missing_index_is_an_error_by_name(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match=r"record\.json"):
        read_record(tmp_path)


def test_the_profiles_are_those_of_the_contract() -> None:
    from colocert.rig.contract import FACTORIES

    assert tuple(FACTORIES) == PROFILES


@pytest.mark.parametrize(
    ("asked", "narrowed"),
    [
        ({}, ()),
        ({"depth": 5}, ("--depth=5",)),
        ({"faults": "none"}, ("--faults=none",)),
        ({"asked_fault_depth": 2, "fault_depth": 2}, ("--fault-depth=2",)),
        ({"asked_fault_depth": 7, "fault_depth": 7}, ()),
        ({"fault_depth": 3}, ()),
        ({"depth": 2, "faults": "none", "asked_fault_depth": 2}, ("--depth=2", "--faults=none")),
    ],
    ids=str,
)
def test_what_a_recording_was_asked_to_leave_out_is_known_from_it(
    asked: dict[str, Any], narrowed: tuple[str, ...]
) -> None:
    """A fault depth that a costly implementation lowers by itself narrows nothing."""
    assert narrowed_by(Options(**asked)) == narrowed

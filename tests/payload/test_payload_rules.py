"""The sync-payload rules find out a mutant a code, are silent about correct syncs of other shapes, and judge files."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from colocert.judge_trace import judge_events
from colocert.record import controls
from colocert.record.registry import BY_ID
from colocert.rig.contract import Claims
from colocert.rules.catalogue import FOLDS, RUNNER_CODES, Rule
from colocert.trace import read_trace
from colocert_fixtures import matrix, traces
from colocert_fixtures.adversaries import inert
from colocert_fixtures.judging import Kill, bound, judged, rules, run, scenarios
from colocert_fixtures.traces import make
from colocert_reference.colocert_impl import implementation as reference

pytestmark = pytest.mark.torch

PROFILE = "sync-payload"
RULES = {rule.id: rule for rule in rules(PROFILE)}
CODES: list[Kill] = [(rule.id, code.name) for rule in RULES.values() for code in rule.codes]
MODULES = matrix.modules(PROFILE)
TRACES = Path(traces.__file__).parent
VARIANTS = (
    "payload_delivers_what_trains_beside",
    "payload_hands_over",
    "payload_keeps_two_versions",
    "payload_merged_only",
    "payload_own_record",
    "payload_resident_adapters",
    "payload_sends_files",
)

each_code = pytest.mark.parametrize(("rule", "code"), CODES, ids=lambda part: part)
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.id)


def variant(name: str) -> Any:
    return (
        reference
        if name == "reference"
        else importlib.import_module(f"colocert_fixtures.variants.{name}").implementation
    )


# ---- correct ones


@pytest.mark.parametrize("name", ["reference", *VARIANTS])
def test_a_correct_sync_is_not_found_fault_with_and_exercises_every_rule(name: str) -> None:
    """Over every scenario that its claims ask for."""
    implementation = variant(name)
    outcome = judged(implementation, profile=PROFILE)
    binding = bound(Claims.of(implementation.claims), PROFILE)
    assert outcome.found == {}
    assert {rule for rule, _ in binding} == {rule for rule, code in outcome.exercised if (rule, code) in binding}


def test_the_reference_exercises_every_code() -> None:
    outcome = judged(reference, profile=PROFILE)
    assert set(outcome.exercised) == set(CODES)


def test_no_rule_passes_on_a_sync_that_does_nothing() -> None:
    outcome = judged(inert.implementation, profile=PROFILE)
    assert {rule for rule, _ in outcome.exercised} == set(outcome.rules()) == {"SP-01", "SP-02", "SP-03", "SP-04"}


def test_the_controls_of_the_profile_are_red() -> None:
    """The inert one, and a mutant for each rule."""
    found = controls.run(list(RULES))
    assert {control.outcome for control in found} == {controls.RED}
    assert len(found) == len(RULES) + 1


def test_every_code_has_a_mutant_and_every_mutant_a_code() -> None:
    assert {module.KILLED_BY for module in MODULES} == set(CODES)


# ---- catalogue, folds, traces


@each_rule
def test_a_rule_names_scenarios_that_exercise_it_and_says_what_breaks(rule: Rule) -> None:
    for name in rule.scenarios:
        assert judge_events(run(reference, BY_ID[name]), [rule]).exercised[rule.id], name
    assert all((rule.scenarios, rule.seen, rule.sentence, rule.breaks, rule.fix))


@each_code
def test_a_scenario_that_the_rule_names_exercises_the_code(rule: str, code: str) -> None:
    """On the reference."""
    named = [s for s in scenarios(Claims.of(reference.claims), PROFILE) if s.id in RULES[rule].scenarios]
    assert any(judge_events(run(reference, s), [RULES[rule]]).exercised[rule].get(code) for s in named)


@each_code
def test_the_valid_trace_exercises_the_code_and_the_invalid_one_shows_it(rule: str, code: str) -> None:
    """Both are judged from the files."""
    valid, invalid = (
        judge_events(read_trace(TRACES / rule / f"{kind}-{code}.jsonl"), [RULES[rule]]) for kind in ("valid", "invalid")
    )
    assert (valid.findings, valid.exercised[rule].get(code, 0) > 0) == ((), True)
    assert code in {finding.code for finding in invalid.findings}


@pytest.mark.slow
def test_the_trace_files_are_what_their_generator_writes(tmp_path: Path) -> None:
    """`python -m colocert_fixtures.traces.make sync-payload` writes them."""
    written = {path.relative_to(tmp_path): path.read_bytes() for path in make.write(tmp_path, [PROFILE])}
    kept = {path.relative_to(TRACES): path.read_bytes() for path in TRACES.glob("SP-*/*.jsonl")}
    assert kept == written


def test_codes_are_unique_and_a_fold_uses_those_of_its_rule_and_no_other() -> None:
    known = {code for _, code in CODES}
    assert len(CODES) == len(set(CODES))
    assert known & set(RUNNER_CODES) == set()
    for rule in RULES.values():
        tree = ast.parse(inspect.getsource(FOLDS[rule.id]))
        used = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value in known}
        assert used == {code.name for code in rule.codes}, rule.id

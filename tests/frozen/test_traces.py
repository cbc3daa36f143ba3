"""The frozen-offload rules on recorded traces: each code is exercised by a valid one and found in an invalid one."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from colocert.judge_trace import judge_events
from colocert.record.registry import BY_ID
from colocert.rules import frozen_offload, frozen_state
from colocert.rules.catalogue import FOLDS, Rule, catalogue
from colocert.trace import read_trace
from colocert_fixtures import frozen_traces, matrix

PROFILE = "frozen-offload"
RULES = [rule for rule in catalogue().values() if rule.profile == PROFILE]
CODES = [(rule, code.name) for rule in RULES for code in rule.codes]
TRACES = Path(frozen_traces.__file__).parent

each_code = pytest.mark.parametrize(("rule", "code"), CODES, ids=lambda part: getattr(part, "id", part))
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)


@each_code
def test_the_valid_trace_exercises_the_code_and_the_invalid_one_shows_it(rule: Rule, code: str) -> None:
    """The valid one has no finding of any rule of the profile."""
    valid, invalid = (
        judge_events(read_trace(TRACES / rule.id / f"{kind}-{code}.jsonl"), RULES) for kind in ("valid", "invalid")
    )
    assert (valid.findings, valid.exercised[rule.id].get(code, 0) > 0) == ((), True)
    assert (rule.id, code) in {(finding.rule, finding.code) for finding in invalid.findings}


def test_there_is_no_other_trace() -> None:
    wanted = {f"{rule.id}/{kind}-{code}.jsonl" for rule, code in CODES for kind in ("valid", "invalid")}
    assert {str(path.relative_to(TRACES)) for path in TRACES.rglob("*.jsonl")} == wanted


def test_every_code_has_a_mutant_and_every_mutant_a_code() -> None:
    kills = {module.KILLED_BY for module in matrix.modules(PROFILE)}
    assert kills == {(rule.id, code) for rule, code in CODES}


@each_rule
def test_a_rule_names_scenarios_and_reports_and_says_what_breaks(rule: Rule) -> None:
    assert {BY_ID[name].profile for name in rule.scenarios} == {PROFILE}
    assert all((rule.seen, rule.sentence, rule.breaks, rule.fix))


@each_rule
def test_a_fold_uses_the_codes_of_its_rule_and_no_other(rule: Rule) -> None:
    """A misspelt code would never bind."""
    known = {code for _, code in CODES}
    tree = ast.parse(inspect.getsource(FOLDS[rule.id]))
    used = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)} & known
    assert used == {code.name for code in rule.codes}


def test_the_rules_import_no_torch_and_no_double() -> None:
    for module in (frozen_offload, frozen_state):
        tree = ast.parse(inspect.getsource(module))
        names = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert all(name.startswith(("colocert.rules", "colocert.trace", "__future__")) for name in names)

"""The catalogue, the folds, the scenarios and the fixtures account for each other, rule by rule and code by code."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from pathlib import Path

import pytest

from colocert.judge_trace import judge_events
from colocert.record.registry import ALL_SCENARIOS, BY_ID
from colocert.record.scenarios import EXPLORATIONS
from colocert.rules.catalogue import FOLDS, RUNNER_CODES, Rule, catalogue
from colocert.trace import read_trace
from colocert_fixtures import matrix, traces
from colocert_fixtures.judging import PROFILES, TRACED, Kill, rules, run
from colocert_fixtures.traces import make

RULES = {rule.id: rule for profile in TRACED for rule in rules(profile)}
CODES: list[Kill] = [(rule.id, code.name) for rule in RULES.values() for code in rule.codes]
FOLD_MODULES = {fold.__module__ for fold in FOLDS.values()}
TRACES = Path(traces.__file__).parent

each_code = pytest.mark.parametrize(("rule", "code"), CODES, ids=lambda part: part)
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.id)


def test_ids_of_rules_codes_and_scenarios_are_unique() -> None:
    """A code is unique within its rule, and none is one of the runner's."""
    ids = [scenario.id for scenario in (*ALL_SCENARIOS, *EXPLORATIONS)]
    for names in (ids, CODES):
        assert [name for name, times in Counter(names).items() if times > 1] == []
    assert {code for _, code in CODES} & set(RUNNER_CODES) == set()


@each_rule
def test_a_rule_names_scenarios_that_exist_and_at_least_one_report(rule: Rule) -> None:
    """And says what breaks and how to fix it."""
    assert set(rule.scenarios) <= set(BY_ID)
    assert all((rule.scenarios, rule.seen, rule.sentence, rule.breaks, rule.fix))


@pytest.fixture(scope="module")
def exercised() -> dict[Kill, set[str]]:
    """Rule and code to the scenarios that exercise it on the reference."""
    where: dict[Kill, set[str]] = {}
    for scenario in (s for s in ALL_SCENARIOS if s.profile in TRACED):
        result = judge_events(run(make.correct(scenario.profile), scenario), rules(scenario.profile))
        for rule, counts in result.exercised.items():
            for code in counts:
                where.setdefault((rule, code), set()).add(scenario.id)
    return where


@each_code
def test_a_scenario_that_the_rule_names_exercises_the_code_on_the_reference(
    rule: str, code: str, exercised: dict[Kill, set[str]]
) -> None:
    """A code that no listed scenario can show is not tested by it."""
    assert exercised.get((rule, code), set()) & set(RULES[rule].scenarios)


@each_rule
def test_every_scenario_that_a_rule_names_exercises_it(rule: Rule, exercised: dict[Kill, set[str]]) -> None:
    """On the reference."""
    shown = {scenario for (known, _), where in exercised.items() if known == rule.id for scenario in where}
    assert set(rule.scenarios) <= shown


def test_every_code_has_a_mutant_and_every_mutant_a_code() -> None:
    """By `KILLED_BY`."""
    assert {module.KILLED_BY for profile in TRACED for module in matrix.modules(profile)} == set(CODES)


@each_code
def test_the_valid_trace_exercises_the_code_and_the_invalid_one_shows_it(rule: str, code: str) -> None:
    """Both are judged from the files."""
    valid, invalid = (
        judge_events(read_trace(TRACES / rule / f"{kind}-{code}.jsonl"), [RULES[rule]]) for kind in ("valid", "invalid")
    )
    assert (valid.findings, valid.exercised[rule].get(code, 0) > 0) == ((), True)
    assert code in {finding.code for finding in invalid.findings}


def test_the_trace_files_are_what_their_generator_writes(tmp_path: Path) -> None:
    """`python -m colocert_fixtures.traces.make` writes them; there is no other file beside them."""
    written = {path.relative_to(tmp_path): path.read_bytes() for path in make.write(tmp_path, PROFILES)}
    kept = {path.relative_to(TRACES): path for path in TRACES.rglob("*.jsonl") if path.parent.name in RULES}
    recorded = {name for name in kept if RULES[name.parts[0]].profile not in PROFILES}
    assert {name: path.read_bytes() for name, path in kept.items() if name not in recorded} == written
    assert {name.as_posix() for name in recorded} == {
        f"{rule}/{kind}-{code}.jsonl"
        for rule, code in CODES
        for kind in ("valid", "invalid")
        if RULES[rule].profile not in PROFILES
    }


def _codes_in(fold: type) -> set[str]:
    """String constants of a fold's class, its bases within the rules included, that are codes of some rule."""
    known = {code for _, code in CODES}
    found: set[str] = set()
    for base in inspect.getmro(fold):
        if base.__module__ in FOLD_MODULES:
            tree = ast.parse(inspect.getsource(base))
            found |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value in known}
    return found


@each_rule
def test_a_fold_uses_the_codes_of_its_rule_and_no_other(rule: Rule) -> None:
    """A misspelt code would never bind. The saver's reasons for ending the process are spelt like codes of LC-05."""
    mine = {code.name for code in rule.codes}
    assert mine <= _codes_in(FOLDS[rule.id]) <= mine | {"double-release", "double-resume"}


def test_every_finding_and_count_bears_a_code_of_its_rule() -> None:
    """Over every invalid trace."""
    seen: set[Kill] = set()
    for path in (p for p in TRACES.rglob("*.jsonl") if p.parent.name in RULES):
        result = judge_events(read_trace(path), rules(RULES[path.parent.name].profile))
        seen |= {(f.rule, f.code) for f in result.findings}
        seen |= {(rule, code) for rule, counts in result.exercised.items() for code in counts}
    assert seen == set(CODES)


def test_there_is_a_fold_for_every_rule_and_a_rule_for_every_fold() -> None:
    """By id."""
    assert set(FOLDS) == set(catalogue())

"""Controls: implementations that must come out red, run beside the one under test.

Knows where the controls are and how to judge one. Does not know the implementation under test: controls run in a
child of their own, where nothing of it was imported.

An inert implementation, which does nothing, must not pass any rule; for each required rule one mutant must be found
out by that rule with the code it names. A control that is green says that the suite did not work on this machine. One
that needs a package which is not installed is not run, and says which.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pkgutil
from collections.abc import Iterable, Iterator
from typing import Any

from colocert.judge_trace import TraceJudged, judge_events
from colocert.record.drive import NotRun
from colocert.record.manifest import ControlRecord
from colocert.record.registry import ALL_SCENARIOS, BY_ID
from colocert.record.registry import run as run_scenario
from colocert.record.scenarios import Scenario
from colocert.rig.contract import FACTORIES, Claims
from colocert.rules.catalogue import Rule, catalogue
from colocert.trace.events import AnyEvent

RED, GREEN, NOT_RUN = "red", "green", "not-run"
FIXTURES = "colocert_fixtures"
INERT = f"{FIXTURES}.adversaries.inert"


def run(rule_ids: Iterable[str]) -> tuple[ControlRecord, ...]:
    """Judges the inert implementation and one mutant for each of these rules, in this process."""
    rules = [catalogue()[rule] for rule in rule_ids]
    if importlib.util.find_spec(FIXTURES) is None:
        missing = f"{FIXTURES} is not installed"
        return tuple(ControlRecord(name, rule, "", NOT_RUN, missing) for name, rule in _names(rules))
    mutants, absent = _mutants({rule.profile for rule in rules})
    return (*_inert(rules), *(_mutant(rule, mutants.get(rule.id), absent.get(rule.profile, "")) for rule in rules))


def _names(rules: list[Rule]) -> Iterator[tuple[str, str]]:
    yield "inert", ""
    for rule in rules:
        yield "mutant", rule.id


def _mutants(profiles: set[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The first mutant of each rule, by name; and by profile, the package that keeps some of them from being there."""
    found: dict[str, Any] = {}
    absent: dict[str, str] = {}
    for profile in sorted(profiles):
        name = f"{FIXTURES}.mutants.{profile.replace('-', '_')}"
        if importlib.util.find_spec(name) is None:
            continue
        for info in pkgutil.iter_modules(importlib.import_module(name).__path__, name + "."):
            try:
                module = importlib.import_module(info.name)
            except ModuleNotFoundError as error:
                absent[profile] = missing(error)
            else:
                found.setdefault(module.KILLED_BY[0], module)
    return found, absent


def missing(error: ModuleNotFoundError) -> str:
    """The package that is not installed. Raises the error again if it is one of our own."""
    package = (error.name or "").partition(".")[0]
    if not package or package.startswith("colocert"):
        raise error
    return package


def _mutant(rule: Rule, module: Any, absent: str) -> ControlRecord:
    if module is None:
        why = f"needs {absent}, which is not installed" if absent else f"there is no mutant for {rule.id}"
        return ControlRecord("mutant", rule.id, "", NOT_RUN, why)
    if not hasattr(module.implementation, FACTORIES[rule.profile]):
        why = f"has no factory {FACTORIES[rule.profile]} here: an extra is not installed"
        return ControlRecord(module.implementation.name, rule.id, module.KILLED_BY[1], NOT_RUN, why)
    name, code = module.__name__.rpartition(".")[2], module.KILLED_BY[1]
    first = [BY_ID[s] for s in rule.scenarios]
    lacking = ""
    rest = (s for s in ALL_SCENARIOS if s.profile == rule.profile and s not in first)
    for scenario in (*first, *rest):
        try:
            judged = _judged(module.implementation, scenario, [rule])
        except NotRun as error:
            lacking = str(error)
            continue
        if judged is not None and any(f.code == code for f in judged.findings):
            return ControlRecord(name, rule.id, code, RED, f"found out on {scenario.id}")
    if lacking:
        return ControlRecord(name, rule.id, code, NOT_RUN, lacking)
    return ControlRecord(name, rule.id, code, GREEN, f"{rule.id} did not find {code} on any scenario")


def _inert(rules: list[Rule]) -> Iterator[ControlRecord]:
    """The inert one over every profile that it has a factory for; a profile without one is not run, by name."""
    implementation = importlib.import_module(INERT).implementation
    without = {rule.profile for rule in rules if not hasattr(implementation, FACTORIES[rule.profile])}
    for profile in sorted(without):
        yield ControlRecord("inert", "", "", NOT_RUN, f"has no factory for {profile} here")
    rules = [rule for rule in rules if rule.profile not in without]
    if rules:
        yield _idle(implementation, rules)


def _idle(implementation: Any, rules: list[Rule]) -> ControlRecord:
    times = dict.fromkeys((rule.id for rule in rules), 0)
    failed: set[str] = set()
    profiles = {rule.profile for rule in rules}
    for scenario in (s for s in ALL_SCENARIOS if s.profile in profiles):
        judged = None
        with contextlib.suppress(NotRun):
            judged = _judged(implementation, scenario, [r for r in rules if r.profile == scenario.profile])
        if judged is not None:
            failed |= {f.rule for f in judged.findings}
            for rule, counts in judged.exercised.items():
                times[rule] += sum(counts.values())
    passed = sorted(rule for rule, n in times.items() if n and rule not in failed)
    if passed:
        return ControlRecord("inert", "", "", GREEN, f"passes {', '.join(passed)} by doing nothing")
    return ControlRecord("inert", "", "", RED, "passes no rule")


def _judged(implementation: Any, scenario: Scenario, rules: list[Rule]) -> TraceJudged | None:
    claims = Claims.of(implementation.claims)
    if not scenario.wanted(claims):
        return None
    events: list[AnyEvent] = []
    run_scenario(implementation, claims, scenario, events.append)
    return judge_events(events, rules)

"""A correct trainer that is built differently is not found fault with, and every rule it is bound by is exercised."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest

from colocert.rig.contract import FACTORIES, Claims
from colocert.trace.events import CallRaise, Change, Fault, SaverFatal, SaverTouch
from colocert_fixtures import variants
from colocert_fixtures.judging import PROFILES, Outcome, bound, judged, run, scenarios
from colocert_reference.colocert_impl import implementation as reference

MODULES = {
    m.name: importlib.import_module(f"{variants.__name__}.{m.name}") for m in pkgutil.iter_modules(variants.__path__)
}
DEPTH, FAULT_DEPTH = 4, 3
REFUSED = ("no-train-offload", "no-rollout-offload", "critic")


def _implementation(name: str) -> Any:
    return reference if name == "reference" else MODULES[name].implementation


def _claiming(profile: str) -> list[str]:
    """The variants that have the profile's factory."""
    return [name for name in ("reference", *MODULES) if hasattr(_implementation(name), FACTORIES[profile])]


def _idle(outcome: Outcome, implementation: Any, profile: str) -> set[str]:
    binding = bound(Claims.of(implementation.claims), profile)
    return {rule for rule, _ in binding} - {rule for rule, code in outcome.exercised if (rule, code) in binding}


@pytest.mark.parametrize(("profile", "name"), [(profile, name) for profile in PROFILES for name in _claiming(profile)])
def test_no_scenario_finds_fault_and_every_bound_rule_is_exercised(profile: str, name: str) -> None:
    """Over every scenario that the variant's claims ask for."""
    implementation = _implementation(name)
    outcome = judged(implementation, profile=profile)
    assert outcome.found == {}
    assert _idle(outcome, implementation, profile) == set()


@pytest.mark.parametrize("name", _claiming("handoff"))
def test_a_driver_raises_nothing_where_nothing_went_wrong(name: str) -> None:
    """No rule asks for it: a driver that always raises is not found by an order that it never gets to."""
    implementation = _implementation(name)
    raised = set()
    for scenario in scenarios(Claims.of(implementation.claims), "handoff"):
        events = run(implementation, scenario)
        wrong = any(isinstance(e, (Fault, Change)) for e in events) or scenario.id.endswith(REFUSED)
        if not wrong and any(isinstance(e, (CallRaise, SaverFatal, SaverTouch)) for e in events):
            raised.add(scenario.id)
    assert raised == set()


@pytest.mark.parametrize("name", _claiming("adapter-sync"))
def test_a_weight_sync_raises_nothing_where_nothing_went_wrong(name: str) -> None:
    """No rule asks for it: a sync that always raises would never be found sending."""
    implementation = _implementation(name)
    raised = set()
    for scenario in scenarios(Claims.of(implementation.claims), "adapter-sync"):
        events = run(implementation, scenario)
        wrong = any(isinstance(e, Fault) for e in events)
        if not wrong and any(isinstance(e, (CallRaise, SaverTouch)) for e in events):
            raised.add(scenario.id)
    assert raised == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", _claiming("lifecycle"))
def test_no_sequence_of_calls_finds_fault(name: str) -> None:
    """With every single fault."""
    assert judged(_implementation(name), DEPTH, FAULT_DEPTH).explored == {}


def test_there_are_at_least_eight_and_some_owe_nothing_to_the_reference() -> None:
    """Those written from scratch take no class from it. For drivers and weight syncs, at least six."""
    profiles = ("lifecycle", "handoff", "adapter-sync")
    trainers, drivers, syncs = (set(_claiming(profile)) & set(MODULES) for profile in profiles)
    assert len(trainers) >= 8
    assert len([name for name in trainers if not hasattr(MODULES[name], "ReferenceTrainer")]) >= 3
    assert len(drivers) >= 6
    assert len([name for name in drivers if not hasattr(MODULES[name], "reference_driver")]) >= 3
    assert len(syncs) >= 6
    assert len([name for name in syncs if not hasattr(MODULES[name], "Dispatch")]) >= 2

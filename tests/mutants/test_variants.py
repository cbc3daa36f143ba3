"""A correct trainer that is built differently is not found fault with, and every rule it is bound by is exercised."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest

from colocert.rig.contract import FACTORIES, Claims
from colocert_fixtures import variants
from colocert_fixtures.judging import PROFILES, Outcome, bound, judged
from colocert_reference.colocert_impl import implementation as reference

NAMES = [m.name for m in pkgutil.iter_modules(variants.__path__)]
MODULES = {name: importlib.import_module(f"{variants.__name__}.{name}") for name in NAMES}
DEPTH, FAULT_DEPTH = 4, 3


def _implementation(name: str) -> Any:
    return reference if name == "reference" else MODULES[name].implementation


each_variant = pytest.mark.parametrize("name", ["reference", *(n for n in MODULES if not n.startswith("group_"))])
each_claimed = pytest.mark.parametrize(
    ("name", "profile"),
    [
        (name, profile)
        for profile in PROFILES
        for name in ("reference", *MODULES)
        if hasattr(_implementation(name), FACTORIES[profile])
    ],
)


def _idle(outcome: Outcome, implementation: Any, profile: str) -> set[str]:
    binding = bound(Claims.of(implementation.claims), profile)
    return {rule for rule, _ in binding} - {rule for rule, code in outcome.exercised if (rule, code) in binding}


@each_claimed
def test_no_scenario_finds_fault_and_every_bound_rule_is_exercised(name: str, profile: str) -> None:
    """Over every scenario that the variant's claims ask for."""
    implementation = _implementation(name)
    outcome = judged(implementation, profile=profile)
    assert outcome.found == {}
    assert _idle(outcome, implementation, profile) == set()


@pytest.mark.slow
@each_variant
def test_no_sequence_of_calls_finds_fault(name: str) -> None:
    """With every single fault."""
    assert judged(_implementation(name), DEPTH, FAULT_DEPTH).explored == {}


def test_there_are_at_least_eight_and_some_owe_nothing_to_the_reference() -> None:
    """Those written from scratch take no class from it."""
    trainers = {n: m for n, m in MODULES.items() if not n.startswith(("driver_", "group_"))}
    scratch = [n for n, m in trainers.items() if not hasattr(m, "ReferenceTrainer")]
    assert len(trainers) >= 8
    assert len(scratch) >= 3


def test_there_are_at_least_six_drivers() -> None:
    """Of other shape than the reference's."""
    assert len([n for n in MODULES if n.startswith("driver_")]) >= 6

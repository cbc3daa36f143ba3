"""Correct pairs of several shapes are not found fault with, over real processes on the stand-in."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from colocert.record.controls import RED, run
from colocert.rules.catalogue import catalogue
from colocert_fixtures.judging import bound, judged

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("stand_in")]
PROFILE = "live"
VARIANTS = ("live_double", "live_mirrored", "live_in_one_process")


@pytest.mark.parametrize("name", VARIANTS)
def test_a_correct_pair_has_no_fault_and_exercises_every_rule_that_binds(name: str) -> None:
    implementation: Any = importlib.import_module(f"colocert_fixtures.variants.{name}").implementation
    outcome = judged(implementation, profile=PROFILE)
    binding = bound(implementation.claims, PROFILE)
    assert outcome.found == {}
    assert set(binding) <= set(outcome.exercised)


def test_the_inert_one_passes_no_rule() -> None:
    inert, *mutants = run([rule.id for rule in catalogue().values() if rule.profile == PROFILE])
    assert (inert.name, inert.outcome, inert.detail) == ("inert", RED, "passes no rule")
    assert {mutant.outcome for mutant in mutants} == {RED}

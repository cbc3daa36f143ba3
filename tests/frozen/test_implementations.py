"""Correct offloads of several shapes are not found fault with, over real processes and files."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from colocert_fixtures.judging import bound, judged
from colocert_fixtures.variants import offload_checks_named_files, offload_maps_tensors, offload_to_host_memory
from colocert_reference.colocert_impl import implementation as reference

pytestmark = [pytest.mark.torch, pytest.mark.slow]
PROFILE = "frozen-offload"
CORRECT = {
    "reference": reference,
    "offload_maps_tensors": offload_maps_tensors.implementation,
    "offload_checks_named_files": offload_checks_named_files.implementation,
    "offload_to_host_memory": offload_to_host_memory.implementation,
}


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_offload_has_no_fault_and_exercises_every_rule_that_binds(name: str) -> None:
    implementation: Any = CORRECT[name]
    outcome = judged(implementation, profile=PROFILE)
    binding = bound(implementation.claims, PROFILE)
    assert outcome.found == {}
    assert {rule for rule, _ in binding} <= {rule for rule, code in outcome.exercised if (rule, code) in binding}

"""Mutants are found out as they say, correct offloads of another shape are not, over real processes and files."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")

from colocert.rules.catalogue import catalogue
from colocert_fixtures import matrix
from colocert_fixtures.judging import bound, judged, shows
from colocert_fixtures.variants import offload_checks_named_files, offload_maps_tensors, offload_to_host_memory
from colocert_reference.colocert_impl import implementation as reference

pytestmark = [pytest.mark.torch, pytest.mark.slow]
PROFILE = "frozen-offload"
MODULES = matrix.modules(PROFILE)
ROWS = (Path(__file__).parent / "kill_matrix.txt").read_text().splitlines()
CORRECT = {
    "reference": reference,
    "offload_maps_tensors": offload_maps_tensors.implementation,
    "offload_checks_named_files": offload_checks_named_files.implementation,
    "offload_to_host_memory": offload_to_host_memory.implementation,
}


@pytest.mark.parametrize("module", MODULES, ids=matrix.name)
def test_the_named_rule_finds_the_named_code_in_a_scenario(module: ModuleType) -> None:
    """In one that the rule names first, so that a control is quick."""
    assert next(shows(module.implementation, module.KILLED_BY), None) in catalogue()[module.KILLED_BY[0]].scenarios


@pytest.mark.parametrize("module", MODULES, ids=matrix.name)
def test_the_row_says_what_the_mutant_says(module: ModuleType) -> None:
    """`python -m colocert_fixtures.matrix frozen-offload` runs every mutant on every scenario, in some minutes."""
    rules = [rule.id for rule in catalogue().values() if rule.profile == PROFILE]
    (row,) = (line for line in ROWS if line.split()[:1] == [matrix.name(module)])
    _, *cells, code = row.split()
    marked = {rule: cell for rule, cell in zip(rules, cells, strict=True) if cell != "."}
    explained = getattr(module, "ALSO_KILLED_BY", {})
    assert (marked, code) == ({module.KILLED_BY[0]: "K", **dict.fromkeys(explained, "+")}, module.KILLED_BY[1])
    lines = (module.__doc__ or "").splitlines()
    reports = [report for rule in marked for report in catalogue()[rule].seen]
    assert len(lines) == 1
    assert any(report.rpartition("/")[2].partition(" (")[0] in lines[0] for report in reports)
    assert module.implementation.name == matrix.name(module)


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_offload_has_no_fault_and_exercises_every_rule_that_binds(name: str) -> None:
    implementation: Any = CORRECT[name]
    outcome = judged(implementation, profile=PROFILE)
    binding = bound(implementation.claims, PROFILE)
    assert outcome.found == {}
    assert {rule for rule, _ in binding} <= {rule for rule, code in outcome.exercised if (rule, code) in binding}

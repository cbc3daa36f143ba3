"""Every mutant is found out by the rule it names, with the code it names; whatever else finds it is explained."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from colocert.rules.catalogue import catalogue
from colocert_fixtures import matrix
from colocert_fixtures.judging import PROFILES, shows

MODULES = [module for profile in PROFILES for module in matrix.modules(profile)]
FILES = {
    "lifecycle": "kill_matrix.txt",
    "handoff": "kill_matrix_handoff.txt",
    "adapter-sync": "kill_matrix_adapter_sync.txt",
    "engine": "kill_matrix_engine.txt",
}
SNAPSHOTS = {profile: (Path(__file__).parent / FILES[profile]).read_text().splitlines() for profile in PROFILES}

each_mutant = pytest.mark.parametrize("module", MODULES, ids=matrix.name)


@each_mutant
def test_the_named_rule_finds_the_named_code_in_a_scenario(module: ModuleType) -> None:
    """A finding of another rule or code does not count."""
    assert next(shows(module.implementation, module.KILLED_BY), None)


@pytest.mark.slow
@each_mutant
def test_the_row_is_as_in_the_snapshot_and_every_further_kill_is_explained(module: ModuleType) -> None:
    """The snapshot's first line says how it is written."""
    outcome = matrix.outcome(module)
    explained = getattr(module, "ALSO_KILLED_BY", {})
    assert {rule for rule in outcome.rules() if rule != module.KILLED_BY[0]} == set(explained)
    assert matrix.row(module, outcome) in SNAPSHOTS[matrix.profile_of(module)]


@pytest.mark.parametrize("profile", PROFILES)
def test_the_snapshot_has_a_row_for_each_mutant_and_no_other(profile: str) -> None:
    """And the header that the generator writes."""
    head, snapshot = matrix.header(profile), SNAPSHOTS[profile]
    assert snapshot[: len(head)] == head
    assert [line.split()[0] for line in snapshot[len(head) :]] == [matrix.name(m) for m in matrix.modules(profile)]


@each_mutant
def test_the_docstring_is_one_line_that_cites_the_public_fault(module: ModuleType) -> None:
    """The report is one that the rule's catalogue entry lists."""
    lines = (module.__doc__ or "").splitlines()
    assert len(lines) == 1
    found_by = (module.KILLED_BY[0], *getattr(module, "ALSO_KILLED_BY", {}))
    reports = [report for rule in found_by for report in catalogue()[rule].seen]
    assert any(re.sub(r"^.*/| \(.*", "", report) in lines[0] for report in reports)


@each_mutant
def test_the_implementation_is_named_like_its_module(module: ModuleType) -> None:
    """So that a report and a file are found from each other."""
    assert module.implementation.name == matrix.name(module)

"""Every mutant is found out by the rule it names, with the code it names; whatever else finds it is explained."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from colocert.extras import has_torch
from colocert.rig.live_device import lacking
from colocert.rules.catalogue import catalogue
from colocert_fixtures import matrix
from colocert_fixtures.judging import PROFILES, rules, shows

COMPUTED = (*PROFILES, *(("sync-payload",) if has_torch() else ()))
"""Profiles of which every row is computed again; those of the others take real processes, and some minutes."""

KEPT = ("frozen-offload", "live")
MODULES = {profile: matrix.modules(profile) for profile in (*COMPUTED, *KEPT)}
SNAPSHOTS = {profile: Path(matrix.file_of(profile)).name for profile in MODULES}


def lines(profile: str) -> list[str]:
    return (Path(__file__).parent / SNAPSHOTS[profile]).read_text().splitlines()


def lacks(profile: str) -> str:
    """What this machine does not have to run mutants of a profile; empty where it has all."""
    if profile == "live":
        return lacking("host")
    return "" if profile in PROFILES or has_torch() else "works on tensors: needs torch"


def each(profiles: tuple[str, ...], marked: Sequence[pytest.MarkDecorator] = ()) -> pytest.MarkDecorator:
    """A test for each mutant of these profiles; `marked` for those of which the rows are kept."""
    return pytest.mark.parametrize(
        "module",
        [
            pytest.param(module, id=matrix.name(module), marks=marked if profile in KEPT else ())
            for profile in profiles
            for module in MODULES[profile]
        ],
    )


each_mutant = each((*COMPUTED, *KEPT))


@each((*COMPUTED, *KEPT), [pytest.mark.slow])
def test_the_named_rule_finds_the_named_code_in_a_scenario(module: ModuleType) -> None:
    """A finding of another rule or code does not count. Where scenarios are slow, it is one that the rule names."""
    if why := lacks(matrix.profile_of(module)):
        pytest.skip(why)
    on = next(shows(module.implementation, module.KILLED_BY), None)
    assert on
    assert on in catalogue()[module.KILLED_BY[0]].scenarios or matrix.profile_of(module) not in KEPT


@pytest.mark.slow
@each(COMPUTED)
def test_the_row_is_as_in_the_snapshot_and_every_further_kill_is_explained(module: ModuleType) -> None:
    """The snapshot's first line says how it is written."""
    outcome = matrix.outcome(module)
    explained = getattr(module, "ALSO_KILLED_BY", {})
    assert {rule for rule in outcome.rules() if rule != module.KILLED_BY[0]} == set(explained)
    assert matrix.row(module, outcome) in lines(matrix.profile_of(module))


@each((*COMPUTED, *KEPT))
def test_the_row_says_what_the_mutant_says(module: ModuleType) -> None:
    """The rule that it names, with the code, and the further ones that it explains; those of exploration too."""
    profile = matrix.profile_of(module)
    (row,) = (line for line in lines(profile) if line.split()[:1] == [matrix.name(module)])
    _, *cells, code = row.split()
    marked = {rule.id: cell for rule, cell in zip(rules(profile), cells, strict=True) if cell != "."}
    assert (marked.pop(module.KILLED_BY[0]), code) == ("K", module.KILLED_BY[1])
    assert marked.keys() == getattr(module, "ALSO_KILLED_BY", {}).keys()


@pytest.mark.parametrize("profile", MODULES)
def test_the_snapshot_has_a_row_for_each_mutant_and_no_other(profile: str) -> None:
    """And the header that the generator writes."""
    head, snapshot = matrix.header(profile), lines(profile)
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

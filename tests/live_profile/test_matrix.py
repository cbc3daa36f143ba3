"""The kill matrix of the live profile, its mutants and the catalogue account for each other. No device."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from colocert.rules.catalogue import catalogue
from colocert_fixtures import matrix

PROFILE = "live"
MODULES = matrix.modules(PROFILE)
ROWS = (Path(__file__).parent / "kill_matrix.txt").read_text().splitlines()
DEFECTS = {  # what an RL loop loses without any error, and the rule that says which it was
    "keeps_the_gradients": ("LV-01", "does-not-fit"),
    "keeps_the_senders_memory": ("LV-03", "delta-not-served"),
    "keeps_the_prefix_cache": ("LV-03", "tokens-differ"),
    "forgets_the_base": ("LV-03", "tokens-differ"),
    "trains_on_what_came_back": ("LV-02", "losses-differ"),
}


def test_every_code_has_a_mutant_and_every_mutant_a_row() -> None:
    codes = {(rule.id, code.name) for rule in catalogue().values() if rule.profile == PROFILE for code in rule.codes}
    assert {module.KILLED_BY for module in MODULES} == codes
    assert ROWS[:4] == matrix.header(PROFILE)
    assert [row.split()[0] for row in ROWS[4:]] == [matrix.name(module) for module in MODULES]
    assert {matrix.name(m): m.KILLED_BY for m in MODULES if matrix.name(m) in DEFECTS} == DEFECTS


@pytest.mark.parametrize("module", MODULES, ids=matrix.name)
def test_the_row_says_what_the_mutant_says(module: ModuleType) -> None:
    """`python -m colocert_fixtures.matrix live` runs every mutant on every scenario, in some minutes."""
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

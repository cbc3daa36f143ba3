"""The mutants of the live profile and the catalogue account for each other. No device."""

from __future__ import annotations

from colocert.rules.catalogue import catalogue
from colocert_fixtures import matrix

PROFILE = "live"
MODULES = matrix.modules(PROFILE)
DEFECTS = {  # what an RL loop loses without any error, and the rule that says which it was
    "keeps_the_gradients": ("LV-01", "does-not-fit"),
    "keeps_the_senders_memory": ("LV-03", "delta-not-served"),
    "keeps_the_prefix_cache": ("LV-03", "tokens-differ"),
    "forgets_the_base": ("LV-03", "tokens-differ"),
    "trains_on_what_came_back": ("LV-02", "losses-differ"),
}


def test_every_code_has_a_mutant_and_every_defect_is_among_them() -> None:
    codes = {(rule.id, code.name) for rule in catalogue().values() if rule.profile == PROFILE for code in rule.codes}
    assert {module.KILLED_BY for module in MODULES} == codes
    assert {matrix.name(m): m.KILLED_BY for m in MODULES if matrix.name(m) in DEFECTS} == DEFECTS

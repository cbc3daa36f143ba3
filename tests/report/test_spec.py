"""docs/spec.md is what the catalogue says."""

from __future__ import annotations

from pathlib import Path

from colocert.report.spec import spec
from colocert.rules.catalogue import catalogue

PAGE = Path(__file__).parents[2] / "docs" / "spec.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == spec(), "run: colocert spec -o docs/spec.md"


def test_it_says_in_its_first_line_that_it_is_generated() -> None:
    assert "generated" in spec().splitlines()[0]


def test_it_has_every_rule_and_code() -> None:
    text = spec()
    for rule in catalogue().values():
        assert f"### {rule.id}\n" in text
        assert all(f"| `{code.name}` |" in text for code in rule.codes)

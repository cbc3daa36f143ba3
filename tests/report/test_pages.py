"""What is written beside a certificate: the Markdown page, the badge, and GitHub's annotations."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pytest

from colocert.expected import Expected
from colocert.judge import Evidence, Selection, judge
from colocert.record.manifest import ControlRecord, Options, Problem, Record
from colocert.report import github
from colocert.report.badge import badge_paths, endpoint, svg
from colocert.report.certificate import certificate
from colocert.report.summary import page, problem_page, text
from colocert.rules.catalogue import catalogue

KNOWN = Expected("LC-03", "released-again", "forgets it", "mine#12", date(2999, 1, 1))


def made(evidence: Evidence, **selected: Any) -> dict[str, Any]:
    return certificate(judge(evidence, Selection(("lifecycle",), **selected)))


# ---- the page


def test_the_page_of_a_broken_one_says_what_broke_where_and_what_to_do(broken: Evidence) -> None:
    shown = page(made(broken))
    rule = catalogue()["LC-03"]
    assert shown.startswith("# colocert: not-conformant\n\n**colocert-reference 0.1.0**; lifecycle: not-conformant.\n")
    assert "\n## LC-03 fail: released-again\n" in shown
    for part in (rule.sentence, rule.breaks, rule.fix, rule.seen[0], "`lora-early-release`"):
        assert part in shown


def test_every_rule_of_the_profiles_that_ran_is_in_its_table(broken: Evidence) -> None:
    rows = [line for line in page(made(broken)).splitlines() if line.startswith("| LC-")]
    assert [row.split(" | ")[0].strip("| ") for row in rows] == [r for r in catalogue() if r.startswith("LC-")]
    assert {row.count(" | ") for row in rows} == {5}


def test_the_page_of_a_conforming_one_names_no_fault(conforming: Evidence) -> None:
    shown = page(made(conforming, narrowed=("--depth=0",)))
    assert "fail" not in shown
    assert "- lifecycle: 2 scenarios\n" in shown


def test_an_expected_failure_shows_its_issue_and_its_day(broken: Evidence) -> None:
    shown = page(made(broken, expected=(KNOWN,)))
    assert "## LC-03 expected: released-again" in shown
    assert "- Expected: released-again, until 2999-01-01, mine\\#12: forgets it" in shown


def test_a_lost_scenario_is_named(hung: Evidence) -> None:
    assert "- lifecycle: 2 scenarios, of which lora-early-release hang\n" in page(made(hung))


def test_controls_and_reasons_are_on_the_page(conforming: Evidence) -> None:
    red = ControlRecord("a", "LC-03", "released-again", "red")
    conforming.record = msgspec.structs.replace(conforming.record, controls=(red,))
    shown = page(made(conforming, narrowed=("-k",)))
    assert "- controls: 1 red\n" in shown
    assert "- the run was narrowed by -k" in shown


def test_a_text_of_the_implementation_is_never_markup(conforming: Evidence) -> None:
    name = "<img src=x>|[a](b)\n# `head`"
    conforming.record = msgspec.structs.replace(conforming.record, name=name)
    shown = page(made(conforming))
    assert "<img" not in shown.replace("\\<img", "")
    assert not any(line.startswith("# `head`") for line in shown.splitlines())
    assert text(name) == "\\<img src=x\\>\\|\\[a\\](b) \\# \\`head\\`"


def test_a_run_without_a_certificate_has_a_page(tmp_path: Path) -> None:
    assert problem_page("usage-error", "no module x") == "# colocert: usage-error\n\nno module x\n"
    record = Record(impl="x", options=Options(), problem=Problem("import", "x must import", 11))
    from colocert.record.manifest import write_record

    write_record(tmp_path, record)
    shown = page(certificate(judge(Evidence(tmp_path))))
    assert shown.startswith("# colocert: harness-error\n\n**the implementation**; no profile was judged.\n")
    assert "- x must import\n" in shown


# ---- the badge


def test_the_badge_says_the_verdict_as_a_picture_and_as_an_endpoint(broken: Evidence) -> None:
    stated = made(broken, expected=(KNOWN,))
    facts = json.loads(endpoint(stated))
    assert facts["schemaVersion"] == 1
    assert facts["message"] == "not-conformant, 1 expected: lifecycle"
    assert facts["color"] == "red"
    picture = ET.fromstring(svg(stated))
    said = [node.text for node in picture.iter() if node.tag.endswith("}text")]
    assert said == ["colocert", facts["message"]]
    assert picture.get("aria-label") == f"colocert: {facts['message']}"


@pytest.mark.parametrize(
    ("verdict", "colour"),
    [
        ("conformant", "brightgreen"),
        ("partial", "green"),
        ("incomplete", "yellow"),
        ("not-conformant", "red"),
        ("harness-error", "lightgrey"),
    ],
)
def test_each_verdict_has_a_colour_and_its_name(conforming: Evidence, verdict: str, colour: str) -> None:
    stated = {**made(conforming), "verdict": verdict}
    facts = json.loads(endpoint(stated))
    assert facts["color"] == colour
    assert facts["message"].startswith(verdict)
    ET.fromstring(svg(stated))


def test_the_badge_lies_beside_the_certificate() -> None:
    assert badge_paths(Path("out/c.json")) == (Path("out/c.badge.svg"), Path("out/c.badge.json"))


# ---- annotations


def test_a_broken_rule_is_an_error_and_an_expected_one_a_warning(broken: Evidence) -> None:
    lines = list(github.commands(judge(broken, Selection(("lifecycle",)))))
    (error,) = [line for line in lines if line.startswith("::error title=LC-03 released-again::")]
    assert "(lora-early-release). " in error
    known = list(github.commands(judge(broken, Selection(("lifecycle",), expected=(KNOWN,)))))
    assert any(line.startswith("::warning title=LC-03 released-again%2C expected::") for line in known)
    assert not any(line.startswith("::error title=LC-03") for line in known)


def test_a_stale_entry_is_an_error(conforming: Evidence) -> None:
    lines = list(github.commands(judge(conforming, Selection(("lifecycle",), expected=(KNOWN,)))))
    told = "LC-03 is expected to fail with released-again and did not: take it out of the list"
    assert f"::error title=colocert-expected.toml::{told}" in lines


def test_why_a_run_is_incomplete_is_a_warning(conforming: Evidence) -> None:
    lines = list(github.commands(judge(conforming, Selection(("lifecycle",), narrowed=("-k",)))))
    assert "::warning title=colocert incomplete::the run was narrowed by -k" in lines


def test_a_command_is_one_line_whatever_it_says() -> None:
    assert github.command("error", "a:b,c", "100%\r\n::error::x") == "::error title=a%3Ab%2Cc::100%25%0D%0A::error::x"

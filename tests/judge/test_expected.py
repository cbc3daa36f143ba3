"""Known failures are accepted by rule and code, until their day, and never where the list is not what happened."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pytest

from colocert.expected import Expected, ExpectedError, read_expected
from colocert.judge import Evidence, Judged, Selection, excused, judge
from colocert.record.manifest import ControlRecord

TODAY = date(2027, 3, 31)
ENTRY = """
[[expected]]
rule = "LC-03"
code = "released-again"
reason = "forgets"
issue = "https://example.org/12"
expiry = 2027-03-31
"""


def entry(rule: str, code: str) -> Expected:
    return Expected(rule, code, "known", "https://example.org/12", TODAY)


def entries(*kills: tuple[str, str]) -> tuple[Expected, ...]:
    return tuple(entry(*kill) for kill in kills)


def outcome(judged: Judged, rule: str) -> Any:
    return next(row for row in judged.rules if row.id == rule)


def judged_with(folder: Path, expected: tuple[Expected, ...], **selected: Any) -> Judged:
    return judge(Evidence(folder), Selection(("lifecycle",), expected=expected, **selected))


# ---- the file


def test_an_entry_is_accepted_on_its_last_day(tmp_path: Path) -> None:
    path = tmp_path / "list.toml"
    path.write_text(ENTRY)
    assert read_expected(path, TODAY) == (
        Expected("LC-03", "released-again", "forgets", "https://example.org/12", TODAY),
    )


@pytest.mark.parametrize("text", ["", "# nothing is known\n"])
def test_a_list_may_be_empty(tmp_path: Path, text: str) -> None:
    (tmp_path / "list.toml").write_text(text)
    assert read_expected(tmp_path / "list.toml") == ()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (ENTRY.replace("LC-03", "LC-99"), "rule must be one of the catalogue"),
        (ENTRY.replace("released-again", "released-agian"), "code must be one of released-again"),
        (
            ENTRY.replace("2027-03-31", "2027-03-30"),
            "expiry must not have passed (got 2027-03-30, today is 2027-03-31)",
        ),
        (ENTRY.replace('"forgets"', '" "'), "reason must say something"),
        (ENTRY.replace('"https://example.org/12"', '""'), "issue must say something"),
        (ENTRY.replace("expiry = 2027-03-31", ""), "missing required field `expiry`"),
        (ENTRY.replace("expiry = 2027-03-31", "expiry = 3"), "Expected `date`, got `int`"),
        (ENTRY.replace("2027-03-31", '"soon"'), "Invalid RFC3339 encoded date"),
        (ENTRY + 'skip = "LC-01"\n', "unknown field `skip`"),
        (ENTRY.replace("[[expected]]", "[[skipped]]"), "unknown field `skipped`"),
        (ENTRY.replace("[[expected]]", "[expected]"), "Expected `array`, got `object`"),
        (ENTRY + ENTRY, "LC-03 released-again twice"),
        ("[[expected]\n", "must be TOML"),
    ],
    ids=lambda part: part[:30] if "\n" not in part else "",
)
def test_a_wrong_list_is_one_line_that_names_it(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "list.toml"
    path.write_text(text)
    with pytest.raises(ExpectedError) as wrong:
        read_expected(path, TODAY)
    assert told in str(wrong.value)
    assert str(path) in str(wrong.value)
    assert "\n" not in str(wrong.value)


def test_a_list_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExpectedError, match=r"nowhere\.toml must be a readable list"):
        read_expected(tmp_path / "nowhere.toml")


@pytest.mark.parametrize("code", ["hang", "died", "untestable"])
def test_any_rule_may_be_expected_to_fail_with_a_code_of_the_runner(tmp_path: Path, code: str) -> None:
    (tmp_path / "list.toml").write_text(ENTRY.replace("released-again", code))
    assert read_expected(tmp_path / "list.toml", TODAY)[0].code == code


# ---- the verdict


def test_with_every_failure_listed_the_verdict_stays_and_the_exit_code_does_not(
    recorded: Path, failing: tuple[tuple[str, str], ...]
) -> None:
    judged = judged_with(recorded, entries(*failing))
    assert (judged.verdict, judged.profiles, judged.exit_code) == (
        "not-conformant",
        {"lifecycle": "not-conformant"},
        0,
    )
    assert {row.outcome for row in judged.rules if row.id in dict(failing)} == {"expected"}
    assert judged.stale == ()


def test_one_failure_that_is_not_listed_is_a_failure(recorded: Path, failing: tuple[tuple[str, str], ...]) -> None:
    judged = judged_with(recorded, entries(*(kill for kill in failing if kill[0] != "LC-03")))
    assert (judged.verdict, judged.exit_code) == ("not-conformant", 1)
    assert outcome(judged, "LC-03").outcome == "fail"


def test_a_failure_with_another_code_is_a_failure_and_shows_that_code(
    recorded: Path, failing: tuple[tuple[str, str], ...]
) -> None:
    """The row names the code that is not listed, and a scenario that shows it."""
    by_rule: dict[str, list[str]] = {}
    for rule, code in failing:
        by_rule.setdefault(rule, []).append(code)
    rule, codes = next((rule, codes) for rule, codes in by_rule.items() if len(codes) > 1)
    for code in codes:
        left = entries(*(kill for kill in failing if kill != (rule, code)))
        judged = judged_with(recorded, left)
        row = outcome(judged, rule)
        assert (row.outcome, row.code, judged.exit_code) == ("fail", code, 1)
        case = Evidence(recorded).case(rule, row.scenario)
        assert code in case.codes
        assert not excused(case, left)


def test_an_entry_with_another_code_than_the_one_that_shows_is_stale(
    recorded: Path, failing: tuple[tuple[str, str], ...]
) -> None:
    judged = judged_with(recorded, entries(("LC-03", "never-released")))
    assert [(s.rule, s.code, s.text) for s in judged.stale] == [
        ("LC-03", "never-released", "LC-03 is expected to fail with never-released (got released-again)")
    ]
    assert judged.exit_code == 1


def test_a_pass_that_was_expected_to_fail_is_an_error_and_leaves_the_verdict(
    recorded: Path, failing: tuple[tuple[str, str], ...]
) -> None:
    judged = judged_with(recorded, entries(*failing, ("LC-01", "grads-kept")))
    assert outcome(judged, "LC-01").outcome == "pass"
    assert [s.text for s in judged.stale] == [
        "LC-01 is expected to fail with grads-kept and did not: take it out of the list"
    ]
    assert judged.stale[0].text in judged.reasons
    assert (judged.verdict, judged.exit_code) == ("not-conformant", 1)


def test_a_rule_that_no_longer_binds_is_expected_in_vain(recorded: Path) -> None:
    evidence = Evidence(recorded)
    evidence.record = msgspec.structs.replace(evidence.record, claims={**evidence.record.claims, "multi_lora": False})
    judged = judge(evidence, Selection(("lifecycle",), expected=entries(("LC-22", "released-without-copy"))))
    assert outcome(judged, "LC-22").outcome == "not-applicable"
    assert [s.rule for s in judged.stale] == ["LC-22"]


@pytest.mark.parametrize("less", [{"narrowed": ("-k",)}, {"left_out": ("LC-01[lora-cycle]",)}], ids=["-k", "left-out"])
def test_an_incomplete_run_stays_one_and_says_nothing_against_an_entry(
    recorded: Path, failing: tuple[tuple[str, str], ...], less: dict[str, Any]
) -> None:
    """Expected failures do not make a run of less than everything a success."""
    judged = judged_with(recorded, entries(*failing, ("LC-01", "grads-kept")), **less)
    assert (judged.verdict, judged.aside, judged.exit_code) == ("not-conformant", "incomplete", 10)
    assert judged.stale == ()


def test_a_stale_entry_of_a_profile_that_did_not_run_is_left_alone(recorded: Path) -> None:
    assert judged_with(recorded, entries(("HO-01", "weights-before-grads"))).stale == ()


def test_a_green_control_outweighs_the_list(recorded: Path, failing: tuple[tuple[str, str], ...]) -> None:
    evidence = Evidence(recorded)
    green = ControlRecord("inert", "", "", "green", "passes LC-04")
    evidence.record = msgspec.structs.replace(evidence.record, controls=(green,))
    judged = judge(evidence, Selection(("lifecycle",), expected=entries(*failing)))
    assert (judged.verdict, judged.exit_code) == ("harness-error", 11)


def test_a_failing_should_rule_may_be_listed_where_it_does_not_bind(
    recorded: Path, failing: tuple[tuple[str, str], ...]
) -> None:
    should = [kill for kill in failing if kill[0] == "LC-21"]
    assert should
    musts = entries(*(kill for kill in failing if kill[0] != "LC-21"))
    assert judged_with(recorded, musts).exit_code == 0
    assert judged_with(recorded, musts, level="should").exit_code == 1
    assert judged_with(recorded, (*musts, *entries(*should)), level="should").exit_code == 0


def test_an_untestable_claim_may_be_listed(recorded: Path, failing: tuple[tuple[str, str], ...]) -> None:
    evidence = Evidence(recorded)
    kept = tuple(s for s in evidence.record.scenarios if not s.id.endswith("offload-off"))
    evidence.record = msgspec.structs.replace(evidence.record, scenarios=kept, explorations=())
    evidence.__dict__.pop("cases", None)
    judged = judge(evidence, Selection(("lifecycle",), expected=entries(("LC-10", "untestable"))))
    assert (outcome(judged, "LC-10").outcome, outcome(judged, "LC-10").code) == ("expected", "untestable")

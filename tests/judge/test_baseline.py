"""The list of expected failures as text: sorted, what was written by hand kept letter by letter."""

from __future__ import annotations

from datetime import date

import pytest

from colocert.baseline import HEAD, block_text, split, update
from colocert.expected import Expected, ExpectedError, parse

DAY = date(2027, 3, 31)
BY_HAND = """\
# Ours, kept by the memory team.

# waits for the new allocator
# (see the notes of May)
[[expected]]  # the worst one
rule = "LC-15"
code = 'read-in-released'
reason = \"\"\"two
lines\"\"\"
issue = "https://example.org/3"   # upstream
expiry = 2027-01-31

[[expected]]
rule = "LC-03"
code = "released-again"
reason = "forgets"
issue = "https://example.org/12"
expiry = 2027-03-31
# the end of this entry
"""


def new(*kills: tuple[str, str]) -> dict[tuple[str, str], Expected]:
    return {kill: Expected(*kill, "it is so", "to be filed", DAY) for kill in kills}


def test_an_empty_list_gets_a_head_and_the_entries_in_the_order_of_the_catalogue() -> None:
    kills = [("HO-01", "weights-before-grads"), ("LC-15", "read-in-released"), ("LC-03", "released-again")]
    made = update("", kills, new(*kills), ())
    assert made.text.startswith(HEAD)
    assert [entry.rule for entry in parse(made.text)] == ["LC-03", "LC-15", "HO-01"]
    assert (made.kept, made.removed) == ((), ())


def test_what_still_fails_is_kept_letter_by_letter_and_sorted() -> None:
    kills = [("LC-03", "released-again"), ("LC-15", "read-in-released")]
    made = update(BY_HAND, kills, new(*kills), ("LC-03", "LC-15"))
    head, blocks = split(BY_HAND)
    assert made.text == "\n\n".join([head.strip(), blocks[1].text.strip(), blocks[0].text.strip()]) + "\n"
    assert "# waits for the new allocator\n# (see the notes of May)\n[[expected]]  # the worst one\n" in made.text
    assert (len(made.kept), made.added, made.removed) == (2, (), ())


def test_what_no_longer_fails_goes_with_its_comment() -> None:
    made = update(BY_HAND, [("LC-03", "released-again")], new(("LC-03", "released-again")), ("LC-03", "LC-15"))
    assert "allocator" not in made.text
    assert made.text.startswith("# Ours, kept by the memory team.\n\n[[expected]]\n")
    assert [entry.rule for entry in made.removed] == ["LC-15"]


def test_entries_of_rules_that_did_not_run_stay() -> None:
    made = update(BY_HAND, [], {}, ("LC-03",))
    assert [entry.rule for entry in parse(made.text)] == ["LC-15"]


def test_a_list_without_entries_keeps_its_head() -> None:
    assert update("# Ours.\n", [], {}, ()).text == "# Ours.\n"
    made = update(BY_HAND, [], {}, ("LC-03", "LC-15"))
    assert made.text == "# Ours, kept by the memory team.\n"


def test_writing_twice_changes_nothing() -> None:
    kills = [("LC-03", "released-again"), ("LC-15", "read-in-released"), ("LC-05", "double-release")]
    once = update(BY_HAND, kills, new(*kills), ("LC-03", "LC-05", "LC-15")).text
    again = update(once, kills, new(*kills), ("LC-03", "LC-05", "LC-15"))
    assert again.text == once
    assert again.added == again.removed == ()


@pytest.mark.parametrize("text", ['"quoted"', "back\\slash", "tab\tand # sign", "ünïcode ✓", "two\nlines"])
def test_a_new_entry_says_what_it_was_given(text: str) -> None:
    entry = Expected("LC-03", "released-again", text, "https://example.org/12", DAY)
    assert parse(block_text(entry)) == (entry,)


@pytest.mark.parametrize(
    "text",
    [
        'expected = [{ rule = "LC-03", code = "released-again", reason = "r", issue = "i", expiry = 2027-01-01 }]\n',
        "[[expected]\n",
        '[[expected]]\nrule = "LC-03"\n',
        BY_HAND.replace("[[expected]]  #", "[[ expected ]]  #"),
        BY_HAND.replace("two\nlines", "two\n[[expected]]\nlines"),
    ],
    ids=["inline", "syntax", "incomplete", "spaced", "in-a-string"],
)
def test_a_list_of_another_layout_is_refused_and_not_rewritten(text: str) -> None:
    with pytest.raises(ExpectedError):
        update(text, [], {}, ())

"""Known failures through pytest: xfailed items, an item an entry, and what each mistake costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from colocert.judge import FAIL, Evidence, judge
from colocert.record.manifest import Options, write_record
from colocert.record.runner import record

Pytest = Callable[..., Any]
Impl = Callable[[str], str]
Kills = list[tuple[str, str]]
BROKEN = Path(__file__).parent / "impls" / "releases_again.py"


def listed(*kills: tuple[str, str], expiry: str = "2999-01-01") -> str:
    return "".join(
        f'[[expected]]\nrule = "{rule}"\ncode = "{code}"\nreason = "known"\nissue = "mine#1"\nexpiry = {expiry}\n'
        for rule, code in kills
    )


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evidence of one that fails, as if it had been explored in full."""
    folder = tmp_path_factory.mktemp("releases-again") / "evidence"
    shallow = Options(profiles=("lifecycle",), depth=1, fault_depth=1, controls=False)
    made = record(str(BROKEN), folder, shallow)
    write_record(folder, msgspec.structs.replace(made, options=Options(profiles=("lifecycle",))))
    return folder


@pytest.fixture(scope="module")
def failing(kept: Path) -> Kills:
    """Every MUST and code that it fails with."""
    rows = [row for row in judge(Evidence(kept)).rules if row.outcome == FAIL and row.level == "must"]
    return [(row.id, code) for row in rows for code in dict.fromkeys(c for case in row.cases for c in case.codes)]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_with_only_listed_failures_it_is_0_and_the_verdict_is_what_it_is(
    run: Pytest, kept: Path, failing: Kills, tmp_path: Path, workers: str
) -> None:
    """The list in the rootdir is found by itself."""
    (tmp_path / "colocert-expected.toml").write_text(listed(*failing))
    ended = run(f"--impl=trace:{kept}", "-n", workers)
    assert ended.code == 0, ended.out
    assert ended.last.startswith("colocert: not-conformant (lifecycle): 21 rules, ")
    assert f", {len(dict(failing))} expected" in ended.last
    assert " xfailed" in ended.out
    assert " failed" not in ended.out
    rows = {row["id"]: row["outcome"] for row in ended.certificate["rules"]}
    assert {rows[rule] for rule, _ in failing} == {"expected"}
    assert len(ended.certificate["selection"]["expected"]) == len(failing)


def test_an_incomplete_run_is_10_whatever_is_listed(run: Pytest, kept: Path, failing: Kills, tmp_path: Path) -> None:
    (tmp_path / "colocert-expected.toml").write_text(listed(*failing))
    ended = run(f"--impl=trace:{kept}", "-k", "not LC-01")
    assert ended.code == 10
    assert ended.last.startswith("colocert: not-conformant (lifecycle)")


def test_a_run_that_ignores_xfail_is_no_success(run: Pytest, kept: Path, failing: Kills, tmp_path: Path) -> None:
    (tmp_path / "colocert-expected.toml").write_text(listed(*failing))
    assert run(f"--impl=trace:{kept}", "--runxfail").code == 10


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.slow)])
def test_another_code_and_a_pass_are_failures_by_name(
    run: Pytest, kept: Path, failing: Kills, tmp_path: Path, workers: str
) -> None:
    rest = [kill for kill in failing if kill[0] != "LC-03"]
    (tmp_path / "mine.toml").write_text(listed(*rest, ("LC-03", "never-released"), ("LC-01", "grads-kept")))
    ended = run(f"--impl=trace:{kept}", "--expect=mine.toml", "-n", workers)
    assert ended.code == 1
    assert "expected[LC-03-never-released]" in ended.out
    assert "because: LC-03 is expected to fail with never-released (got released-again)" in ended.out
    assert "expected[LC-01-grads-kept]" in ended.out
    assert "because: LC-01 is expected to fail with grads-kept and did not: take it out of the list" in ended.out
    assert ", 2 fail, " in ended.last  # and the SHOULD rule that does not bind


def test_a_pass_alone_is_1_and_leaves_the_verdict(run: Pytest, kept: Path, failing: Kills, tmp_path: Path) -> None:
    (tmp_path / "colocert-expected.toml").write_text(listed(*failing, ("LC-01", "grads-kept")))
    ended = run(f"--impl=trace:{kept}")
    assert ended.code == 1
    assert "1 failed" in ended.out
    assert ended.last.endswith("; known failures that are not so: 1, `colocert baseline` mends the list")
    assert ", 1 fail, " in ended.last  # the SHOULD rule that does not bind


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (listed(("LC-99", "x")), "rule must be one of the catalogue"),
        (listed(("LC-03", "x")), "code must be one of released-again"),
        (listed(("LC-03", "released-again"), expiry="2020-01-01"), "expiry must not have passed (got 2020-01-01"),
        ("[[expected]]\n", "missing required field"),
    ],
    ids=["rule", "code", "date", "fields"],
)
def test_a_wrong_list_is_one_line_and_4_before_anything_runs(
    run: Pytest, impl: Impl, tmp_path: Path, text: str, told: str
) -> None:
    (tmp_path / "colocert-expected.toml").write_text(text)
    old = tmp_path / "old.json"
    old.write_text("{}")
    ended = run(impl("small"), "--profile=lifecycle", "--depth=0", f"--certificate={old}")
    assert ended.code == 4
    assert not old.exists()
    assert told in ended.err
    assert len(ended.err.splitlines()) == 1
    assert ended.out == ""
    assert not (tmp_path / "evidence").exists()


def test_a_list_that_is_named_has_to_be_there(run: Pytest, impl: Impl) -> None:
    ended = run(impl("small"), "--expect=nowhere.toml")
    assert ended.code == 4
    assert "nowhere.toml must be a readable list" in ended.err


def test_an_output_that_cannot_be_written_is_one_line_and_4(run: Pytest, impl: Impl, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = run(impl("small"), "--certificate=file/certificate.json")
    assert ended.code == 4
    assert "must be writable" in ended.err
    assert len(ended.err.splitlines()) == 1

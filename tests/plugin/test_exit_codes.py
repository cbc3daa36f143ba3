"""A run's exit code is its verdict's: usage 4, harness 11, not conformant 1, incomplete 10, else 0, in this order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Pytest = Callable[..., Any]

Impl = Callable[[str], str]


def one_line(text: str) -> str:
    assert "Traceback" not in text
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) == 1, text
    return lines[0]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--impl=nowhere_to_be_found"], "no module nowhere_to_be_found"),
        (["--impl=reference:nothing"], "nothing"),
        (["--impl=no/such/file.py"], "a file that exists"),
        (["--impl=reference", "--profile=lifecycle,sleeping"], "got sleeping"),
        (["--impl=reference", "--depth=-1"], "0 or more"),
        (["--impl=reference", "--snapshot-update"], "needs --snapshot-dir"),
        (["--impl=trace:nowhere"], "evidence folder"),
    ],
    ids=["module", "attribute", "file", "profile", "depth", "update-without-dir", "trace"],
)
def test_a_wrong_option_is_one_line_and_4(run: Pytest, words: list[str], told: str) -> None:
    ended = run(*words)
    assert ended.code == 4
    assert told in one_line(ended.err)
    assert ended.out == ""
    assert ended.certificate is None


def test_transcripts_are_not_accepted_in_ci(run: Pytest, impl: Impl) -> None:
    ended = run(impl("small"), "--snapshot-dir=golden", "--snapshot-update", env={"CI": "true"})
    assert ended.code == 4
    assert "refuses to run where CI is set" in one_line(ended.err)


@pytest.mark.parametrize("words", [[], ["-n", "2"], ["--collect-only"]], ids=["plain", "xdist", "collect-only"])
def test_the_suite_without_impl_is_a_usage_error(run: Pytest, words: list[str]) -> None:
    ended = run(*words)
    assert ended.code == 4
    assert "give --impl=NAME" in one_line(ended.err)


def test_a_missing_package_is_a_harness_error_with_a_certificate(run: Pytest, impl: Impl) -> None:
    ended = run(impl("needs_torchless"))
    assert ended.code == 11
    assert "a_package_that_nobody_has" in one_line(ended.err)
    assert ended.certificate is not None
    assert ended.certificate["verdict"] == "harness-error"
    assert {row["outcome"] for row in ended.certificate["rules"]} == {"not-run"}


def test_an_older_certificate_does_not_stand_for_a_run_without_one(run: Pytest, tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("{}")
    assert run("--impl=nowhere_to_be_found", f"--certificate={old}").code == 4
    assert not old.exists()


def test_a_folder_that_cannot_be_written_is_one_line_and_4(run: Pytest, impl: Impl, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = run(impl("small"), "--evidence=file/evidence")
    assert ended.code == 4
    assert "must be writable" in one_line(ended.err)


def test_a_usage_error_of_pytest_leaves_no_certificate(run: Pytest, impl: Impl) -> None:
    ended = run(impl("small"), "--depth=0", "no_such_test.py")
    assert ended.code == 4
    assert ended.certificate is None


def test_damaged_evidence_is_named_by_its_line(run: Pytest, impl: Impl, tmp_path: Path) -> None:
    run(impl("small"), "--depth=0")
    (tmp_path / "evidence").rename(tmp_path / "kept")
    trace = tmp_path / "kept" / "traces" / "lifecycle" / "full-cycle.jsonl"
    lines = trace.read_text().splitlines()
    trace.write_text("\n".join([*lines[:4], lines[4][:30], *lines[5:]]) + "\n")
    ended = run("--impl=trace:kept")
    assert ended.code == 4
    assert "full-cycle.jsonl:5:" in one_line(ended.err)


def test_a_broken_rule_is_1_and_the_verdict_the_last_line(run: Pytest, impl: Impl) -> None:
    ended = run(impl("releases_again"), "--profile=lifecycle", "--depth=1", "-n", "2")
    assert ended.code == 1
    assert ended.last.startswith("colocert: not-conformant (lifecycle): ")
    assert ended.certificate is not None
    row = next(r for r in ended.certificate["rules"] if r["id"] == "LC-03")
    assert (row["outcome"], row["code"]) == ("fail", "released-again")


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_that_stops_early_is_judged_by_what_it_saw(run: Pytest, impl: Impl, workers: str) -> None:
    ended = run(impl("releases_again"), "--profile=lifecycle", "--depth=0", "-x", "-n", workers)
    assert ended.code == 1
    assert ended.last.startswith("colocert: not-conformant")


@pytest.mark.parametrize(
    "words",
    [
        ["-k", "LC-03"],
        ["-k", "no_such_case"],
        ["-m", "not slow"],
        ["-x"],
        ["--maxfail=3"],
        ["--runxfail"],
        ["--deselect=nothing"],
        ["--faults=none"],
        ["--fault-depth=2"],
        ["--depth=1"],
    ],
    ids=lambda words: words[0],
)
def test_what_narrows_a_run_is_named(run: Pytest, impl: Impl, words: list[str]) -> None:
    ended = run(impl("small"), "--profile=lifecycle", *words)
    assert ended.code == 10
    assert ended.certificate is not None
    assert any(words[0].split("=")[0] in named for named in ended.certificate["selection"]["narrowed"])


def test_a_run_of_the_last_failures_is_named(run: Pytest, impl: Impl) -> None:
    """The other runs here have no cache."""
    ended = run(impl("small"), "--profile=lifecycle", "--depth=0", "-p", "cacheprovider", "--lf")
    assert ended.code == 10
    assert ended.certificate is not None
    assert "--lf" in ended.certificate["selection"]["narrowed"]


@pytest.mark.slow
@pytest.mark.parametrize("words", [["-k", "not LC-03"], ["--faults=none"], ["--depth=5"]], ids=lambda words: words[0])
def test_a_narrowed_run_of_the_reference_is_incomplete(run: Pytest, words: list[str]) -> None:
    ended = run("--impl=reference", "--profile=lifecycle", "-n", "2", "-q", *words)
    assert ended.code == 10
    assert ended.last.startswith("colocert: incomplete (lifecycle)")


def test_a_broken_should_rule_binds_only_with_its_level(run: Pytest, impl: Impl) -> None:
    shown = run(impl("silent_without_lora"), "--profile=lifecycle", "--depth=0", "-rs")
    assert shown.code == 10
    assert "a SHOULD rule, which binds with --level=should; LC-21 (should), no-raise" in shown.out
    bound = run(impl("silent_without_lora"), "--profile=lifecycle", "--depth=0", "--level=should")
    assert bound.code == 1


def test_no_factory_is_incomplete(run: Pytest, impl: Impl) -> None:
    ended = run(impl("no_factory"))
    assert ended.code == 10
    assert "there is nothing to certify" in ended.out


def test_a_failure_beside_the_suite_is_1_and_leaves_the_verdict(run: Pytest, impl: Impl, tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text("def test_mine(): assert False\n")
    ended = run(impl("small"), "--depth=0", "test_mine.py")
    assert ended.code == 1
    assert ended.last.startswith("colocert: incomplete")


def test_collecting_only_gives_no_verdict(run: Pytest, impl: Impl) -> None:
    ended = run(impl("small"), "--depth=0", "--collect-only", "-q")
    assert ended.code == 0
    assert "LC-05[not-exercised]" in ended.out
    assert ended.certificate is None


@pytest.mark.slow
def test_the_reference_conforms(run: Pytest) -> None:
    ended = run("--impl=reference", "--profile=lifecycle", "-n", "2", "-q")
    assert ended.code == 0, ended.out[-3000:]
    assert ended.last.startswith("colocert: conformant (lifecycle): 21 rules, 21 pass")
    assert "%" not in ended.last


@pytest.mark.slow
def test_without_a_profile_an_implementation_of_one_is_partial(run: Pytest) -> None:
    ended = run("--impl=colocert_fixtures.variants.async_methods", "-q")
    assert ended.code == 0, ended.out[-3000:]
    assert ended.last.startswith("colocert: partial")

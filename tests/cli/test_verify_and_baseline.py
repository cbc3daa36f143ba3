"""`colocert verify` and `colocert baseline`, as a user meets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from colocert.cli import main
from colocert.expected import read_expected


def colocert(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_") and k not in ("CI", "GITHUB_ACTIONS")}
    command = [sys.executable, "-m", "colocert.cli", *words]
    return subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with c.json and its evidence, of one that fails."""
    folder = tmp_path_factory.mktemp("certified")
    broken = Path(__file__).parents[1] / "plugin" / "impls" / "releases_again.py"
    words = ["certify", str(broken), "--profile=lifecycle", "--depth=2", "--fault-depth=1", "--level=should"]
    assert colocert(folder, *words, "--certificate=c.json", "--evidence=evidence").returncode == 1
    return folder


def test_a_certificate_is_verified_and_explored_again(
    certified: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(certified)
    assert main(["verify", "c.json", "--evidence=evidence", "--explore"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("colocert: verified not-conformant: ")
    assert line.endswith("5 explorations ran again with the same counts")


def test_another_implementation_explores_otherwise(
    certified: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(certified)
    assert main(["verify", "c.json", "--evidence=evidence", "--explore", "--impl=colocert_reference"]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert any(line.startswith("explore-lora.findings.LC-03 released-again: must be absent") for line in lines)
    assert last == f"colocert: c.json does not agree with evidence: {len(lines)} differences"


def test_an_implementation_that_is_gone_cannot_be_explored(
    certified: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(certified)
    assert main(["verify", "c.json", "--evidence=evidence", "--explore", "--impl=nowhere_to_be_found"]) == 1
    assert "exploration must run again (--impl=nowhere_to_be_found" in capsys.readouterr().out


def test_a_flipped_outcome_is_1(
    certified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(certified)
    stated = json.loads(Path("c.json").read_text())
    next(row for row in stated["rules"] if row["outcome"] == "fail")["outcome"] = "pass"
    (tmp_path / "forged.json").write_text(json.dumps(stated))
    assert main(["verify", str(tmp_path / "forged.json"), "--evidence=evidence"]) == 1
    line, last = capsys.readouterr().out.splitlines()
    assert "outcome: must be fail, as the evidence gives it (got pass in the certificate)" in line
    assert last.endswith("1 differences")


@pytest.mark.parametrize(
    "words",
    [["nowhere.json", "--evidence=evidence"], ["c.json", "--evidence=nowhere"]],
    ids=["certificate", "evidence"],
)
def test_nothing_to_compare_is_one_line_and_4(
    certified: Path, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(certified)
    assert main(["verify", *words]) == 4
    assert capsys.readouterr().err.count("\n") == 1


# ---- baseline


def baseline(certified: Path, *words: str) -> int:
    return main(["baseline", f"trace:{certified / 'evidence'}", "--level=should", *words])


def test_what_fails_is_listed_and_the_next_run_is_green(
    certified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert baseline(certified, "--issue=mine#1", "--reason=known", "--expiry=2999-12-31") == 0
    entries = read_expected(tmp_path / "colocert-expected.toml")
    assert {(e.issue, e.reason, e.expiry.isoformat()) for e in entries} == {("mine#1", "known", "2999-12-31")}
    failed = {row["id"] for row in json.loads((certified / "c.json").read_text())["rules"] if row["outcome"] == "fail"}
    assert {e.rule for e in entries} == failed
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"colocert: colocert-expected.toml: {len(entries)} added, 0 removed, 0 kept"
    ended = colocert(tmp_path, "certify", f"trace:{certified / 'evidence'}", "--level=should")
    assert ended.returncode == 10, ended.stdout  # the recording was narrowed
    assert f"{len(failed)} expected" in ended.stdout.splitlines()[-1]


def test_writing_again_keeps_what_was_written_by_hand(
    certified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    assert baseline(certified, f"--expect={path}", "--issue=mine#1") == 0
    lines = path.read_text().replace("[[expected]]", "# mine\n[[expected]]", 1)
    path.write_text(lines)
    assert baseline(certified, f"--expect={path}", "--issue=other#2") == 0
    assert path.read_text() == lines
    assert " 0 added, 0 removed, " in capsys.readouterr().out.splitlines()[-1]


def test_an_entry_whose_day_has_passed_is_kept_and_said(
    certified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only a person sets another day."""
    path = tmp_path / "mine.toml"
    assert baseline(certified, f"--expect={path}", "--expiry=2999-12-31") == 0
    path.write_text(path.read_text().replace("2999-12-31", "2020-01-01", 1))
    assert baseline(certified, f"--expect={path}") == 4
    assert "expiry must not have passed (got 2020-01-01" in capsys.readouterr().err
    assert "2020-01-01" in path.read_text()


def test_a_list_of_another_layout_is_left_as_it_is(
    certified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("expected = []\n[other]\n")
    assert baseline(certified, f"--expect={path}") == 4
    assert capsys.readouterr().err.count("\n") == 1
    assert path.read_text() == "expected = []\n[other]\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["baseline", "nowhere_to_be_found"], "no module nowhere_to_be_found"),
        (["baseline", "x", "--profile=sleeping"], "got sleeping"),
        (["baseline", "x", "--expiry=2020-01-01"], "must not have passed"),
        (["baseline", "trace:nowhere"], "evidence folder"),
    ],
    ids=["impl", "profile", "expiry", "trace"],
)
def test_a_wrong_argument_is_one_line_and_4(
    words: list[str],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 4
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []

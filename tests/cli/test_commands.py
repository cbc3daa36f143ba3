"""The command line: what each command prints, writes and returns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from colocert.cli import main
from colocert.rules.catalogue import catalogue


def command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_") and k != "CI"}
    return subprocess.run(
        [sys.executable, "-m", "colocert.cli", *words], cwd=cwd, env=kept, capture_output=True, text=True, timeout=300
    )


def test_new_writes_an_adapter_that_runs_as_it_is(tmp_path: Path) -> None:
    made = command("new", "mine.rl", cwd=tmp_path)
    assert made.returncode == 0
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.py")) == [
        "mine/__init__.py",
        "mine/rl/__init__.py",
        "mine/rl/colocert_impl.py",
    ]
    _, *following = made.stdout.splitlines()
    assert following == [
        "  colocert certify mine.rl --profile lifecycle",
        "  pytest --pyargs colocert.suite --impl=mine.rl --profile=lifecycle",
    ]
    ended = command(*following[0].split()[1:], "--certificate", "c.json", cwd=tmp_path)
    assert ended.returncode == 10, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("colocert: incomplete (lifecycle): 21 rules, 10 not-exercised")
    assert (tmp_path / "c.json").exists()


def test_new_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("VALUE = 1\n")
    assert main(["new", "mine"]) == 0
    assert (package / "__init__.py").read_text() == "VALUE = 1\n"
    (package / "colocert_impl.py").write_text("MINE = 1\n")
    assert main(["new", "mine"]) == 4
    assert (package / "colocert_impl.py").read_text() == "MINE = 1\n"
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("words", [["new", "my-pkg"], ["new", ""], ["rules", "LC-99"], ["judge", "nowhere"]])
def test_a_wrong_argument_is_one_line_and_4(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 4
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["certify"], ["nothing"], ["certify", "x", "--nothing"]])
def test_a_wrong_command_is_one_line_and_4(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 4
    assert capsys.readouterr().err.count("\n") == 1


def test_rules_lists_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules"]) == 0
    shown = capsys.readouterr().out
    assert all(rule in shown for rule in catalogue())


@pytest.mark.parametrize("rule", list(catalogue()))
def test_rules_shows_one_in_full(rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", rule.lower()]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for code in catalogue()[rule].codes:
        assert code.name in shown
    assert catalogue()[rule].seen[0].split()[0] in shown


def test_spec_goes_to_standard_output_or_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spec"]) == 0
    assert main(["spec", "-o", str(tmp_path / "docs" / "spec.md")]) == 0
    assert (tmp_path / "docs" / "spec.md").read_text() == capsys.readouterr().out


def test_judge_judges_recorded_evidence_again(tmp_path: Path) -> None:
    command("new", "mine", cwd=tmp_path)
    recorded = command("certify", "mine", "--profile=lifecycle", "--evidence=kept", cwd=tmp_path)
    judged = command("judge", "kept", cwd=tmp_path)
    assert judged.returncode == recorded.returncode == 10
    assert judged.stdout.splitlines()[-1] == recorded.stdout.splitlines()[-1]


def test_it_starts_without_torch_and_without_pytest() -> None:
    absent = "[m for m in ('torch', 'pytest', 'ray') if m in sys.modules]"
    code = f"import sys, colocert.cli as c; c.main(['rules']); print({absent})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"

"""`colocert certify`: nothing of the caller's takes part, and what CI wants is written."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]
ONE = ("--profile", "lifecycle", "--depth", "0")

HOSTILE = {
    "conftest.py": """
import sys
open("conftest-was-here", "w").close()
def pytest_addoption(parser):
    parser.addoption("--impl")
def pytest_collection_modifyitems(items):
    items.clear()
def pytest_sessionfinish(session):
    session.exitstatus = 0
""",
    "pytest.ini": "[pytest]\naddopts = -x -k nothing --runxfail --no-such-option\npython_files = nothing.py\n",
    "tox.ini": "[pytest]\naddopts = --maxfail=1\n",
    "setup.cfg": "[tool:pytest]\naddopts = --maxfail=1\n",
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = ['--no-such-option']\nminversion = '99'\n",
    "test_mine.py": "def test_mine(): assert False\n",
    "msgspec.py": "raise SystemExit('msgspec.py of the caller was imported')\n",
    "syrupy.py": "raise SystemExit('syrupy.py of the caller was imported')\n",
    "colocert/__init__.py": "raise SystemExit('the colocert of the caller was imported')\n",
}


def lasting(path: Path) -> dict[str, Any]:
    return {key: value for key, value in json.loads(path.read_text()).items() if key != "run"}


@pytest.mark.parametrize("workers", ["0", "2"])
def test_nothing_of_the_callers_project_takes_part(command: Command, small: str, tmp_path: Path, workers: str) -> None:
    """Configuration in every file that pytest reads, a conftest, tests, modules of the same names, the environment."""
    alone = command("certify", small, *ONE, "--certificate", "alone.json", "-n", workers)
    for name, content in HOSTILE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    hostile = {
        "PYTEST_ADDOPTS": "-k nothing --no-such-option",
        "PYTEST_PLUGINS": "no_such_plugin",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "",
    }
    beside = command("certify", small, *ONE, "--certificate", "beside.json", "-n", workers, env=hostile)
    assert (beside.returncode, beside.stdout.splitlines()[-1]) == (10, alone.stdout.splitlines()[-1]), beside.stderr
    assert lasting(tmp_path / "beside.json") == lasting(tmp_path / "alone.json")
    assert not (tmp_path / "conftest-was-here").exists()


def test_everything_is_written_and_the_verdict_is_the_last_line(command: Command, broken: str, tmp_path: Path) -> None:
    files = ("--certificate", "out/c.json", "--summary", "out/s/page.md", "--junit-xml", "out/junit.xml")
    ended = command("certify", broken, *ONE, *files, env={"GITHUB_ACTIONS": "true"})
    assert ended.returncode == 1
    assert ended.stdout.splitlines()[-1].startswith("colocert: not-conformant (lifecycle): 21 rules, ")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "c.badge.json",
        "c.badge.svg",
        "c.json",
        "junit.xml",
        "s",
    ]
    certificate = json.loads((tmp_path / "out" / "c.json").read_text())
    assert (tmp_path / "out" / "s" / "page.md").read_text().startswith("# colocert: not-conformant\n")
    assert json.loads((tmp_path / "out" / "c.badge.json").read_text())["message"] == "not-conformant: lifecycle"
    failed = {row["id"] for row in certificate["rules"] if row["outcome"] == "fail" and row["level"] == "must"}
    errors = {
        line.split()[1].removeprefix("title=") for line in ended.stdout.splitlines() if line.startswith("::error")
    }
    assert errors == failed
    cases = [case.get("name", "") for case in ET.parse(tmp_path / "out" / "junit.xml").iter("testcase")]
    assert "LC-03[lora-early-release]" in cases
    assert ended.stderr.splitlines()[0] == f"colocert: importing {broken}"
    assert all(line.startswith("colocert: ") for line in ended.stderr.splitlines())


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_fault_is_told_at_length_once(command: Command, broken: str, workers: str) -> None:
    """Whatever process a case runs in: the first of a rule and code is whole, the others name it."""
    told = command("certify", broken, *ONE, "-n", workers).stdout
    heads = re.findall(r"^([A-Z]{2}-\d\d) \(\w+\), ([\w-]+): (as in )?", told, flags=re.M)
    whole = [(rule, code) for rule, code, again in heads if not again]
    assert len(whole) == len(set(whole)) == told.count("in a run    ")
    assert {(rule, code) for rule, code, again in heads if again} <= set(whole)
    assert any(again for *_, again in heads)


def test_an_older_page_and_badge_do_not_stand_for_a_run_without_them(command: Command, tmp_path: Path) -> None:
    for name in ("c.json", "c.badge.svg", "c.badge.json", "page.md"):
        (tmp_path / name).write_text("old")
    ended = command(
        "certify",
        "nowhere_to_be_found",
        "--certificate=c.json",
        "--summary=page.md",
        env={"GITHUB_ACTIONS": "true"},
    )
    assert ended.returncode == 4
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["page.md"]
    assert "no module nowhere\\_to\\_be\\_found" in (tmp_path / "page.md").read_text()
    assert ended.stdout.startswith("::error title=colocert usage-error::")
    assert ended.stdout.count("\n") == 1


def test_a_missing_package_has_a_certificate_a_page_and_a_badge(command: Command, small: str, tmp_path: Path) -> None:
    lost = str(Path(small).with_name("needs_torchless.py"))
    ended = command("certify", lost, "--certificate=c.json", "--summary=page.md")
    assert ended.returncode == 11
    assert ended.stdout == ""
    assert json.loads((tmp_path / "c.badge.json").read_text())["message"] == "harness-error"
    assert (tmp_path / "page.md").read_text().startswith("# colocert: harness-error\n")


@pytest.mark.parametrize(
    "words", [["--level=x"], ["--faults=some"], ["--depth=deep"], ["--fault-depth"]], ids=lambda words: words[0]
)
def test_a_wrong_option_is_one_line_and_4(command: Command, small: str, words: list[str]) -> None:
    ended = command("certify", small, *words)
    assert ended.returncode == 4
    assert ended.stderr.count("\n") == 1
    assert ended.stdout == ""


@pytest.mark.parametrize("words", [["--certificate=file/c.json"], ["--summary=file/page.md"]], ids=lambda w: w[0])
def test_an_output_that_cannot_be_written_is_one_line_and_4(
    command: Command, small: str, tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    ended = command("certify", small, *words)
    assert ended.returncode == 4
    assert "must be writable" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_the_environment_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from colocert.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_ADDOPTS", "-q")
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", raising=False)
    assert main(["certify", "nowhere_to_be_found"]) == 4
    import os

    assert os.environ["PYTEST_ADDOPTS"] == "-q"
    assert "PYTEST_DISABLE_PLUGIN_AUTOLOAD" not in os.environ

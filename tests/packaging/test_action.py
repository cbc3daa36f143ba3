"""The composite action: its steps are run here as GitHub's runner would run them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parents[2]
IMPLS = ROOT / "tests" / "plugin" / "impls"
EXPRESSION = re.compile(r"\$\{\{\s*(.+?)\s*\}\}")


@pytest.fixture(scope="module")
def action() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
    return loaded


def step(action: dict[str, Any], ident: str) -> dict[str, Any]:
    return next(s for s in action["runs"]["steps"] if s.get("id") == ident)


def run(action: dict[str, Any], tmp_path: Path, **inputs: str) -> tuple[int, dict[str, str], str]:
    """The exit code of the certify step, its outputs, and the page of the job."""
    given = {name: facts.get("default", "") for name, facts in action["inputs"].items()}
    given |= {"python": sys.executable, "workers": "0", **inputs}
    certify = step(action, "certify")

    def value(text: str) -> str:
        return EXPRESSION.sub(lambda m: given[m[1].removeprefix("inputs.")], text)

    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_") and k != "CI"}
    files = {name: str(tmp_path / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    for path in files.values():
        Path(path).write_text("")
    env = {**kept, **files, "GITHUB_ACTIONS": "true", **{k: value(v) for k, v in certify["env"].items()}}
    script = tmp_path / "step.sh"
    script.write_text(certify["run"])
    folder = tmp_path / "work"
    folder.mkdir()
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)]
    done = subprocess.run(shell, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    outputs = dict(line.split("=", 1) for line in Path(files["GITHUB_OUTPUT"]).read_text().splitlines())
    return done.returncode, outputs, Path(files["GITHUB_STEP_SUMMARY"]).read_text()


@pytest.mark.slow
def test_a_broken_implementation_fails_the_job_and_says_why(action: dict[str, Any], tmp_path: Path) -> None:
    code, outputs, shown = run(action, tmp_path, impl=str(IMPLS / "releases_again.py"), profile="lifecycle")
    assert code == 1
    assert (outputs["verdict"], outputs["exit-code"]) == ("not-conformant", "1")
    certificate = Path(outputs["certificate"])
    assert certificate == tmp_path / "work" / "colocert-out" / "certificate.json"
    assert json.loads(certificate.read_text())["verdict"] == "not-conformant"
    assert {"certificate.badge.svg", "certificate.badge.json", "junit.xml", "evidence", "summary.md"} <= {
        path.name for path in certificate.parent.iterdir()
    }
    assert shown.startswith("# colocert: not-conformant\n")


def test_a_wrong_input_fails_the_job_with_a_page(action: dict[str, Any], tmp_path: Path) -> None:
    code, outputs, shown = run(action, tmp_path, impl="nowhere_to_be_found", expect="")
    assert code == 4
    assert (outputs["verdict"], outputs["exit-code"]) == ("", "4")
    assert shown.startswith("# colocert: usage-error\n")


def test_an_input_is_never_part_of_a_script(action: dict[str, Any], tmp_path: Path) -> None:
    """Neither by an expression in the script, nor by what the shell makes of its value."""
    scripts = [s["run"] for s in action["runs"]["steps"] if "run" in s]
    assert scripts
    assert not any("${{" in script for script in scripts)
    code, outputs, _ = run(action, tmp_path, impl="x; touch pwned; $(touch pwned) `touch pwned` *", out="a b")
    assert code == 4
    assert outputs["certificate"] == str(tmp_path / "work" / "a b" / "certificate.json")
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["a b"]


def test_every_input_is_described_and_used(action: dict[str, Any]) -> None:
    assert all(facts["description"] for facts in action["inputs"].values())
    used = set(re.findall(r"inputs\.([a-z-]+)", (ROOT / "action.yml").read_text()))
    assert used == set(action["inputs"])


def test_the_workflow_in_the_docs_uses_inputs_that_exist(action: dict[str, Any]) -> None:
    (block,) = re.findall(r"```yaml\n(name: colocert\n.*?)```", (ROOT / "docs" / "ci.md").read_text(), flags=re.S)
    (job,) = yaml.safe_load(block)["jobs"].values()
    (used,) = [s for s in job["steps"] if s.get("uses", "").startswith("OWNER/colocert@")]
    assert set(used["with"]) <= set(action["inputs"])
    required = {name for name, facts in action["inputs"].items() if facts.get("required")}
    assert required <= set(used["with"])

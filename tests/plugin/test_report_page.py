"""`--report`: the page is written beside the certificate, for a broken harness too, and never by half a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Pytest = Callable[..., Any]
Impl = Callable[[str], str]


def test_a_run_writes_its_report(run: Pytest, impl: Impl, tmp_path: Path) -> None:
    page = tmp_path / "new" / "report.html"
    ended = run(impl("releases_again"), "--profile=lifecycle", "--depth=1", "--faults=none", f"--report={page}", "-q")
    assert ended.code == 1
    assert f"report: {page}" in ended.out
    text = page.read_text()
    assert 'id="fail-LC-03"' in text
    assert "not-conformant" in text
    assert not page.with_name("report.html.part").exists()


def test_a_harness_error_has_a_report(run: Pytest, impl: Impl, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    ended = run(impl("needs_torchless"), f"--report={page}")
    assert ended.code == 11
    assert "harness-error" in page.read_text()


def test_an_older_report_does_not_stand_for_a_wrong_run(run: Pytest, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text("old")
    assert run("--impl=no/such/file.py", f"--report={page}").code == 4
    assert not page.exists()


def test_a_report_that_cannot_be_written_is_one_line_before_anything_runs(run: Pytest, tmp_path: Path) -> None:
    ended = run("--impl=reference", f"--report={tmp_path}")
    assert ended.code == 4
    assert "--report must be writable" in ended.err
    assert ended.err.count("\n") == 1


def test_without_jinja2_it_says_what_to_install(run: Pytest, tmp_path: Path) -> None:
    """A package of that name that cannot be found: the finder of this process hides it."""
    (tmp_path / "hide.py").write_text(
        "import importlib.util as u\nfound = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'jinja2' else found(name, *more)\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ended = run("--impl=reference", "--report=r.html", "-p", "hide", env={"PYTHONPATH": path})
    assert ended.code == 4
    assert "--report needs jinja2: pip install 'colocert[report]'" in ended.err
    assert ended.err.count("\n") == 1

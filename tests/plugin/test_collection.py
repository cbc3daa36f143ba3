"""The plugin beside other people's configuration, and where nobody asked for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Pytest = Callable[..., Any]


Impl = Callable[[str], str]
Environment = Callable[..., dict[str, str]]


def test_a_conftest_may_name_the_plugin_too(run: Pytest, impl: Impl, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["colocert.plugin"]\n')
    assert run(impl("small"), "--depth=0").code == 10


def test_certify_is_not_touched_by_the_callers_configuration(
    impl: Impl, tmp_path: Path, environment: Environment
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\npython_files = check_*.py\naddopts = -k nothing --strict-config\n")
    command = [sys.executable, "-m", "colocert.cli", "certify", impl("small").removeprefix("--impl="), "--depth=6"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(PYTEST_ADDOPTS="-x"), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 10
    assert "10 not-exercised, 11 not-applicable" in done.stdout.splitlines()[-1]
    assert "narrowed" not in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pytest.ini"]


def test_a_package_is_found_where_the_command_is_given(run: Pytest, impl: Impl, tmp_path: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    source = Path(impl("small").removeprefix("--impl="))
    (package / "colocert_impl.py").write_text(source.read_text())
    assert run("--impl=mine", "--depth=0").code == 10


def test_nothing_of_the_kit_is_imported_without_impl(tmp_path: Path, environment: Environment) -> None:
    (tmp_path / "test_mine.py").write_text(
        "import sys\n"
        "def test_mine():\n"
        "    heavy = ['colocert.judge', 'colocert.suite.run', 'colocert.suite.items', 'torch', 'rich']\n"
        "    assert [name for name in heavy if name in sys.modules] == []\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout


def test_the_help_of_pytest_names_the_options(run: Pytest) -> None:
    shown = run("--help", "--impl=nowhere_to_be_found", suite=False)
    assert shown.code == 0
    assert "--fault-depth=N" in shown.out

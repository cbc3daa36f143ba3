"""`colocert selftest`: what is void, what is not run, and that nothing that ships is left out."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from colocert import cli_selftest
from colocert.cli import main
from colocert.rules.catalogue import profiles_with_rules
from colocert_fixtures import matrix, selftest
from colocert_fixtures.mutants.lifecycle import keeps_gradients, releases_twice
from colocert_fixtures.selftest import CORRECT, KILLED, NOT_RUN, VOID, Row
from colocert_reference.colocert_impl import implementation as reference

TASK = "mutant lifecycle keeps_gradients"


@pytest.fixture
def stands_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts something in the place of a fixture's module."""

    def put(name: str, module: object) -> None:
        real = importlib.import_module

        def imported(asked: str, package: str | None = None) -> Any:
            if asked != name:
                return real(asked, package)
            if isinstance(module, Exception):
                raise module
            return module

        monkeypatch.setattr(selftest.importlib, "import_module", imported)

    return put


KEEPS = "colocert_fixtures.mutants.lifecycle.keeps_gradients"


def test_every_mutant_and_variant_that_ships_is_a_task() -> None:
    tasks = list(selftest.tasks(profiles_with_rules()))
    kinds = Counter(task.split()[0] for task in tasks)
    assert kinds["mutant"] == sum(len(matrix.modules(profile)) for profile in profiles_with_rules())
    assert "variant reference" in tasks
    assert "variant tag_ledger" in tasks
    assert len(tasks) == len(set(tasks))


def test_a_mutant_is_killed_as_it_says_and_further_kills_are_shown() -> None:
    (row,) = selftest.run(TASK, ("lifecycle",))
    assert (row.outcome, row.rule, row.code) == (KILLED, "LC-01", "grads-kept")
    assert row.on
    assert "LC-02" in row.also


def test_a_mutant_without_a_defect_is_void(stands_in: Any) -> None:
    stands_in(KEEPS, SimpleNamespace(KILLED_BY=("LC-01", "grads-kept"), implementation=reference))
    (row,) = selftest.run(TASK, ("lifecycle",))
    assert (row.outcome, row.detail) == (VOID, "LC-01 did not find grads-kept")


def test_another_code_is_no_kill(stands_in: Any) -> None:
    wrong = SimpleNamespace(KILLED_BY=("LC-03", "never-released"), implementation=releases_twice.implementation)
    stands_in(KEEPS, wrong)
    (row,) = selftest.run(TASK, ("lifecycle",))
    assert row.outcome == VOID
    assert "LC-03 did not find never-released" in row.detail


def test_a_kill_that_nothing_explains_is_void(stands_in: Any) -> None:
    stands_in(
        KEEPS, SimpleNamespace(KILLED_BY=keeps_gradients.KILLED_BY, implementation=keeps_gradients.implementation)
    )
    (row,) = selftest.run(TASK, ("lifecycle",))
    assert row.outcome == VOID
    assert "LC-02 finds it too, which nothing explains" in row.detail


def test_what_needs_an_absent_package_is_not_run_by_name(stands_in: Any) -> None:
    stands_in(KEEPS, ModuleNotFoundError("No module named 'torch'", name="torch.nn"))
    (row,) = selftest.run(TASK, ("lifecycle",))
    assert (row.outcome, row.detail) == (NOT_RUN, "needs torch, which is not installed")


def test_what_has_no_factory_here_is_not_run_by_name(stands_in: Any) -> None:
    bare = SimpleNamespace(claims=reference.claims, name="bare")
    stands_in(KEEPS, SimpleNamespace(KILLED_BY=keeps_gradients.KILLED_BY, implementation=bare))
    (row,) = selftest.run(TASK, ("lifecycle",))
    assert row.outcome == NOT_RUN
    assert "no factory trainer here" in row.detail


def test_a_module_of_our_own_that_is_missing_is_no_excuse(stands_in: Any) -> None:
    stands_in(KEEPS, ModuleNotFoundError("No module named 'colocert.nothing'", name="colocert.nothing"))
    with pytest.raises(ModuleNotFoundError):
        selftest.run(TASK, ("lifecycle",))


def test_a_variant_has_a_row_for_each_profile_in_which_it_differs() -> None:
    rows = selftest.run("variant driver_of_plain_calls", ("lifecycle", "handoff"))
    assert [(row.profile, row.outcome) for row in rows] == [("handoff", CORRECT)]


def test_a_variant_that_a_rule_finds_fault_with_is_void(stands_in: Any) -> None:
    stands_in("colocert_fixtures.variants.tag_ledger", keeps_gradients)
    (row,) = selftest.run("variant tag_ledger", ("lifecycle",))
    assert row.outcome == VOID
    assert "LC-01 finds grads-kept on " in row.detail


def test_a_code_without_a_mutant_is_void() -> None:
    rows = [
        Row("mutant", "lifecycle", matrix.name(m), KILLED, *m.KILLED_BY)
        for m in matrix.modules("lifecycle")
        if m is not keeps_gradients
    ]
    (missing,) = selftest.uncovered(rows, ("lifecycle",))
    assert (missing.rule, missing.code, missing.outcome) == ("LC-01", "grads-kept", VOID)
    assert list(selftest.uncovered([*rows, Row("mutant", "lifecycle", "x", NOT_RUN)], ("lifecycle",))) == []


# ---- the command


def test_the_command_shows_a_table_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--profile=lifecycle", "--only=grad", "-n", "2"]) == 0
    captured = capsys.readouterr()
    shown = [line.split() for line in captured.out.splitlines()]
    assert ["keeps_gradients", "LC-01", "grads-kept", "killed"] in [row[:4] for row in shown]
    assert ["leaves_live_gradients", "correct"] in shown
    last = captured.out.splitlines()[-1]
    mutants = sum("grad" in matrix.name(m) for m in matrix.modules("lifecycle"))
    assert last.startswith(f"colocert selftest: {mutants} mutants: {mutants} killed; ")
    assert all(line.startswith("colocert: ") for line in captured.err.splitlines())


def test_a_fixture_that_takes_its_process_down_is_void(capsys: pytest.CaptureFixture[str]) -> None:
    """Here one that is not there. The others still run."""
    rows = list(cli_selftest._rows(["mutant lifecycle nowhere", TASK], ("lifecycle",), False, 1))
    assert [(row.profile, row.name, row.outcome) for row in rows] == [
        ("lifecycle", "nowhere", VOID),
        ("lifecycle", "keeps_gradients", KILLED),
    ]
    assert rows[0].detail.startswith("died: the process ended with exit code 1; its last line: ModuleNotFoundError")


def test_anything_void_is_1_and_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        Row("mutant", "lifecycle", "a", KILLED, "LC-01", "grads-kept", "lora-cycle"),
        Row("variant", "lifecycle", "b", VOID, detail="LC-01 finds grads-kept on lora-cycle"),
        Row("variant", "", "c", NOT_RUN, detail="needs torch, which is not installed"),
    ]
    monkeypatch.setattr(cli_selftest, "_rows", lambda *_: iter(rows))
    assert main(["selftest", "--only=x"]) == 1
    shown = capsys.readouterr().out
    assert "void: variant b (lifecycle): LC-01 finds grads-kept on lora-cycle\n" in shown
    assert shown.splitlines()[-1] == "colocert selftest: 1 mutants: 1 killed; 2 variants: 1 not-run, 1 void"


def test_nothing_that_ran_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--only=nothing_of_that_name"]) == 10
    assert "there is nothing of that name" in capsys.readouterr().out


@pytest.mark.parametrize("profile", ["sleeping", "alive"])
def test_a_profile_without_rules_is_one_line_and_4(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", f"--profile={profile}"]) == 4
    assert capsys.readouterr().err.count("\n") == 1


def test_missing_fixtures_are_one_line_and_4(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_selftest.importlib.util, "find_spec", lambda _: None)
    assert main(["selftest"]) == 4
    assert "colocert_fixtures must be installed" in capsys.readouterr().err


def test_the_kit_imports_its_fixtures_only_where_they_run() -> None:
    code = (
        "import sys, colocert.cli, colocert.plugin, colocert.record.child, colocert.suite.run, colocert.verify\n"
        "print([m for m in sys.modules if m.startswith(('colocert_fixtures', 'colocert_reference'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.slow
def test_the_teeth_of_the_lifecycle_are_all_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--profile=lifecycle", "-n", "2"]) == 0
    assert "void" not in capsys.readouterr().out

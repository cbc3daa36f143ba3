"""The controls: one inert implementation, one mutant a rule, and by name what could not run here."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from colocert.record import controls
from colocert.record.controls import GREEN, INERT, NOT_RUN, RED
from colocert.rules.catalogue import catalogue
from colocert_reference.colocert_impl import implementation as reference

LC_01 = "colocert_fixtures.mutants.lifecycle.keeps_gradients"


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, module: object) -> None:
    """What importing `name` gives: a module, or an error."""
    real = importlib.import_module

    def imported(asked: str, package: str | None = None) -> Any:
        if asked != name:
            return real(asked, package)
        if isinstance(module, Exception):
            raise module
        return module

    monkeypatch.setattr(controls.importlib, "import_module", imported)


@pytest.mark.parametrize("profile", ["lifecycle", "handoff", "group"])
def test_the_inert_one_is_red_in_every_profile_because_it_was_run(
    profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the profile's factory, and the scenarios give events."""
    rules = [rule for rule in catalogue().values() if rule.profile == profile]
    implementation = importlib.import_module(INERT).implementation
    judged = []
    real = controls._judged
    monkeypatch.setattr(controls, "_judged", lambda *a: judged.append(real(*a)) or judged[-1])
    (record,) = controls._inert(rules)
    assert (record.outcome, record.detail) == (RED, "passes no rule")
    assert hasattr(implementation, controls.FACTORIES[profile])
    assert any(result is not None for result in judged)


def test_a_mutant_is_found_out_by_its_rule_and_code() -> None:
    inert, mutant = controls.run(["LC-01"])
    assert (inert.name, inert.outcome) == ("inert", RED)
    assert (mutant.rule, mutant.outcome) == ("LC-01", RED)
    assert mutant.detail.startswith("found out on lora-")


def test_one_that_is_not_found_out_is_green(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "colocert_fixtures.mutants.lifecycle.always_resumes_for_training"
    module = SimpleNamespace(KILLED_BY=("LC-01", "grads-kept"), implementation=reference, __name__="a.harmless")
    stand_in(monkeypatch, name, module)
    _, mutant = controls.run(["LC-01"])
    assert (mutant.name, mutant.outcome) == ("harmless", GREEN)


def test_one_that_passes_by_doing_nothing_is_green(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, INERT, SimpleNamespace(implementation=reference))
    inert, _ = controls.run(["LC-01"])
    assert (inert.outcome, inert.detail) == (GREEN, "passes LC-01 by doing nothing")


def test_what_needs_an_absent_package_is_not_run_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here every mutant of a rule. Those of other rules run."""
    real = importlib.import_module

    def imported(asked: str, package: str | None = None) -> Any:
        module = real(asked, package)
        if getattr(module, "KILLED_BY", ("",))[0] == "LC-01":
            raise ModuleNotFoundError("No module named 'torch'", name="torch.nn")
        return module

    monkeypatch.setattr(controls.importlib, "import_module", imported)
    _, first, second = controls.run(["LC-01", "LC-03"])
    assert (first.outcome, first.detail) == (NOT_RUN, "needs torch, which is not installed")
    assert second.outcome == RED


def test_a_module_of_our_own_that_is_missing_is_no_excuse(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, LC_01, ModuleNotFoundError("No module named 'colocert.x'", name="colocert.x"))
    with pytest.raises(ModuleNotFoundError):
        controls.run(["LC-01"])


def test_a_mutant_without_its_factory_is_not_run_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = SimpleNamespace(name="bare", claims=reference.claims)
    name = "colocert_fixtures.mutants.lifecycle.always_resumes_for_training"
    stand_in(monkeypatch, name, SimpleNamespace(KILLED_BY=("LC-01", "grads-kept"), implementation=bare))
    _, mutant = controls.run(["LC-01"])
    assert (mutant.name, mutant.outcome) == ("bare", NOT_RUN)
    assert "no factory trainer here" in mutant.detail


def test_without_the_fixtures_every_control_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controls.importlib.util, "find_spec", lambda _: None)
    made = controls.run(["LC-01", "LC-03"])
    assert {(c.outcome, c.detail) for c in made} == {(NOT_RUN, "colocert_fixtures is not installed")}
    assert [c.rule for c in made] == ["", "LC-01", "LC-03"]

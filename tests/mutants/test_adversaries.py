"""What does nothing passes nothing, what lies is found out by LC-13, and what imports nothing of ours is judged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from colocert.judge import Evidence, judge
from colocert.record.drive import ProcessGone
from colocert.record.manifest import COMPLETE, DIED, HANG, Options
from colocert.record.registry import BY_ID
from colocert.record.runner import record
from colocert.rig.contract import Claims
from colocert_fixtures import adversaries
from colocert_fixtures.adversaries import exiter, inert, liar, minimal
from colocert_fixtures.judging import bound, judged, run

FOLDER = Path(adversaries.__file__).parent


def test_no_rule_passes_on_an_inert_driver() -> None:
    """What it fails is the only rule of the profile that it meets at all."""
    outcome = judged(inert.implementation, profile="handoff")
    assert {rule for rule, _ in outcome.exercised} == set(outcome.rules()) == {"HO-08"}


def test_no_rule_passes_on_an_inert_group() -> None:
    """It starts no rank, so there is nothing to judge."""
    outcome = judged(inert.implementation, profile="group")
    assert outcome.rules() == []
    assert outcome.exercised == {}


def test_no_rule_passes_on_an_inert_engine() -> None:
    """It releases nothing, so that EN-02 is not exercised, and answers whoever asks."""
    outcome = judged(inert.implementation, profile="engine")
    assert {rule for rule, _ in outcome.exercised} == set(outcome.rules()) == {"EN-01", "EN-04"}


def test_no_rule_passes_on_an_inert_trainer() -> None:
    """A bound rule either finds fault or is not exercised, in scenarios and in exploration."""
    outcome = judged(inert.implementation, depth=4, fault_depth=2)
    exercised = {
        rule for rule, code in outcome.exercised if (rule, code) in bound(Claims.of(inert.implementation.claims))
    }
    assert exercised <= set(outcome.rules())
    assert {"LC-01", "LC-03", "LC-09", "LC-10", "LC-21"} == set(outcome.rules())


def test_a_wrong_belief_is_found_after_a_refusal_and_nothing_else_is() -> None:
    """The liar moves memory as the reference does."""
    assert list(judged(liar.implementation).found) == [("LC-13", "belief-differs")]


def test_a_minimal_implementation_is_judged_and_has_no_fault() -> None:
    """Its source imports the standard library only."""
    assert "colocert" not in (FOLDER / "minimal.py").read_text()
    outcome = judged(minimal.implementation)
    assert outcome.found == {}
    assert {"LC-01", "LC-05", "LC-13", "LC-17"} <= {rule for rule, _ in outcome.exercised}


def test_an_exit_in_a_call_ends_the_scenario_and_is_in_the_trace() -> None:
    """`sys.exit(1)` is not an error that a trainer survives."""
    with pytest.raises(ProcessGone, match="SystemExit"):
        run(exiter.implementation, BY_ID["lora-cycle"])


@pytest.mark.parametrize(("name", "status"), [("crasher", -6), ("hard_exiter", 1)])
def test_the_process_ends_after_the_first_cycle(name: str, status: int) -> None:
    """Not before: the smoke stage passes."""
    code = (
        f"from colocert_fixtures.adversaries import {name} as it\n"
        "from colocert_fixtures.judging import run\n"
        "from colocert.record.registry import BY_ID, smoke\n"
        "from colocert.rig.contract import Claims\n"
        "run(it.implementation, smoke('lifecycle', Claims.of(it.implementation.claims)))\n"
        "print('smoke passed', flush=True)\n"
        "run(it.implementation, BY_ID['lora-cycle'])\n"
    )
    env = {"PYTHONPATH": ":".join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert (ended.stdout.strip(), ended.returncode) == ("smoke passed", status)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "status"), [("crasher", DIED), ("exiter", DIED), ("hard_exiter", DIED), ("hanger", HANG)]
)
def test_a_death_or_a_hang_after_the_first_cycle_costs_its_scenarios(
    name: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smoke stage passes; scenarios without a second step are complete; the verdict is not conformant."""
    monkeypatch.setattr("colocert.record.process.DEADLINE", 2.0)
    options = Options(profiles=("lifecycle",), depth=0, controls=False, workers=2)
    recorded = record(str(FOLDER / f"{name}.py"), tmp_path, options)
    assert recorded.problem is None
    assert {scenario.status for scenario in recorded.scenarios} == {COMPLETE, status}
    judged_here = judge(Evidence(tmp_path))
    assert (judged_here.verdict, judged_here.exit_code) == ("not-conformant", 1)


@pytest.mark.parametrize("name", ["crasher_at_import", "exiter_at_import", "hanger_at_import"])
def test_an_import_that_does_not_return_is_a_harness_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 11; nothing is judged."""
    monkeypatch.setattr("colocert.record.process.IMPORT_DEADLINE", 5.0)
    options = Options(profiles=("lifecycle",), depth=0, controls=False)
    recorded = record(str(FOLDER / f"{name}.py"), tmp_path, options)
    assert recorded.problem is not None
    assert recorded.problem.exit_code == 11
    assert recorded.scenarios == ()

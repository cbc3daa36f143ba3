"""When the controls of a run are run: beside its recording, or after it where they would share what is measured."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from colocert.record import process
from colocert.record.control_run import APART, ControlRun
from colocert.record.jobs import Answer, Job
from colocert.record.process import Lost
from colocert.record.registry import PATIENCE
from colocert.rules.catalogue import PROFILES

RED = Answer(body={"controls": [{"name": "inert", "rule": "", "code": "", "outcome": "red", "detail": ""}]})


class FakeChild:
    """Answers when it is let, or is lost when it is interrupted."""

    def __init__(self, log: Path) -> None:
        self.asked, self.may_answer = threading.Event(), threading.Event()
        self.interrupted = self.killed = False

    def ask(self, job: Job, deadline: float) -> Answer:
        self.job, self.deadline = job, deadline
        self.asked.set()
        assert self.may_answer.wait(10)
        if self.interrupted:
            raise Lost("died", "the process ended with signal SIGKILL")
        return RED

    def interrupt(self) -> None:
        self.interrupted = True
        self.may_answer.set()

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def controls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[ControlRun, Any]:
    made: list[FakeChild] = []
    monkeypatch.setattr(process, "ChildProcess", lambda log: made.append(FakeChild(log)) or made[-1])
    return ControlRun(tmp_path / "controls.txt"), made[0]


def test_beside_the_recording_where_a_profile_needs_nothing_but_its_process(controls: tuple[ControlRun, Any]) -> None:
    run, child = controls
    run.start(["LC-01"], ["lifecycle"])
    assert child.asked.wait(10)
    child.may_answer.set()
    said: list[str] = []
    assert [c.outcome for c in run.result(said.append)] == ["red"]
    assert said == ["running the controls"]


@pytest.mark.parametrize("profile", sorted(APART))
def test_after_the_recording_where_something_is_measured(controls: tuple[ControlRun, Any], profile: str) -> None:
    run, child = controls
    run.start(["LC-01", "XX-01"], ["lifecycle", profile])
    assert not child.asked.wait(0.2)
    child.may_answer.set()
    assert [c.outcome for c in run.result(lambda _: None)] == ["red"]
    assert child.job.rules == ("LC-01", "XX-01")
    assert child.deadline >= process.IMPORT_DEADLINE


def test_profiles_that_run_apart_exist_and_take_longer() -> None:
    assert set(PROFILES) > APART
    assert all(PATIENCE[profile] > 1 for profile in APART)


def test_a_run_that_ends_early_leaves_no_child(controls: tuple[ControlRun, Any]) -> None:
    run, child = controls
    run.start(["LC-01"], ["lifecycle"])
    run.close()
    assert child.interrupted
    assert child.killed
    assert [c.outcome for c in run.result(lambda _: None)] == ["green"]


def test_without_required_rules_nothing_is_asked(controls: tuple[ControlRun, Any]) -> None:
    run, child = controls
    run.start([], ["lifecycle"])
    assert run.result(lambda _: None) == ()
    assert not child.asked.is_set()

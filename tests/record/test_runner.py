"""The runner survives whatever an implementation does, and says what happened where."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from colocert.judge import Evidence, judge
from colocert.record.manifest import COMPLETE, DIED, HANG, Options, Record, read_record
from colocert.record.runner import record
from colocert.trace import read_trace
from colocert.trace.events import CallBegin

BASE = """
import os, signal, sys, time
from colocert_reference.colocert_impl import Reference, ReferenceTrainer

class Trainer(ReferenceTrainer):
    def update_weights(self):
        {body}

implementation = Reference(trainer=Trainer)
"""
OPTIONS = Options(profiles=("lifecycle",), depth=0, controls=False)


def run(tmp_path: Path, body: str, options: Options = OPTIONS) -> Record:
    file = tmp_path / "impl.py"
    file.write_text(BASE.format(body=body))
    return record(str(file), tmp_path / "evidence", options)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        pytest.param("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV", id="sigsegv"),
        pytest.param("os._exit(1)", "exit code 1", id="os-exit"),
        pytest.param("sys.exit(1)", "SystemExit", id="sys-exit"),
        pytest.param("print('last words', flush=True); os.abort()", "last words", id="abort"),
    ],
)
def test_a_death_costs_its_scenario(tmp_path: Path, body: str, says: str) -> None:
    result = run(tmp_path, body)
    assert result.problem is None
    status = {s.id: s for s in result.scenarios}
    assert status["lora-plain-cycle"].status == COMPLETE
    assert status["lora-sync-asleep"].status == DIED
    assert says in status["lora-sync-asleep"].detail
    last = list(read_trace(tmp_path / "evidence" / status["lora-sync-asleep"].trace))[-2:]
    assert any(isinstance(e, CallBegin) and e.method == "update_weights" for e in last)
    judged = judge(Evidence(tmp_path / "evidence"))
    assert judged.verdict == "not-conformant"
    assert {c.code for o in judged.rules for c in o.cases if c.scenario == "lora-sync-asleep" and c.code} == {DIED}


def test_a_hang_costs_its_scenario_and_its_grandchildren(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colocert.record.process.DEADLINE", 1.0)
    pid_file = tmp_path / "pid"
    body = (
        f"import subprocess; p = subprocess.Popen(['sleep', '600']); open({str(pid_file)!r}, 'a')"
        ".write(f'{p.pid} '); time.sleep(600)"
    )
    result = run(tmp_path, body)
    hung = {s.id for s in result.scenarios if s.status == HANG}
    assert "lora-sync-asleep" in hung
    assert "lora-plain-cycle" not in hung
    for pid in pid_file.read_text().split():
        assert not _alive(int(pid))


def _alive(pid: int) -> bool:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return False
        if state == "Z":
            return False
        time.sleep(0.05)
    return Path(f"/proc/{pid}").exists()


def test_a_death_in_exploration_names_the_sequence(tmp_path: Path) -> None:
    body = "self.n = getattr(self, 'n', 0) + 1\n        if self.n == 2: os._exit(7)"
    result = run(tmp_path, body, Options(profiles=("lifecycle",), depth=3, faults="none", controls=False))
    lora = next(e for e in result.explorations if e.id == "explore-lora")
    assert lora.status == DIED
    assert "exit code 7" in lora.detail
    assert "update_weights update_weights" in lora.detail
    judged = judge(Evidence(tmp_path / "evidence"))
    assert any(c.scenario == "explore-lora" and c.code == DIED for o in judged.rules for c in o.cases)


def test_a_death_in_the_first_cycle_is_a_problem_of_the_run(tmp_path: Path) -> None:
    file = tmp_path / "impl.py"
    file.write_text(BASE.format(body="pass") + "\nTrainer.wake_up = lambda self: os._exit(9)\n")
    result = record(str(file), tmp_path / "evidence", OPTIONS)
    assert result.problem is not None
    assert (result.problem.stage, result.problem.exit_code) == ("smoke", 11)
    assert judge(Evidence(tmp_path / "evidence")).verdict == "harness-error"


def test_the_number_of_children_changes_nothing_but_the_time(tmp_path: Path) -> None:
    options = Options(profiles=("lifecycle",), depth=2, fault_depth=2, controls=False)
    one = run(tmp_path, "super().update_weights()", options)
    two = record(one.impl, tmp_path / "two", Options(**{**_fields(options), "workers": 3}))
    assert [(s.id, s.status) for s in one.scenarios] == [(s.id, s.status) for s in two.scenarios]
    for scenario in one.scenarios:
        assert (tmp_path / "evidence" / scenario.trace).read_bytes() == (tmp_path / "two" / scenario.trace).read_bytes()
    assert judge(Evidence(tmp_path / "evidence")).rules == judge(Evidence(tmp_path / "two")).rules


def _fields(options: Options) -> dict[str, object]:
    return {name: getattr(options, name) for name in options.__struct_fields__}


def test_output_of_the_implementation_goes_to_a_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "print('chatter from the framework', flush=True)")
    assert "chatter" not in capfd.readouterr().out
    assert "chatter" in (tmp_path / "evidence" / "logs" / "child-0.txt").read_text()


def test_the_index_is_read_back_as_written(tmp_path: Path) -> None:
    result = run(tmp_path, "pass")
    assert read_record(tmp_path / "evidence") == result


def test_files_that_are_not_ours_survive_a_second_recording(tmp_path: Path) -> None:
    keep = tmp_path / "evidence" / "notes.txt"
    keep.parent.mkdir()
    keep.write_text("mine")
    run(tmp_path, "pass")
    assert keep.read_text() == "mine"


SLOW_IMPORT = """
import time
from colocert_reference.colocert_impl import Reference, ReferenceTrainer

imported = False

class Trainer(ReferenceTrainer):
    def __init__(self, rig):
        global imported
        if not imported:
            time.sleep(2)
        imported = True
        super().__init__(rig)

implementation = Reference(trainer=Trainer)
"""


def test_the_first_scenario_of_a_worker_may_take_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A factory imports its framework in the first scenario of its process; later ones have the plain deadline."""
    monkeypatch.setattr("colocert.record.process.DEADLINE", 1.0)
    (tmp_path / "impl.py").write_text(SLOW_IMPORT)
    options = Options(profiles=("lifecycle",), depth=0, controls=False, workers=2)
    result = record(str(tmp_path / "impl.py"), tmp_path / "evidence", options)
    assert result.problem is None
    assert {s.status for s in result.scenarios} == {COMPLETE}

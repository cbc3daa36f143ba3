"""The reference group over real Ray actors: two and four ranks that fail, hang, are killed and are replaced."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("ray")

from colocert.judge_trace import judge_events
from colocert.record.group_files import abandoned, shared_memory
from colocert.record.group_scenarios import GROUP_SCENARIOS
from colocert.record.registry import run
from colocert.record.scenarios import Scenario
from colocert.rig.group_rank import started_at
from colocert.rules.catalogue import catalogue
from colocert.trace import AnyEvent
from colocert.trace.events import CallEnd, CallRaise, Change
from colocert_reference.colocert_impl import CLAIMS
from colocert_reference.colocert_impl import implementation as reference

RULES = [rule for rule in catalogue().values() if rule.profile == "group"]
WITHIN = 12.0
"""Seconds for a call over a rank that died or hangs, with room for a busy machine."""

pytestmark = pytest.mark.slow


def scenario(*steps: str, ranks: int) -> Scenario:
    return Scenario("test", {"lora": True, "ranks": ranks}, steps, "", "group")


def recorded(made: Scenario) -> list[AnyEvent]:
    events: list[AnyEvent] = []
    run(reference, CLAIMS, made, events.append)
    return events


def group_calls(events: list[AnyEvent]) -> list[str]:
    return [
        f"{e.method} {e.error}" if isinstance(e, CallRaise) else e.method
        for e in events
        if isinstance(e, (CallEnd, CallRaise)) and e.actor == "group"
    ]


def closed(events: list[AnyEvent]) -> dict[str, list[str]]:
    (facts,) = (e.facts for e in events if isinstance(e, Change) and e.what == "group.closed")
    return facts


@pytest.fixture(autouse=True)
def nothing_is_left() -> Callable[[], None]:
    before = shared_memory()
    yield  # type: ignore[misc]
    assert abandoned(shared_memory() - before) == []


def test_ray_comes_with_the_factory_and_not_with_the_module() -> None:
    code = "import sys, colocert_reference.colocert_impl; sys.exit('ray' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env).returncode == 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_killed_rank_is_one_clear_error_in_time_and_nothing_is_left(ranks: int) -> None:
    started = time.monotonic()
    events = recorded(scenario("train", "plan 1 sleep killed", "offload", ranks=ranks))
    assert group_calls(events) == ["train", "offload GroupError", "close"]
    error = next(e for e in events if isinstance(e, CallRaise) and e.actor == "group")
    assert "1: RankLost" in error.detail
    assert closed(events) == {"processes": [], "shared_memory": []}
    assert judge_events(events, RULES).findings == ()
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_killed_rank_is_replaced_in_the_state_of_the_others(ranks: int) -> None:
    events = recorded(
        scenario("plan 1 sleep killed", "offload", "replace 1", "update_weights", "onload", "train", ranks=ranks)
    )
    assert group_calls(events) == ["offload GroupError", "replace", "update_weights", "onload", "train", "close"]
    judged = judge_events(events, RULES)
    assert judged.findings == ()
    assert set(judged.exercised["GR-03"]) == {"joins-in-another-state", "base-trusted", "old-connection-used"}


def test_the_error_lists_every_failed_rank() -> None:
    plans = ("plan 0 train before", "plan 2 train after", "plan 3 train killed")
    events = recorded(scenario(*plans, "train", ranks=4))
    error = next(e for e in events if isinstance(e, CallRaise) and e.actor == "group")
    named = next(e for e in events if isinstance(e, Change) and e.what == "group.raised")
    assert named.facts == {"ranks": [0, 2, 3]}
    assert all(told in error.detail for told in ("0: RankFault", "2: RankFault", "3: RankLost"))


def test_a_hanging_rank_is_an_error_within_the_deadline_and_its_process_ends() -> None:
    started = time.monotonic()
    events = recorded(scenario("plan 1 train hang", "train", "offload", ranks=2))
    assert group_calls(events) == ["train GroupError", "offload GroupError", "close"]
    assert closed(events)["processes"] == []
    assert time.monotonic() - started < WITHIN + 30


def test_every_scenario_of_the_profile_is_clean_and_every_code_is_exercised() -> None:
    exercised: set[tuple[str, str]] = set()
    for made in GROUP_SCENARIOS:
        result = judge_events(recorded(made), RULES)
        assert result.findings == (), made.id
        exercised |= {(rule, code) for rule, counts in result.exercised.items() for code in counts}
    assert exercised == {(rule.id, code.name) for rule in RULES for code in rule.codes}


ALIVE = """
import sys, time
from colocert_reference.real.ray_group import start_ray
start_ray()
import ray
@ray.remote(num_cpus=0)
class Actor:
    def pid(self):
        import os
        return os.getpid()
actor = Actor.remote()
print(ray.get(actor.pid.remote()), flush=True)
time.sleep({seconds})
"""


@pytest.mark.parametrize("killed", [False, True], ids=["ends", "is-killed"])
def test_ray_ends_with_the_process_that_started_it(killed: bool, tmp_path: Path) -> None:
    """Also where that process is killed: neither its Ray nor its files outlive it."""
    env = {**os.environ, "PYTHONPATH": ":".join(sys.path), "TMPDIR": "/tmp", "HOME": str(tmp_path)}
    before = set(Path("/tmp").glob("ray-*"))
    code = ALIVE.format(seconds=600 if killed else 0)
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    actor = int(process.stdout.readline())
    family = _session(process.pid) | {actor: started_at(actor)}
    if killed:
        process.kill()
    process.wait(timeout=60)
    end = time.monotonic() + 20
    while any(started_at(pid) == since and since for pid, since in family.items()) and time.monotonic() < end:
        time.sleep(0.1)
    assert [pid for pid, since in family.items() if since and started_at(pid) == since] == []
    while (left := set(Path("/tmp").glob("ray-*")) - before) and time.monotonic() < end:
        time.sleep(0.1)
    assert left == set()
    assert not (tmp_path / ".ray").exists()


def _session(leader: int) -> dict[int, int]:
    """The processes below this one, with when they were started."""
    parents: dict[int, int] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, waiting = {}, [leader]
    while waiting:
        below = [pid for pid, parent in parents.items() if parent == waiting[0] and pid not in found]
        waiting = waiting[1:] + below
        found |= {pid: started_at(pid) for pid in below}
    return found

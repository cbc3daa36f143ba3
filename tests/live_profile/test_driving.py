"""What a live session does with pairs that raise, end, hang or do not agree, and how it measures."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from colocert.judge import Evidence, judge
from colocert.record.drive import NotRun, ProcessGone, TrainerShapeError
from colocert.record.live import run_live
from colocert.record.manifest import Options
from colocert.record.registry import BY_ID
from colocert.record.runner import record
from colocert.rig import live_device
from colocert.rig.live_device import LiveDevice, NoLiveDevice, device_name
from colocert.rig.live_host import HostHeld, _read, host_held
from colocert.trace import AnyEvent
from colocert.trace.events import CallRaise, Change, LevelsSeen, ProcessEnded
from colocert_fixtures.adversaries.inert import InertPair
from colocert_reference.colocert_impl import CLAIMS

MIB = 1 << 20
on_the_stand_in = pytest.mark.usefixtures("stand_in")


def taken(pair: Callable[[Any], Any], *steps: str, scenario: str = "live-memory") -> list[AnyEvent]:
    """The events of these steps."""
    events: list[AnyEvent] = []
    implementation = SimpleNamespace(name="x", version="1", claims=CLAIMS, live=pair)
    run_live(implementation, CLAIMS, msgspec.structs.replace(BY_ID[scenario], steps=steps), events.append)
    return events


class Pair(InertPair):
    """One that has a process, which does as it is told."""

    def __init__(self, rig: Any) -> None:
        self.child = rig.process("engine", f"{__file__}:obey")
        self.child.listen(60)

    def close(self) -> None:
        self.child.tell("leave")

    def says(self, word: str) -> Any:
        self.child.tell(word)
        return self.child.listen(60)


def obey(stage: Any) -> None:
    stage.tell("here")
    while (word := stage.listen()) != "leave":
        if word == "exit":
            os._exit(7)
        if word == "hold":
            kept = [stage.device.alloc(None, False, 4 * MIB), b"\1" * (16 * MIB)]
            stage.tell(len(kept))


# ---- what a pair does


@on_the_stand_in
def test_levels_are_measured_from_outside() -> None:
    class Holds(Pair):
        def to_rollout(self) -> None:
            self.says("hold")

    first, then = (e for e in taken(Holds, "build plain", "rollout") if isinstance(e, LevelsSeen))
    assert (first.device, then.device) == ({"engine": 0}, {"engine": 4 * MIB})
    assert first.free - then.free == 4 * MIB
    assert 16 * MIB <= then.host["engine"] - first.host["engine"] <= 17 * MIB
    assert (then.files["engine"] - first.files["engine"], then.locked["engine"]) == (0, 0)


@on_the_stand_in
def test_a_process_that_ends_by_itself_has_died_with_its_code() -> None:
    class Exits(Pair):
        def to_rollout(self) -> None:
            self.says("exit")

    events: list[AnyEvent] = []
    implementation = SimpleNamespace(live=Exits)
    scenario = msgspec.structs.replace(BY_ID["live-memory"], steps=("build plain", "rollout"))
    with pytest.raises(ProcessGone, match=r"the engine process ended in to_rollout\(\) with vanished 7"):
        run_live(implementation, CLAIMS, scenario, events.append)
    (end,) = (e for e in events if isinstance(e, ProcessEnded))
    assert (end.owner, end.during) == ("engine", "to_rollout")


@on_the_stand_in
def test_no_process_of_a_pair_outlives_its_scenario() -> None:
    pids: list[int] = []

    class Forgets(Pair):
        def __init__(self, rig: Any) -> None:
            super().__init__(rig)
            pids.append(self.child.pid)

        def close(self) -> None: ...

    taken(Forgets, "build plain", "close", "build plain")
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@on_the_stand_in
def test_a_call_that_raises_ends_the_scenario_as_died() -> None:
    class Raises(InertPair):
        def __init__(self, rig: object) -> None: ...

        def to_training(self) -> None:
            raise ValueError("no")

    with pytest.raises(ProcessGone, match=r"to_training\(\) raised ValueError: no"):
        taken(Raises, "build plain", "training")


@on_the_stand_in
def test_a_pair_lacks_its_calls_in_one_line() -> None:
    with pytest.raises(TrainerShapeError, match=r"got object without train_step\(\)"):
        taken(lambda rig: object(), "build plain")


@on_the_stand_in
def test_coroutines_are_awaited() -> None:
    class Later(InertPair):
        def __init__(self, rig: object) -> None: ...

        async def train_step(self, batch: int, adapter: str = "", step: bool = True) -> float:
            return batch + 0.5

    events = taken(Later, "build plain", "train 3")
    assert [e.loss for e in events if hasattr(e, "loss")] == ["0x1.c000000000000p+1"]
    assert not [e for e in events if isinstance(e, CallRaise)]


# ---- what has to agree first


class Drawn(InertPair):
    """Losses and tokens that are never the same."""

    def __init__(self, rig: object) -> None: ...

    times = 0

    def count(self) -> int:
        type(self).times += 1
        return self.times

    def train_step(self, batch: int, adapter: str = "", step: bool = True) -> float:
        return float(self.count())

    def generate(self, prompt: object, seed: int, adapter: object) -> list[int]:
        return [self.count()]


@on_the_stand_in
@pytest.mark.parametrize(
    ("scenario", "why"),
    [("live-losses", "two runs without hand-offs must agree"), ("live-tokens", "two generations without a cycle")],
)
def test_what_does_not_agree_by_itself_is_not_run_by_name(scenario: str, why: str) -> None:
    with pytest.raises(NotRun, match=why):
        taken(Drawn, *BY_ID[scenario].steps, scenario=scenario)


# ---- the device


def test_a_device_of_another_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOCERT_DEVICE", "tpu")
    with pytest.raises(NoLiveDevice, match="must be host or cuda"):
        device_name()
    with pytest.raises(NotRun, match="must be host or cuda"):
        taken(lambda rig: object(), "build plain")


def test_without_the_device_a_scenario_is_not_run_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colocert.record.live.lacking", lambda name: f"device {name}: no compiler")
    events: list[AnyEvent] = []
    with pytest.raises(NotRun, match="device host: no compiler"):
        run_live(SimpleNamespace(live=None), CLAIMS, BY_ID["live-memory"], events.append)
    assert [e.facts for e in events if isinstance(e, Change)] == [{"reason": "device host: no compiler"}]


def test_a_device_that_nobody_has_used_is_free() -> None:
    device = LiveDevice("host", 64 * MIB)
    try:
        assert (device.free(), device.held([os.getpid()])) == (64 * MIB, {os.getpid(): 0})
        assert device.settled(lambda free: free == 64 * MIB) == 64 * MIB
    finally:
        device.close()


def test_freed_bytes_are_waited_for_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_device, "SETTLE", 0.1)
    device = LiveDevice("host", MIB)
    try:
        seen: list[int] = []
        device.settled(lambda free: bool(seen.append(free)))
        assert len(seen) > 1
    finally:
        device.close()


# ---- the host

SMAPS = textwrap.dedent("""\
    7f00-7f01 rw-p 00000000 00:00 0
    Pss:                  12 kB
    Anonymous:            12 kB
    Locked:                4 kB
    7f01-7f02 rw-s 00000000 00:01 5      /memfd:colocert-standin (deleted)
    Pss:                2048 kB
    Anonymous:             0 kB
    Locked:             2048 kB
    7f02-7f03 rw-s 00000000 00:01 6      /dev/shm/weights (deleted)
    Pss:                  64 kB
    Anonymous:             0 kB
    Locked:                0 kB
    7f03-7f04 r--s 00000000 08:01 7      /data/weights.bin
    Pss:                 512 kB
    Anonymous:             0 kB
    Locked:                0 kB
""")


def test_host_memory_is_what_no_file_on_disk_stands_behind() -> None:
    assert _read(SMAPS, 3) == HostHeld(host=76 << 10, locked=4 << 10, files=3, maps=3)


def test_a_process_that_is_gone_holds_nothing() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert host_held(child.pid) == HostHeld()
    assert host_held(os.getpid()).host > MIB


# ---- a run


@on_the_stand_in
@pytest.mark.slow
def test_a_pair_that_hangs_is_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first cycle it is the run's problem; its processes end with it."""
    monkeypatch.setattr("colocert.record.process.DEADLINE", 1.0)
    file = tmp_path / "hanging.py"
    file.write_text(
        textwrap.dedent("""\
        import time
        from colocert_fixtures.adversaries.inert import CLAIMS, InertPair

        class Pair(InertPair):
            def __init__(self, rig):
                rig.process("engine", "time:sleep")
            def to_rollout(self):
                time.sleep(600)

        class Implementation:
            name, version, claims = "hangs", "1", CLAIMS
            live = staticmethod(Pair)

        implementation = Implementation()
        """)
    )
    record(str(file), tmp_path / "e", Options(profiles=("live",)))
    judged = judge(Evidence(tmp_path / "e"))
    assert (judged.verdict, judged.exit_code) == ("harness-error", 11)
    assert "the first cycle of live hung" in judged.reasons[0]

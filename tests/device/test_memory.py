"""What the stand-in counts, refuses and gives back under the real saver; what a region does is in gpu_tests."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

pytest.importorskip("torch_memory_saver")

from colocert.device import Machine, ledger, run, start

from . import scenarios

MIB = 1 << 20


@pytest.mark.parametrize("tag", ["default", None])
def test_an_allocation_that_does_not_fit_is_refused_and_takes_nothing(tag: str | None) -> None:
    seen = run(scenarios.does_not_fit, machine=Machine(capacity=16 * MIB), tag=tag).expect()
    assert "returned 2" in seen["refused"]
    assert seen["free"] == [16 * MIB] * 3


@pytest.mark.parametrize("tag", ["default", None])
def test_a_machine_without_memory_for_the_stand_in_refuses_and_charges_nothing(tag: str | None) -> None:
    assert run(scenarios.machine_is_full, tag=tag).expect() == [1, 0, 4 * MIB]


@pytest.mark.parametrize(("sticky", "left"), [(False, 0), (True, 5 * MIB + 3)])
def test_host_bytes_are_counted_exactly_and_stay_where_pinned_memory_is_sticky(sticky: bool, left: int) -> None:
    seen = run(scenarios.figures, machine=Machine(sticky_pinned=sticky), sticky=sticky).expect()
    assert seen == {"paused": 5 * MIB + 3, "resumed": left, "peak": 6 * MIB, "own": 0}


class TestSharedDevice:
    """Several processes on one device of 1 GiB."""

    def test_the_memory_of_a_killed_process_comes_back(self, shared: Machine) -> None:
        assert shared.ledger is not None
        with start(scenarios.holds, machine=shared, nbytes=300 * MIB) as child:
            assert child.listen() == 300 * MIB
            assert ledger.read(shared.ledger).free == 724 * MIB
            child.kill()
            _until(lambda: ledger.read(shared.ledger or Path()).free == 1024 * MIB)
            assert run(scenarios.free_now, machine=shared).expect() == 1024 * MIB  # while a zombie
            assert child.wait().signal == "SIGKILL"

    def test_a_reused_pid_does_not_hold_the_memory_of_its_predecessor(self, shared: Machine) -> None:
        assert shared.ledger is not None
        with start(scenarios.holds, machine=shared, nbytes=300 * MIB) as child:
            child.listen()
            raw = bytearray(shared.ledger.read_bytes())
            raw[40:48] = (1).to_bytes(8, "little")  # the start time in the first slot
            shared.ledger.write_bytes(raw)
            assert ledger.read(shared.ledger).free == 1024 * MIB
            assert run(scenarios.free_now, machine=shared).expect() == 1024 * MIB

    def test_a_child_forked_before_the_first_allocation_has_a_slot_of_its_own(self, shared: Machine) -> None:
        assert run(scenarios.forks, machine=shared).expect() == [4 * MIB, 4 * MIB, 0, 0]

    def test_a_spawned_sibling_sees_the_same_device(self, shared: Machine) -> None:
        mine, siblings = run(scenarios.spawns, machine=shared).expect()
        assert mine == siblings == 1016 * MIB

    def test_one_device_has_one_capacity(self, shared: Machine) -> None:
        run(scenarios.nothing, machine=shared).expect()
        other = run(scenarios.nothing, machine=Machine(capacity=2 << 30, ledger=shared.ledger))
        assert (other.kind, other.signal) == ("signal", "SIGABRT")
        assert "COLOCERT_STANDIN_CAPACITY differs" in other.stderr


def _until(holds: object, seconds: float = 10.0) -> None:
    assert callable(holds)
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.01)

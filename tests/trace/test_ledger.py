"""The byte ledger counts what is on the device and on the host after every event."""

from __future__ import annotations

from colocert.trace import Ledger
from colocert.trace import events as ev

BASE = ev.SaverAlloc("default", "base", 100, True, "base")
GRADS = ev.SaverAlloc("grad_buffer", "grads", 40, False, "grads")


def ledger(*events: ev.Event) -> Ledger:
    made = Ledger()
    for event in events:
        made.apply(event)  # type: ignore[arg-type]
    return made


def test_allocations_are_device_bytes() -> None:
    made = ledger(BASE, GRADS)
    assert (made.device_bytes, made.host_bytes, made.peak_device_bytes) == (140, 0, 140)


def test_a_release_with_backup_moves_bytes_to_the_host() -> None:
    made = ledger(BASE, GRADS, ev.SaverPause("default", "base", 100, True, 1))
    assert (made.device_bytes, made.host_bytes) == (40, 100)
    assert made.released("default") is True
    assert made.released("grad_buffer") is False


def test_a_release_without_backup_costs_no_host_bytes() -> None:
    made = ledger(BASE, GRADS, ev.SaverPause("grad_buffer", "grads", 40, False, 1))
    assert (made.device_bytes, made.host_bytes) == (100, 0)


def test_a_cycle_ends_where_it_began_and_leaves_the_peaks() -> None:
    made = ledger(
        BASE,
        GRADS,
        ev.SaverPause("default", "base", 100, True, 1),
        ev.SaverResume("default", "base", 100, True, 2),
    )
    assert (made.device_bytes, made.host_bytes) == (140, 0)
    assert (made.peak_device_bytes, made.peak_host_bytes) == (140, 100)


def test_a_tag_whose_allocations_differ_is_neither() -> None:
    more = ev.SaverAlloc("default", "more", 1, True, "other")
    made = ledger(BASE, ev.SaverPause("default", "base", 100, True, 1), more)
    assert made.released("default") is None
    assert made.released("nothing") is None


def test_a_freed_allocation_gives_back_what_it_held() -> None:
    assert ledger(BASE, ev.SaverFree("default", "base", 100)).device_bytes == 0
    made = ledger(BASE, ev.SaverPause("default", "base", 100, True, 1), ev.SaverFree("default", "base", 100, True))
    assert (made.device_bytes, made.host_bytes, made.out) == (0, 0, set())


def test_events_that_move_nothing_leave_it_alone() -> None:
    made = ledger(BASE, ev.SaverResume("default", "base", 100, True, 1), ev.SaverPause("x", "unknown", 7, True, 2))
    assert (made.device_bytes, made.host_bytes) == (100, 0)

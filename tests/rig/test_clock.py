"""Remote calls on the virtual clock: each seed is one order, and time never really passes."""

from __future__ import annotations

import asyncio
import time

import pytest

from colocert.rig.clock import LONGEST_DELAY, Remote, VirtualClock


class Log:
    """Writes down what reached it."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> str:
        self.lines.append(line)
        return line

    async def later(self, line: str) -> str:
        await asyncio.sleep(100)
        return self.note(line)

    def fail(self) -> None:
        raise ValueError("no")


def order(seed: int, calls: int = 6) -> tuple[list[str], list[str]]:
    """The orders in which the calls of one seed take effect and are acknowledged."""
    clock, log = VirtualClock(seed), Log()
    acknowledged: list[str] = []
    handle = Remote(log, clock)

    async def all_of_them() -> None:
        tasks = [handle.note.remote(str(i)) for i in range(calls)]
        for task in tasks:
            task.add_done_callback(lambda t: acknowledged.append(t.result()))
        await asyncio.gather(*tasks)

    clock.run(all_of_them())
    clock.close()
    return log.lines, acknowledged


def test_a_seed_is_one_order_every_time() -> None:
    assert [order(seed) for seed in range(20)] == [order(seed) for seed in range(20)]


def test_seeds_differ_and_acknowledgements_have_an_order_of_their_own() -> None:
    orders = [order(seed) for seed in range(50)]
    assert len({tuple(effects) for effects, _ in orders}) > 40
    assert any(effects != acks for effects, acks in orders)
    assert all(sorted(effects) == sorted(acks) for effects, acks in orders)


def test_hours_pass_at_once() -> None:
    clock = VirtualClock(0)
    before = time.monotonic()
    clock.run(asyncio.sleep(10 * 3600))
    assert time.monotonic() - before < 5
    clock.close()


def test_a_call_is_under_way_once_issued_and_done_within_two_delays() -> None:
    clock, log = VirtualClock(3), Log()

    async def issue_and_look() -> list[int]:
        task = Remote(log, clock).note.remote("done")
        seen = [len(log.lines)]
        await asyncio.sleep(2 * LONGEST_DELAY)
        return [*seen, len(log.lines), int(task.done())]

    assert clock.run(issue_and_look()) == [0, 1, 1]
    clock.close()


def test_a_coroutine_is_run_to_its_end_and_an_error_comes_with_the_acknowledgement() -> None:
    clock, log = VirtualClock(0), Log()
    handle = Remote(log, clock)
    assert clock.run(handle.later.remote("much later")) == "much later"
    with pytest.raises(ValueError, match="no"):
        clock.run(handle.fail.remote())
    clock.close()


def test_closing_ends_what_nobody_awaited() -> None:
    clock, log = VirtualClock(0), Log()
    task = Remote(log, clock).later.remote("never")
    clock.close()
    assert (task.cancelled(), log.lines) == (True, [])


def test_a_method_that_does_not_exist_is_noticed_when_it_is_named() -> None:
    clock = VirtualClock(0)
    with pytest.raises(AttributeError, match="dance"):
        _ = Remote(Log(), clock).dance
    clock.close()

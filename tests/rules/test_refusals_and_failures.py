"""LC-13, LC-14: what is believed after a refusal, and where the next call gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Tell = Callable[..., Any]


def test_belief_is_judged_after_a_refusal_and_only_then(story: Tell) -> None:
    """A wrong belief at another time is not what the sentence is about."""
    tale = story()
    tale.believes(default=True)
    tale.quietly("wake_up").believes(default=True)
    assert (tale.found("LC-13"), tale.times("LC-13", "belief-differs")) == ([], 0)
    with tale.call("sleep", raises="SaverRefused"):
        tale.pause("grad_buffer").refused("pause", "default")
    tale.believes(default=True, grad_buffer=True)
    assert tale.found("LC-13") == ["belief-differs"]


def test_a_tag_that_is_not_named_is_not_judged(story: Tell) -> None:
    """Nor one whose allocations differ, nor one without any."""
    tale = story()
    with tale.call("sleep", raises="SaverRefused"):
        tale.refused("pause", "grad_buffer")
    tale.believes(weights=True)
    assert (tale.found("LC-13"), tale.times("LC-13", "belief-differs")) == ([], 0)


def test_a_trainer_that_refuses_for_lack_of_memory_is_held_to_the_same(story: Tell) -> None:
    """It raised while the device was full: no saver call was made."""
    tale = story()
    with tale.call("sleep"):
        tale.pause(None)
    tale.change("device.filled")
    with tale.call("wake_up", raises="OutOfDeviceMemory"):
        pass
    tale.believes(default=False)
    assert tale.found("LC-13") == ["belief-differs"]
    tale.change("device.relieved")
    with tale.call("wake_up"):
        tale.resume("default")
    assert tale.found("LC-13") == ["belief-differs", "still-due"]


def test_while_the_device_is_full_nothing_is_due_yet(story: Tell) -> None:
    """A second refusal is as good as the first."""
    tale = story()
    with tale.call("sleep"):
        tale.pause(None)
    tale.change("device.filled")
    for _ in range(2):
        with tale.call("wake_up", raises="OutOfDeviceMemory"):
            pass
    tale.change("device.relieved")
    with tale.call("wake_up"):
        tale.resume(None)
    assert (tale.found("LC-13"), tale.times("LC-13", "still-due")) == ([], 1)


def test_the_next_call_may_turn_round(story: Tell) -> None:
    """After a refused release `wake_up()` takes back what was released, once."""
    tale = story()
    with tale.call("sleep", raises="SaverRefused"):
        tale.pause("grad_buffer").refused("pause", "default")
    with tale.call("wake_up"):
        tale.resume("grad_buffer")
    assert [tale.found(rule) for rule in ("LC-13", "LC-14")] == [[], []]
    assert tale.times("LC-14", "stuck") == 1


def test_a_retry_that_starts_over_moves_memory_twice(story: Tell) -> None:
    """The saver ends the process there."""
    tale = story()
    with tale.call("sleep", raises="SaverRefused"):
        tale.pause("grad_buffer").refused("pause", "default")
    with tale.call("sleep", dies=True):
        tale.fatal("pause", "grad_buffer", "grads", "double-release")
    assert [tale.found(rule) for rule in ("LC-13", "LC-14")] == [["moved-twice"], ["moved-twice"]]


def test_an_exit_for_lack_of_memory_moves_nothing_twice(story: Tell) -> None:
    """It is the saver's other way to end the process."""
    tale = story()
    with tale.call("sleep"):
        tale.pause(None)
    with tale.call("wake_up", raises="SaverRefused"):
        tale.refused("resume", "default")
    with tale.call("wake_up", dies=True):
        tale.fatal("resume", "default", "base", "out-of-memory")
    assert [tale.found(rule) for rule in ("LC-13", "LC-14")] == [[], []]


def test_a_failure_outside_memory_is_lc_14_alone(story: Tell) -> None:
    """Nothing was refused."""
    tale = story()
    with tale.call("sleep", raises="InjectedFault"):
        tale.fault("clear_memory")
    tale.quietly("sleep")
    assert tale.found("LC-14") == ["stuck"]
    assert tale.found("LC-13") == []


def test_a_retry_that_raises_is_stuck_unless_it_keeps_live_gradients(story: Tell) -> None:
    """A refusal under LC-11 leaves the judgement to the call after it."""
    for live, found in ((False, ["stuck"]), (True, [])):
        tale = story(accumulate=2)
        with tale.call("sleep", raises="InjectedFault"):
            tale.fault("groups.destroy")
        with tale.call("train"):
            tale.step(consume=not live)
        with tale.call("sleep", raises="RuntimeError"):
            pass
        assert tale.found("LC-14") == found
        assert tale.times("LC-14", "stuck") == (0 if live else 1)

"""What counts as an occurrence: doing nothing is none, and neither is a repetition without anything to repeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Tell = Callable[..., Any]


def _cycle(tale: Any) -> None:
    with tale.call("sleep"):
        tale.pause("grad_buffer").pause("default")
    with tale.call("wake_up"):
        tale.resume("default").resume("grad_buffer").data("grads", "zero")


@pytest.mark.parametrize(("rule", "code"), [("LC-04", "saver-call"), ("LC-07", "resumed-while-resident")])
def test_staying_resident_counts_once_something_was_released(story: Tell, rule: str, code: str) -> None:
    """Until then every target state holds."""
    tale = story()
    tale.quietly("wake_up")
    assert tale.times(rule, code) == 0
    _cycle(tale)
    tale.quietly("wake_up")
    assert tale.times(rule, code) == 1


def test_a_saver_call_or_an_error_with_nothing_due_is_found_from_the_start(story: Tell) -> None:
    """The first call of all included."""
    for raises, code in (("", "saver-call"), ("RuntimeError", "raised")):
        tale = story()
        with tale.call("wake_up", raises=raises):
            if not raises:
                tale.resume("elsewhere")
        assert tale.found("LC-04") == [code]


def test_an_injected_fault_excuses_the_error(story: Tell) -> None:
    """Clearing memory may fail with nothing due."""
    tale = story()
    with tale.call("wake_up", raises="InjectedFault"):
        tale.fault("groups.create")
    assert tale.found("LC-04") == []


def test_computing_counts_once_something_was_released(story: Tell) -> None:
    """Before that there is nothing to touch."""
    tale = story()
    with tale.call("train"):
        tale.step()
    assert tale.times("LC-08", "computed-on-released") == 0
    _cycle(tale)
    with tale.call("train"):
        tale.step()
    assert tale.times("LC-08", "computed-on-released") == 3


def test_a_call_without_groups_counts_if_it_did_its_work(story: Tell) -> None:
    """Returning at once is no way to be fine without a group."""
    tale = story()
    tale.quietly("sleep")
    assert tale.times("LC-16", "raised-without-group") == 0
    _cycle(tale)
    assert tale.times("LC-16", "raised-without-group") == 2


def test_a_tagless_release_names_no_unknown_tag_and_counts(story: Tell) -> None:
    """A release was made."""
    tale = story()
    with tale.call("sleep"):
        tale.pause(None)
    assert (tale.found("LC-20"), tale.times("LC-20", "unknown-tag")) == ([], 1)


def test_an_unknown_tag_is_found_at_the_end_unless_it_is_used_later(story: Tell) -> None:
    """A rank may release before it allocates; it must not misspell."""
    tale = story()
    with tale.call("sleep"):
        tale.pause("grad_bufer")
    assert tale.found("LC-20") == ["unknown-tag"]


def test_a_partial_state_at_a_saver_call_is_an_occasion_for_a_tagless_one(story: Tell) -> None:
    """The first release of a sleep is none, the second is."""
    tale = story()
    with tale.call("sleep"):
        tale.pause("grad_buffer")
        assert tale.times("LC-05", "tagless-after-partial") == 0
        tale.pause("default")
    assert tale.times("LC-05", "tagless-after-partial") == 1


def test_drift_needs_a_state_seen_before(story: Tell) -> None:
    """The second cycle sets what the third is compared with."""
    tale = story()
    for cycle, times in enumerate((0, 0, 2, 4), 1):
        _cycle(tale)
        assert tale.times("LC-06", "drift") == times, cycle
    with tale.call("sleep"):
        tale.pause("default").pause("grad_buffer")
    assert tale.found("LC-06") == ["drift"]


def test_a_change_of_the_world_is_part_of_the_state(story: Tell) -> None:
    """A call on a full device is not compared with one on an empty one."""
    tale = story()
    for _ in range(3):
        _cycle(tale)
    with tale.call("sleep"):
        tale.pause("grad_buffer").pause("default")
    tale.change("device.filled")
    with tale.call("wake_up", raises="OutOfDeviceMemory"):
        pass
    assert tale.found("LC-06") == []


def test_refusal_is_due_where_offload_is_off(story: Tell) -> None:
    """LC-10 for sleep and wake-up, LC-21 for the early release; an effect before the error is another code."""
    tale = story(offload_train=False)
    tale.create()
    for method in ("sleep", "wake_up", "offload_grad_buffer"):
        with tale.call(method, raises="OffloadOff"):
            pass
    assert [tale.found(rule) for rule in ("LC-10", "LC-21", "LC-04")] == [[], [], []]
    assert tale.times("LC-10", "no-raise") == 2
    tale.quietly("sleep")
    with tale.call("wake_up", raises="OffloadOff"):
        tale.destroy()
    with tale.call("offload_grad_buffer", raises="OffloadOff"):
        tale.pause("grad_buffer")
    assert tale.found("LC-10") == ["no-raise", "effect-before-raise"]
    assert tale.found("LC-21") == ["effect-before-raise"]

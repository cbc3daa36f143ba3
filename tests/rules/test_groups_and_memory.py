"""LC-07, LC-08, LC-15, LC-16, LC-17, LC-19: groups, released regions, contents, parameters until they are sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Tell = Callable[..., Any]


def test_a_group_that_was_gone_is_owed_after_wake_up_at_its_next_use(story: Tell) -> None:
    """Whether it was rebuilt in `wake_up()` or at the use is the trainer's choice."""
    for alive, found in ((True, []), (False, ["groups-unusable"])):
        tale = story()
        tale.create()
        tale.change("groups.gone", groups=["data"])
        tale.quietly("wake_up")
        with tale.call("train"):
            if alive:
                tale.create()
            tale.use(alive=alive)
        assert tale.found("LC-07") == found
        assert tale.times("LC-07", "groups-unusable") == 1


def test_a_use_before_wake_up_is_owed_nothing(story: Tell) -> None:
    """The promise is made by `wake_up()`."""
    tale = story()
    tale.create()
    tale.change("groups.gone", groups=["data"])
    with tale.call("train", raises="GroupGone"):
        tale.use(alive=False)
    assert tale.found("LC-07") == []
    assert tale.found("LC-16") == []


def test_a_rebuilt_group_has_the_arguments_it_was_created_with(story: Tell) -> None:
    """Each one, and again after the second teardown."""
    tale = story()
    tale.create(options={"x": 1})
    for timeout, found in ((600, []), (1800, ["rebuilt-differently"])):
        with tale.call("sleep"):
            tale.destroy()
        with tale.call("wake_up"):
            tale.create(options={"x": 1}, timeout=timeout)
        assert tale.found("LC-16") == found


def test_a_torn_down_group_is_owed_to_training_not_to_the_sync(story: Tell) -> None:
    """While asleep nobody trains."""
    tale = story()
    tale.create()
    with tale.call("sleep"):
        tale.destroy()
    with tale.call("update_weights", raises="GroupGone"):
        tale.use(alive=False)
    assert tale.found("LC-16") == []
    with tale.call("train", raises="GroupGone"):
        tale.use(alive=False)
    assert tale.found("LC-16") == ["not-rebuilt"]


def test_an_early_release_is_undone_by_wake_up_and_by_training(story: Tell) -> None:
    """Training may refuse instead."""
    for method, raises, undone, found in (
        ("wake_up", "", True, []),
        ("wake_up", "", False, ["early-release-left"]),
        ("train", "", True, []),
        ("train", "RuntimeError", False, []),
        ("train", "", False, ["trained-released"]),
    ):
        tale = story()
        with tale.call("offload_grad_buffer"):
            tale.pause("grad_buffer")
        with tale.call(method, raises=raises):
            if undone:
                tale.resume("grad_buffer").data("grads", "zero")
        assert tale.found("LC-08") == found, (method, raises, undone)


def test_a_touch_of_released_memory_is_lc_08_in_training_and_lc_15_anywhere(story: Tell) -> None:
    """It ends the process."""
    for method, found in (("train", ["computed-on-released"]), ("update_weights", [])):
        tale = story()
        with tale.call("sleep"):
            tale.pause(None)
        with tale.call(method, dies=True):
            tale.touch("base")
        assert tale.found("LC-08") == found
        assert tale.found("LC-15") == ["read-in-released"]


def test_training_may_change_what_is_backed_up_and_a_cycle_may_not(story: Tell) -> None:
    """Also where training itself wakes up."""
    tale = story()
    with tale.call("sleep"):
        tale.pause(None)
    with tale.call("train"):
        tale.resume(None).step().data("optimizer", "overwrite")
    tale.quietly("wake_up")
    assert tale.found("LC-17") == []
    with tale.call("sleep"):
        tale.pause(None)
    with tale.call("wake_up"):
        tale.resume(None).data("optimizer", "overwrite")
    assert tale.found("LC-17") == ["content-changed"]


def test_an_allocation_that_comes_back_elsewhere_is_found(story: Tell) -> None:
    """Without backup too."""
    tale = story()
    with tale.call("sleep"):
        tale.pause(None)
    with tale.call("wake_up"):
        tale.resume("default").resume("grad_buffer", address=7)
    assert "address-changed" in tale.found("LC-17")


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_parameters_stay_until_sent_where_they_are_owed(story: Tell, role: str) -> None:
    """A critic owes nobody."""
    tale = story(lora=False, rematerialize=True, role=role)
    with tale.call("sleep"):
        tale.pause("grad_buffer").pause("param_buffer").pause("default")
    assert tale.found("LC-19") == (["params-released-early"] if role == "actor" else [])


def test_parameters_leave_once_they_are_sent_asleep_and_stay_if_awake(story: Tell) -> None:
    """A sync while awake releases nothing; the sleep that follows still owes the next sync."""
    tale = story(lora=False, rematerialize=True)
    with tale.call("update_weights"):
        tale.send()
    with tale.call("sleep"):
        tale.pause("grad_buffer").pause("default")
    assert (tale.found("LC-19"), tale.times("LC-19", "params-kept")) == ([], 0)
    with tale.call("update_weights"):
        tale.send()
    assert tale.found("LC-19") == ["params-kept"]


def test_after_a_failed_send_the_retry_succeeds(story: Tell) -> None:
    """Or it is unreachable."""
    for raises, found in (("", []), ("RuntimeError", ["unreachable"])):
        tale = story(lora=False, rematerialize=True)
        with tale.call("sleep"):
            tale.pause("grad_buffer").pause("default")
        with tale.call("update_weights", raises="InjectedFault"):
            tale.fault("send")
        with tale.call("update_weights", raises=raises):
            if not raises:
                tale.send().pause("param_buffer")
        assert tale.found("LC-19") == found
        assert tale.times("LC-19", "unreachable") == 1

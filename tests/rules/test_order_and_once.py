"""LC-01 … LC-03, LC-05, LC-09: order, once, and calls without a tag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Tell = Callable[..., Any]


def test_a_tagless_release_takes_both_regions_together(story: Tell) -> None:
    """One saver call is neither before nor after itself."""
    tale = story()
    with tale.call("sleep"):
        tale.pause(None)
    with tale.call("wake_up"):
        tale.resume(None)
    for rule, code in (("LC-01", "grads-after-default"), ("LC-02", "grads-before-default")):
        assert tale.found(rule) == []
        assert tale.times(rule, code) == 1


def test_default_before_gradients_is_found_in_sleep_only(story: Tell) -> None:
    """An early release belongs to another call: nothing is out of order then."""
    tale = story()
    with tale.call("sleep"):
        tale.pause("default").pause("grad_buffer")
    assert tale.found("LC-01") == ["grads-after-default"]
    early = story()
    with early.call("offload_grad_buffer"):
        early.pause("grad_buffer")
    with early.call("sleep"):
        early.pause("default")
    assert early.found("LC-01") == []
    assert early.times("LC-01", "grads-after-default") == 0


def test_what_is_claimed_resident_is_not_due(story: Tell) -> None:
    """Gradients, or adapters inside `default`."""
    for claim, kept in (("grads", "grads"), ("adapters", "adapter")):
        tale = story(claims={"resident_while_released": [claim]})
        with tale.call("sleep"):
            for tag in ("grad_buffer", "default"):
                names = [n for n, a in tale.allocations.items() if a[0] == tag and n != kept]
                if names:
                    tale.pause(tag, *names)
        assert tale.found("LC-01") == []
        assert tale.times("LC-01", "default-kept") == 1


def test_a_move_there_and_back_within_a_call_is_a_second_move(story: Tell) -> None:
    """The net effect is right, the call is not."""
    tale = story()
    with tale.call("sleep"):
        tale.pause("default").resume("default").pause("grad_buffer").pause("default")
    assert "released-twice" in tale.found("LC-01")


def test_a_sleep_that_was_refused_half_way_is_no_cycle(story: Tell) -> None:
    """`wake_up()` owes nothing for gradients that a failed `sleep()` never released."""
    tale = story()
    with tale.call("sleep", raises="SaverRefused"):
        tale.refused("pause", "grad_buffer").pause("default")
    with tale.call("wake_up"):
        tale.resume("default")
    assert tale.found("LC-02") == []
    complete = story()
    with complete.call("sleep"):
        complete.pause("default")
    with complete.call("wake_up"):
        complete.resume("default")
    assert complete.found("LC-02") == ["grads-not-resumed"]


def test_the_window_of_an_early_release_closes_with_sleep_wake_up_or_train(story: Tell) -> None:
    """Two releases are one too many only within one window."""
    tale = story()
    for last in ("wake_up", "train"):
        with tale.call("offload_grad_buffer"):
            tale.pause("grad_buffer")
        with tale.call(last):
            tale.resume("grad_buffer")
    assert (tale.found("LC-03"), tale.times("LC-03", "never-released")) == ([], 0)
    with tale.call("offload_grad_buffer"):
        tale.pause("grad_buffer")
    tale.quietly("offload_grad_buffer")
    with tale.call("sleep"):
        tale.pause("default")
    assert (tale.found("LC-03"), tale.times("LC-03", "never-released")) == ([], 1)


def test_an_early_release_that_neither_call_makes_is_found_at_sleep(story: Tell) -> None:
    """But not where the gradients were out before: there was nothing to share."""
    tale = story()
    tale.quietly("offload_grad_buffer")
    with tale.call("sleep"):
        tale.pause("default")
    assert tale.found("LC-03") == ["never-released"]
    late = story()
    with late.call("sleep"):
        late.pause(None)
    late.quietly("offload_grad_buffer", "sleep")
    assert (late.found("LC-03"), late.times("LC-03", "never-released")) == ([], 0)


def test_a_second_release_ends_the_process_inside_the_window(story: Tell) -> None:
    """The saver's exit is the finding; nothing can follow it."""
    tale = story()
    with tale.call("offload_grad_buffer"):
        tale.pause("grad_buffer")
    with tale.call("sleep", dies=True):
        tale.fatal("pause", "grad_buffer", "grads", "double-release")
    assert tale.found("LC-03") == ["released-again"]
    assert tale.found("LC-05") == ["double-release"]


def test_a_tagless_call_is_partial_by_what_was_out_when_it_was_made(story: Tell) -> None:
    """By the time it ends the process, the allocations before the offending one have moved."""
    tale = story()
    with tale.call("offload_grad_buffer"):
        tale.pause("grad_buffer")
    with tale.call("sleep", dies=True):
        tale.pause(None, "base", "adapter", "optimizer").ends_at("grads", "double-release")
    assert tale.found("LC-05") == ["tagless-after-partial"]
    complete = story()
    with complete.call("sleep"):
        complete.pause(None)
    with complete.call("sleep", dies=True):
        complete.fatal("pause", None, "base", "double-release")
    assert complete.found("LC-05") == ["double-release"]


def test_faults_excuse_illegal_transitions_from_lc_05_alone(story: Tell) -> None:
    """What a trainer makes of a failure is judged by LC-13 and LC-14."""
    tale = story()
    with tale.call("sleep", raises="SaverRefused"):
        tale.refused("pause", "grad_buffer")
    with tale.call("sleep", dies=True):
        tale.pause("grad_buffer").fatal("pause", "grad_buffer", "grads", "double-release")
    assert tale.found("LC-05") == []
    assert tale.found("LC-13") == ["moved-twice"]
    assert tale.found("LC-14") == ["moved-twice"]


def test_without_lora_a_rematerialising_actor_keeps_its_parameters_and_a_critic_does_not(story: Tell) -> None:
    """A critic syncs with nobody."""
    for role, found in (("actor", []), ("critic", ["kept"])):
        tale = story(lora=False, rematerialize=True, role=role)
        with tale.call("sleep"):
            tale.pause("grad_buffer").pause("default")
        assert tale.found("LC-09") == found

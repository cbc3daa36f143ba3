"""LC-11, LC-12, LC-22: what live gradients are, what keeps them, and what may not be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Tell = Callable[..., Any]


def _accumulated(story: Tell, **config: Any) -> Any:
    tale = story(accumulate=2, **config)
    with tale.call("train"):
        tale.step(consume=False)
    return tale


def test_gradients_that_come_back_as_they_were_survive(story: Tell) -> None:
    """Judged by content at the first write after the resume."""
    tale = _accumulated(story)
    kept = tale.contents["grads"]
    with tale.call("sleep"):
        tale.data("grads", "read").pause(None)
    with tale.call("wake_up"):
        tale.resume(None).data("grads", "overwrite", kept)
    assert (tale.found("LC-11"), tale.times("LC-11", "gradients-lost")) == ([], 1)
    assert tale.found("LC-12") == []


@pytest.mark.parametrize(("how", "content"), [("zero", "zero"), ("overwrite", "#other"), ("accumulate", "#more")])
def test_gradients_that_come_back_otherwise_are_lost(story: Tell, how: str, content: str) -> None:
    """Zeroed, overwritten with something else, or accumulated on top of what the pages held."""
    tale = _accumulated(story)
    with tale.call("sleep"):
        tale.pause(None)
    with tale.call("wake_up"):
        tale.resume(None).data("grads", how, content)
    assert tale.found("LC-11") == ["gradients-lost"]


def test_restored_gradients_are_live_again(story: Tell) -> None:
    """A second release has to keep them too."""
    tale = _accumulated(story)
    kept = tale.contents["grads"]
    for _ in range(2):
        with tale.call("sleep"):
            tale.pause(None)
        with tale.call("wake_up"):
            tale.resume(None).data("grads", "overwrite", kept)
    assert (tale.found("LC-11"), tale.times("LC-11", "gradients-lost")) == ([], 2)
    with tale.call("sleep"):
        tale.pause(None)
    with tale.call("wake_up"):
        tale.resume(None).data("grads", "zero")
    assert tale.found("LC-11") == ["gradients-lost"]


def test_consumed_gradients_are_dead(story: Tell) -> None:
    """Zeroing them after a resume loses nothing."""
    tale = story()
    with tale.call("train"):
        tale.step()
    with tale.call("sleep"):
        tale.pause(None)
    with tale.call("wake_up"):
        tale.resume(None).data("grads", "zero")
    assert (tale.found("LC-11"), tale.times("LC-11", "gradients-lost")) == ([], 1)


@pytest.mark.parametrize("raises", ["", "RuntimeError"])
def test_live_gradients_may_be_kept_by_raising_or_by_leaving_them(story: Tell, raises: str) -> None:
    """Neither LC-01 nor LC-03 asks for their release; LC-11 counts it for a trainer that releases at all."""
    tale = story(accumulate=2)
    with tale.call("sleep"):
        tale.pause(None)
    with tale.call("wake_up"):
        tale.resume(None).data("grads", "zero")
    with tale.call("train"):
        tale.step(consume=False)
    with tale.call("offload_grad_buffer", raises=raises):
        pass
    with tale.call("sleep", raises=raises):
        if not raises:
            tale.pause("default")
    with tale.call("wake_up"):
        if not raises:
            tale.resume("default")
    assert [tale.found(rule) for rule in ("LC-01", "LC-02", "LC-03", "LC-11")] == [[], [], [], []]
    assert tale.times("LC-11", "gradients-lost") == 2
    assert tale.times("LC-01", "grads-kept") == 1


def test_gradients_of_a_step_that_raised_bind_nobody(story: Tell) -> None:
    """They may be dropped, and they may be kept."""
    for kept in (True, False):
        tale = story(accumulate=2)
        with tale.call("train", raises="InjectedFault"):
            tale.step(consume=False).fault("train", "after")
        with tale.call("sleep"):
            tale.pause("default" if kept else None)
        with tale.call("wake_up"):
            tale.resume("default" if kept else None)
            if not kept:
                tale.data("grads", "zero")
        assert [tale.found(rule) for rule in ("LC-01", "LC-02", "LC-11")] == [[], [], []]


def test_one_live_buffer_excuses_its_whole_region(story: Tell) -> None:
    """The saver cannot release one allocation of a tag."""
    tale = story(multi_lora=True)
    with tale.call("train"):
        tale.step("grads.a", consume=False)
    with tale.call("sleep"):
        tale.pause("default")
    assert tale.found("LC-01") == []


def test_with_several_adapters_the_copy_precedes_the_release(story: Tell) -> None:
    """LC-22 looks at the copy, LC-11 at what comes back."""
    for copied, found in ((True, []), (False, ["released-without-copy"])):
        tale = story(multi_lora=True)
        with tale.call("train"):
            tale.step("grads.a", consume=False)
        kept = tale.contents["grads.a"]
        with tale.call("sleep"):
            if copied:
                tale.data("grads.a", "read")
            tale.pause(None)
        with tale.call("wake_up"):
            tale.resume(None).data("grads.a", "overwrite", kept)
        assert tale.found("LC-22") == found
        assert tale.found("LC-11") == []


def test_a_copy_of_older_gradients_is_none(story: Tell) -> None:
    """Another step has changed them since."""
    tale = story(multi_lora=True)
    with tale.call("train"):
        tale.step("grads.a", consume=False).data("grads.a", "read")
    with tale.call("train"):
        tale.data("grads.a", "accumulate")
    with tale.call("sleep"):
        tale.pause(None)
    assert tale.found("LC-22") == ["released-without-copy"]


@pytest.mark.parametrize(
    ("how", "found"), [("read", 1), ("accumulate", 1), ("consume", 1), ("zero", 0), ("overwrite", 0)]
)
def test_resumed_content_without_backup_is_written_first(story: Tell, how: str, found: int) -> None:
    """Only the first work after the resume is judged, and never that on backed-up memory."""
    tale = story()
    with tale.call("sleep"):
        tale.pause(None)
    with tale.call("wake_up"):
        tale.resume(None).data("base", "read").data("grads", how).data("grads", "read")
    assert tale.found("LC-12") == ["stale-read"] * found
    assert tale.times("LC-12", "stale-read") == 1


def test_writing_poison_back_is_no_write(story: Tell) -> None:
    """What was read after a resume is not content."""
    tale = story()
    with tale.call("sleep"):
        tale.pause(None)
    with tale.call("wake_up"):
        tale.resume(None).data("grads", "overwrite", "poison")
    assert tale.found("LC-12") == ["stale-read"]

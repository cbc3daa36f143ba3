"""The live folds at their edges, on stories told event by event. No device, no torch."""

from __future__ import annotations

from typing import Any

import pytest

from colocert.judge import TraceJudged, judge_events
from colocert.rules.catalogue import catalogue
from colocert.rules.live import FLAT, HANDLES_FLAT
from colocert.trace import AnyEvent
from colocert.trace.events import (
    CallBegin,
    CallEnd,
    ClaimsStated,
    Config,
    LevelsSeen,
    LossSeen,
    ProcessEnded,
    RunBegan,
    StateSeen,
    TagsMoved,
    TokensSeen,
)
from colocert_reference.colocert_impl import CLAIMS

MIB = 1 << 20
GRANULE = 2 * MIB
TRAINER = {"grad_buffer": [8 * MIB], "default": [16 * MIB, MIB]}
ENGINE = {"weights": [16 * MIB], "kv_cache": [8 * MIB]}


class Story:
    """Events in order, and what a rule makes of them."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []
        self.tell(Config({"lora": True}), ClaimsStated(CLAIMS.facts()))

    def tell(self, *events: AnyEvent) -> Story:
        for event in events:
            event.seq = len(self.events) + 1
            self.events.append(event)
        return self

    def release(self, of: str, stated: dict[str, list[int]], freed: int) -> Story:
        return self.tell(TagsMoved("release", of, stated, 0, freed, GRANULE))

    def levels(self, when: str, free: int = 0, **host: Any) -> Story:
        return self.tell(LevelsSeen(when, free, host={"trainer": 0, **host}))

    def judged(self, rule: str) -> TraceJudged:
        return judge_events(self.events, [catalogue()[rule]])

    def found(self, rule: str) -> list[str]:
        return [finding.code for finding in self.judged(rule).findings]

    def met(self, rule: str) -> set[str]:
        return set(self.judged(rule).exercised[rule])


# ---- LV-01


@pytest.mark.parametrize(
    ("freed", "codes"),
    [
        (17 * MIB - 1, ["not-released"]),
        (17 * MIB, []),
        (18 * MIB, []),
        (18 * MIB + 1, ["other-bytes"]),
    ],
)
def test_a_release_frees_what_its_tag_holds_up_to_whole_granules(freed: int, codes: list[str]) -> None:
    assert Story().release("trainer", {"default": [16 * MIB, MIB]}, freed).found("LV-01") == codes


def test_a_tag_that_holds_nothing_as_stated_is_judged_on_nothing_else() -> None:
    story = Story().release("trainer", {"default": [], "grad_buffer": [MIB]}, 0)
    assert story.found("LV-01") == ["tag-empty"]


def handed(used_in_rollout: int, used_in_training: int) -> Story:
    """A hand-off and back: bytes in use beyond those of the first training phase."""
    story = Story().release("trainer", TRAINER, 26 * MIB).release("engine", ENGINE, 24 * MIB)
    story.levels("training", 100 * MIB).levels("rollout", 100 * MIB - used_in_rollout)
    return story.levels("training", 100 * MIB - used_in_training)


@pytest.mark.parametrize(
    ("rollout", "training", "codes"),
    [
        (-2 * MIB, 0, []),
        (-MIB, 0, []),  # a granule more or less is the allocator's
        (0, 0, ["kept-at-hand-off"]),
        (-2 * MIB, MIB, ["kept-at-hand-off"]),
    ],
)
def test_a_hand_off_changes_what_is_in_use_by_what_the_tags_hold(rollout: int, training: int, codes: list[str]) -> None:
    """25 MiB of the trainer go, or 26 in granules; 24 of the engine come."""
    assert handed(rollout, training).found("LV-01") == codes


def test_a_process_that_the_saver_ended_for_want_of_room_did_not_fit() -> None:
    story = Story().tell(ProcessEnded("out-of-memory", "to_rollout", owner="engine"))
    assert story.found("LV-01") == ["does-not-fit"]
    assert Story().tell(ProcessEnded("SIGKILL", "to_rollout", owner="engine")).found("LV-01") == []


@pytest.mark.parametrize(("less", "codes"), [(FLAT, []), (FLAT + 1, ["device-grows"])])
def test_free_bytes_are_flat_over_ninety_cycles(less: int, codes: list[str]) -> None:
    story = Story().levels("settled", 100 * MIB).levels("flat", 100 * MIB - less)
    assert (story.found("LV-01"), story.met("LV-01")) == (codes, {"device-grows"})


# ---- LV-02


def losses(*runs: tuple[str, str], **states: dict[str, str]) -> Story:
    """Runs of losses on batches 0 1 0 1, a letter a loss."""
    story = Story()
    for number, (kind, told) in enumerate(runs, 1):
        story.tell(RunBegan(number, kind))
        story.tell(*(LossSeen(n % 2, letter) for n, letter in enumerate(told)))
        story.tell(StateSeen("fingerprint", states.get(f"run{number}", {"active": "actor"})))
    return story


PLAIN = ("plain", "abcd")


@pytest.mark.parametrize(
    ("told", "codes"),
    [
        ("abcd", []),
        ("abce", ["losses-differ"]),
        ("abad", ["losses-differ", "optimizer-detached"]),
    ],
)
def test_losses_with_hand_offs_are_those_without(told: str, codes: list[str]) -> None:
    assert losses(PLAIN, PLAIN, ("hand-offs", told)).found("LV-02") == codes


@pytest.mark.parametrize("runs", [[PLAIN], [PLAIN, ("plain", "abce")], [("plain", "abab"), ("plain", "abab")]])
def test_runs_that_do_not_agree_or_do_not_train_show_nothing(runs: list[tuple[str, str]]) -> None:
    story = losses(*runs, ("hand-offs", "xxxx"))
    assert (story.found("LV-02"), story.met("LV-02")) == ([], set())


def test_what_differs_between_runs_by_itself_is_not_logical_state() -> None:
    states = {"run1": {"a": "1", "pid": "7"}, "run2": {"a": "1", "pid": "8"}}
    same = losses(PLAIN, PLAIN, ("hand-offs", "abcd"), **states, run3={"a": "1", "pid": "9"})
    assert (same.found("LV-02"), "state-differs" in same.met("LV-02")) == ([], True)
    other = losses(PLAIN, PLAIN, ("hand-offs", "abcd"), **states, run3={"a": "2", "pid": "9"})
    assert other.found("LV-02") == ["state-differs"]


# ---- LV-03


def tokens(**asked: list[int]) -> Story:
    return Story().tell(*(TokensSeen(when.replace("_", "-"), [1], 7, told, "policy") for when, told in asked.items()))


TRAINED = {"trained": [1, 2], "trained_again": [1, 2]}


def test_tokens_are_compared_over_a_cycle_and_with_the_untrained_ones() -> None:
    good = tokens(untrained=[0], untrained_cycled=[0], **TRAINED, trained_cycled=[1, 2])
    assert (good.found("LV-03"), good.met("LV-03")) == ([], {"tokens-differ", "delta-not-served"})
    assert tokens(**TRAINED, trained_cycled=[1, 3]).found("LV-03") == ["tokens-differ"]
    assert tokens(untrained=[0], untrained_cycled=[5], **TRAINED).found("LV-03") == ["tokens-differ"]
    assert tokens(untrained=[1, 2], **TRAINED).found("LV-03") == ["delta-not-served"]


def test_generations_that_do_not_agree_by_themselves_show_nothing() -> None:
    story = tokens(untrained=[1, 2], trained=[1, 2], trained_again=[1, 3], trained_cycled=[9])
    assert (story.found("LV-03"), story.met("LV-03")) == ([], set())


# ---- LV-04


@pytest.mark.parametrize(("left", "codes"), [(10 * MIB, []), (10 * MIB + 1, ["backup-kept"])])
def test_a_quarter_of_what_a_sleep_copied_may_be_left(left: int, codes: list[str]) -> None:
    story = Story().levels("before", trainer=MIB).levels("asleep", trainer=41 * MIB).levels("awake", trainer=MIB + left)
    assert (story.found("LV-04"), story.met("LV-04")) == (codes, {"backup-kept"})


def test_a_sleep_that_copies_little_shows_nothing() -> None:
    story = Story().levels("before").levels("asleep", trainer=7 * MIB).levels("awake", trainer=7 * MIB)
    assert (story.found("LV-04"), story.met("LV-04")) == ([], set())


@pytest.mark.parametrize(
    ("more", "codes"),
    [
        ({"host": {"engine": FLAT}, "files": {"engine": HANDLES_FLAT}, "maps": {"engine": HANDLES_FLAT}}, []),
        ({"host": {"engine": FLAT + 1}}, ["host-grows"]),
        ({"files": {"engine": HANDLES_FLAT + 1}}, ["handles-grow"]),
        ({"maps": {"engine": HANDLES_FLAT + 1}}, ["handles-grow"]),
    ],
)
def test_host_memory_files_and_mappings_are_flat(more: dict[str, Any], codes: list[str]) -> None:
    zero = {name: {"engine": 0} for name in ("host", "files", "maps")}
    story = Story().tell(LevelsSeen("settled", 0, **zero), LevelsSeen("flat", 0, **{**zero, **more}))
    assert story.found("LV-04") == codes


def test_without_a_known_process_nothing_is_flat() -> None:
    assert Story().tell(LevelsSeen("settled", 0), LevelsSeen("flat", 0)).met("LV-04") == set()


# ---- ML-01


def state(of: str, **changed: str) -> StateSeen:
    return StateSeen(of, {"params": "p", "moments": "m", "gradients": "g", **changed})


def trained(*after: AnyEvent) -> Story:
    """Both were looked at; a step on `x` has changed it."""
    story = Story().tell(state("x"), state("y"), CallBegin("pair", "train_step", 1, "x"))
    return story.tell(CallEnd("pair", "train_step", 1), state("x", params="p2", moments="m2"), *after)


@pytest.mark.parametrize(
    ("changed", "codes"),
    [
        ({}, []),
        ({"params": "q"}, ["weights-touched"]),
        ({"moments": "n"}, ["moments-touched"]),
        ({"gradients": "h"}, ["gradients-touched"]),
    ],
)
def test_work_on_one_adapter_leaves_the_other(changed: dict[str, str], codes: list[str]) -> None:
    assert trained(state("y", **changed)).found("ML-01") == codes


def test_work_on_the_adapter_itself_may_change_it() -> None:
    story = trained(CallBegin("pair", "train_step", 2, "y"), state("y", params="q"))
    assert (story.found("ML-01"), story.met("ML-01")) == ([], set())


def test_a_hand_off_is_work_on_none() -> None:
    story = trained(state("y"), CallBegin("pair", "to_rollout", 2), state("y", gradients="none"))
    assert story.found("ML-01") == ["gradients-touched"]


def test_digests_that_training_does_not_change_show_nothing() -> None:
    story = Story().tell(state("x"), state("y"), CallBegin("pair", "train_step", 1, "x"), state("x"), state("y"))
    assert story.met("ML-01") == set()


@pytest.mark.parametrize(
    ("after", "codes"),
    [
        ({"params": "drawn", "moments": "m", "gradients": "g"}, []),
        ({"params": "p", "moments": "m", "gradients": "g"}, []),
        ({"params": "p2", "moments": "m", "gradients": "g"}, ["slot-not-pristine"]),
        ({"params": "drawn", "moments": "m2", "gradients": "g"}, ["slot-not-pristine"]),
    ],
)
def test_a_renewed_slot_has_nothing_of_the_adapter_before(after: dict[str, str], codes: list[str]) -> None:
    """Its parameters may be drawn anew or be those that every new adapter has."""
    assert trained(CallBegin("pair", "renew_adapter", 2, "x"), StateSeen("x", after)).found("ML-01") == codes

"""The frozen-offload folds at their edges, on stories told event by event. No torch."""

from __future__ import annotations

from typing import Any

import pytest

from colocert.judge_trace import TraceJudged, judge_events
from colocert.rig.frozen_rig import FrozenConfig
from colocert.rules.catalogue import catalogue
from colocert.trace import AnyEvent
from colocert.trace.events import (
    CallEnd,
    CallRaise,
    Change,
    ClaimsStated,
    Config,
    Fault,
    FolderSeen,
    MemorySeen,
    ModuleSeen,
    ProcessEnded,
    TensorsSeen,
)
from colocert_reference.colocert_impl import CLAIMS

MIB = 1 << 20
BIG = 32 * MIB
FACTS: dict[str, list[Any]] = {
    "w": ["frozen", "float32[8]", BIG, "w"],
    "v": ["frozen", "float32[1]", 4, "v"],
    "a": ["adapter", "float32[2]", 8, "a"],
    "b": ["buffer", "int64[2]", 16, "b"],
}


class Story:
    """Calls are whole: an outcome, a cost, and where `w` and `v` are then. Contents are the names, unless told."""

    def __init__(self, **config: Any) -> None:
        self.events: list[AnyEvent] = []
        self.tell(Config(FrozenConfig(lora=True, regions={}, **config).facts()), ClaimsStated(CLAIMS.facts()))

    def tell(self, *events: AnyEvent, rank: int = 0) -> Story:
        for event in events:
            event.rank, event.seq = rank, len(self.events) + 1
            self.events.append(event)
        return self

    def start(self, rank: int = 0, found: tuple[str, ...] = ()) -> Story:
        self.tell(ModuleSeen(FACTS, BIG + 4, BIG + 4, list(found)), rank=rank)
        return self.seen("built", "device", rank=rank)

    def seen(self, when: str, place: str, content: str = "", rank: int = 0, **held: list[str]) -> Story:
        known = {name: [place if name in "wv" else "device", content or f"#{name}", f[1]] for name, f in FACTS.items()}
        if place == "empty":
            known["w"][1] = known["v"][1] = ""
        return self.tell(TensorsSeen(when, {**known, **held}), rank=rank)

    def call(self, method: str, place: str, content: str = "", *, raises: bool = False, rank: int = 0, **cost: int):
        end = CallRaise("offloader", method, 1, "OSError") if raises else CallEnd("offloader", method, 1)
        zero = dict.fromkeys(
            ("written", "peak", "extra", "file_bytes", "shared", "anonymous", "locked", "open_files"), 0
        )
        self.tell(end, MemorySeen(method, **{**zero, **cost}), rank=rank)
        return self.seen(method, place, content, rank=rank)

    def cycle(self, rank: int = 0, back: str = "", **cost: int) -> Story:
        self.call("offload", "file", rank=rank, **{"file_bytes": BIG + 4, **cost})
        return self.call("backload", "device", back, rank=rank)

    def judged(self, rule: str) -> TraceJudged:
        return judge_events(self.events, [catalogue()[rule]])

    def found(self, rule: str) -> list[str]:
        return [finding.code for finding in self.judged(rule).findings]

    def times(self, rule: str, code: str) -> int:
        return self.judged(rule).exercised[rule].get(code, 0)


def test_an_offload_that_leaves_everything_exercises_only_what_says_that_it_has_to_go() -> None:
    story = Story().start().call("offload", "device").call("backload", "device").tell(ProcessEnded("normal"))
    judged = judge_events(story.events, [r for r in catalogue().values() if r.profile == "frozen-offload"])
    assert {rule for rule, counts in judged.exercised.items() if counts} == {"FO-01"}
    assert [f.code for f in judged.findings] == ["left-on-device"]


@pytest.mark.parametrize(("written", "codes"), [(0, []), (4096, []), (4097, ["written-again"])])
def test_a_repeat_may_write_a_note_and_no_tensor(written: int, codes: list[str]) -> None:
    assert Story().start().cycle(written=BIG).cycle(written=written).found("FO-01") == codes


def test_another_base_may_be_written_again() -> None:
    story = Story().start().cycle(written=BIG).tell(Change("base.loaded")).seen("changed", "device", "#new")
    assert story.cycle(back="#new", written=BIG).found("FO-01") == []
    assert story.found("FO-08") == []


def test_a_base_that_was_loaded_has_to_come_back_or_be_refused() -> None:
    story = Story().start().cycle().tell(Change("base.loaded")).seen("changed", "device", "#new")
    assert Story.found(story, "FO-08") == []
    refused = story.call("offload", "device", "#new", raises=True)
    assert (refused.found("FO-08"), refused.times("FO-08", "stale-copy")) == ([], 1)
    assert story.cycle(back="#w").found("FO-08") == ["stale-copy"]


def test_copies_may_be_on_file_without_a_mapping_of_each_tensor() -> None:
    """An empty tensor's copy is counted by the files."""
    assert Story().start().call("offload", "empty", file_bytes=BIG + 4).found("FO-01") == []
    assert Story().start().call("offload", "empty", file_bytes=BIG).found("FO-01") == ["not-on-file"]
    assert Story().start().call("offload", "host", file_bytes=BIG + 4).found("FO-01") == ["not-on-file"]


def test_bits_are_judged_once_they_were_off_the_device() -> None:
    assert Story().start().call("backload", "device", "#x").times("FO-02", "bits-changed") == 0
    assert Story().start().cycle(back="#x").found("FO-02") == ["bits-changed"]
    assert Story().start(found=("planted",)).cycle(back="#x").found("FO-02") == ["trusted-file"]


def test_what_a_killed_process_left_is_another_rules_matter() -> None:
    story = Story().start(found=("killed",)).cycle(back="#x")
    assert (story.found("FO-02"), story.found("FO-06")) == ([], ["leftover-read"])


@pytest.mark.parametrize("place", ["device", "empty", "host"])
def test_a_failed_offload_may_raise_or_use_host_memory_if_all_comes_back(place: str) -> None:
    story = Story().start().tell(Fault("disk", "full"))
    story.call("offload", place, raises=place == "device").call("backload", "device")
    assert (story.found("FO-05"), story.times("FO-05", "lost")) == ([], 1)
    assert story.found("FO-01") == []


def test_a_failed_offload_loses_nothing_and_maps_nothing_half() -> None:
    lost = Story().start().tell(Fault("disk", "full")).call("offload", "empty", raises=True)
    assert lost.call("backload", "empty", raises=True).found("FO-05") == ["lost"]
    half = Story().start().tell(Fault("disk", "full")).call("offload", "file", "#half")
    assert set(half.found("FO-05")) == {"half-written-mapped"}


@pytest.mark.parametrize(("during", "code"), [("offload", "crashed"), ("look", "half-written-mapped")])
def test_a_death_on_a_full_disk_is_told_by_where_it_happened(during: str, code: str) -> None:
    story = Story().start().tell(Fault("disk", "full"), ProcessEnded("signal SIGBUS", during))
    assert story.found("FO-05") == [code]
    assert Story().start().tell(ProcessEnded("signal SIGBUS", during)).found("FO-05") == []


def _folder(by: str, *names: str) -> FolderSeen:
    return FolderSeen(by, {name: f"#{name}" for name in names})


def test_the_files_of_the_dead_and_ones_own_may_go_and_those_of_the_living_may_not() -> None:
    def after(*ended: int, by: str) -> list[str]:
        story = Story().start(0).start(1).tell(_folder("0", "x.0")).tell(_folder("1", "x.0", "x.1"))
        for rank in ended:
            story.tell(ProcessEnded("killed"), rank=rank)
        return story.tell(_folder(by, "x.1")).found("FO-06")

    assert after(by="1") == ["foreign-touched"]
    assert after(by="0") == after(0, by="1") == after(by="all") == []


def test_somebody_elses_files_stay_whoever_was_at_work() -> None:
    story = Story().tell(Change("files.foreign"), _folder("suite", "notes")).start()
    assert story.tell(_folder("all")).found("FO-06") == ["foreign-touched"]


def test_copies_that_were_put_back_may_be_cleaned_up() -> None:
    story = Story().tell(Change("files.planted"), _folder("suite", "x.0")).start()
    assert story.tell(_folder("0")).found("FO-06") == []


def test_a_file_that_is_left_is_judged_by_what_the_next_run_makes_of_it() -> None:
    def left(back: str) -> Story:
        story = Story().start().cycle().tell(_folder("0", "x")).tell(ProcessEnded("normal"))
        story.tell(Change("files.altered"), FolderSeen("suite", {"x": "#y"})).start(1, ("altered", "ended"))
        return story.cycle(1, back)

    assert left("#y").found("FO-07") == ["file-left"]
    assert (left("").found("FO-07"), left("").times("FO-07", "file-left")) == ([], 1)
    unread = Story().start().cycle().tell(_folder("0", "x")).tell(ProcessEnded("normal"))
    assert unread.times("FO-07", "file-left") == 0
    assert Story().start().cycle().tell(ProcessEnded("normal")).times("FO-07", "file-left") == 1


@pytest.mark.parametrize(
    ("config", "cost", "codes"),
    [
        ({}, {"peak": 8 * MIB}, []),
        ({}, {"peak": 9 * MIB}, ["beyond-two-chunks"]),
        ({}, {"extra": BIG, "peak": BIG}, ["beyond-two-chunks", "second-copy"]),
        ({"file_backed": False}, {"peak": BIG + 7 * MIB, "extra": BIG, "file_bytes": 0}, []),
        ({"file_backed": False}, {"peak": BIG, "extra": BIG, "file_bytes": BIG}, ["second-copy"]),
    ],
)
def test_memory_beside_the_one_copy_is_bounded(config: dict[str, Any], cost: dict[str, int], codes: list[str]) -> None:
    assert Story(**config).start().cycle(**cost).found("FO-09") == codes


def test_host_copies_of_several_calls_add_up() -> None:
    story = Story(file_backed=False).start().cycle(extra=BIG, file_bytes=0).cycle(extra=BIG, file_bytes=0)
    assert story.found("FO-09") == ["second-copy"]


def test_a_kept_tensor_is_told_apart_from_keeping_all() -> None:
    story = Story().start().call("offload", "file", file_bytes=BIG + 4)
    story.events.pop()
    story.seen("offload", "file", v=["device", "#v", "float32[1]"])
    assert (story.found("FO-10"), story.found("FO-01")) == (["not-covered"], [])


def test_a_tensor_that_stays_off_or_comes_back_in_another_shape_is_not_covered() -> None:
    assert Story().start().call("offload", "file").call("backload", "file").found("FO-10") == ["not-covered"]
    story = Story().start().call("offload", "file").call("backload", "device")
    story.events.pop()
    story.seen("backload", "device", v=["device", "#v", "float32[]"])
    assert story.found("FO-10") == ["layout-changed"]


def test_shared_memory_is_no_file_that_can_be_evicted() -> None:
    assert Story().start().call("offload", "shared", shared=BIG + 4).found("FO-12") == ["anonymous"]
    assert Story().start().call("offload", "file", file_bytes=BIG, locked=4096).found("FO-12") == ["locked"]
    assert Story().start().call("offload", "file", file_bytes=BIG).found("FO-12") == []

"""The engine rules on stories told by hand: what is found, and what is not although it looks like it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from colocert.judge_trace import judge_events
from colocert.rules.catalogue import catalogue
from colocert.trace.events import (
    AnyEvent,
    CallBegin,
    CallEnd,
    CallRaise,
    Change,
    ClaimsStated,
    Config,
    EngineAsked,
    EngineToken,
    Event,
    Fault,
    SaverAlloc,
    SaverPause,
    SaverResume,
)

RULES = [rule for rule in catalogue().values() if rule.profile == "engine"]
TAGS = ("weights", "kv_cache", "cuda_graph")


class Story:
    """An engine's events. Calls are numbered; `begin` and `end` by hand let them overlap."""

    def __init__(self, lora: bool = True, base_requests: bool = False) -> None:
        self.events: list[Event] = [
            Config({"lora": lora}),
            ClaimsStated({"base_requests_in_lora_mode": base_requests}),
            *(SaverAlloc(tag, tag, 1, False) for tag in TAGS),
        ]
        self.calls = self.entries = 0
        self.methods: dict[int, str] = {}

    def begin(self, method: str, **asked: Any) -> int:
        self.calls += 1
        self.methods[self.calls] = method
        self.events += [EngineAsked(self.calls, method, **asked), CallBegin("engine", method, self.calls)]
        return self.calls

    def end(self, call: int, error: str = "") -> None:
        method = self.methods[call]
        ended = CallRaise("engine", method, call, error) if error else CallEnd("engine", method, call)
        self.events.append(ended)

    def move(self, method: str, *tags: str, really: tuple[str, ...] | None = None, error: str = "") -> None:
        call = self.begin(method, tags=list(tags))
        for tag in tags if really is None else really:
            self.events.append((SaverPause if method == "release" else SaverResume)(tag, tag, 1, False, 1))
        self.end(call, error)

    def load(self, name: str, version: int, error: str = "", fault: bool = False) -> None:
        call = self.begin("load_adapter", adapter=name, version=version)
        if fault:
            self.events.append(Fault("wire", "before"))
        self.end(call, error)

    def token(self, call: int, *adapters: str, prompt: str = "p", hit: int = 0, **more: Any) -> int:
        self.entries += 1
        self.events.append(EngineToken(call, prompt, self.entries, hit, adapters=list(adapters), **more))
        return self.entries

    def ask(self, name: str, *adapters: str, error: str = "", prompt: str = "p", hit: int = 0, **more: Any) -> int:
        call = self.begin("generate", adapter=name, prompt=prompt)
        entry = 0 if error else self.token(call, *adapters, prompt=prompt, hit=hit, **more)
        self.end(call, error)
        return entry

    def found(self) -> list[str]:
        """The codes that were found, in order, each once a rule."""
        return list(dict.fromkeys(f.code for f in judge_events(self._stamped(), RULES).findings))

    def times(self, rule: str, code: str) -> int:
        return judge_events(self._stamped(), RULES).exercised[rule].get(code, 0)

    def _stamped(self) -> Iterator[AnyEvent]:
        for seq, event in enumerate(self.events):
            event.seq, event.owner = seq, "engine"
            yield event  # type: ignore[misc]


def test_a_strict_engine_may_refuse_a_resume_as_a_whole_with_a_type_of_its_own() -> None:
    """A bare assertion is not one."""
    for error, found in (("EngineTagError", []), ("KeyError", []), ("AssertionError", ["untyped-error"])):
        story = Story()
        story.move("release", "weights")
        story.move("resume", "weights", "kv_cache", really=(), error=error)
        assert story.found() == found
    assert story.times("EN-01", "untyped-error") == 1


def test_what_is_released_follows_the_tags_that_were_named() -> None:
    story = Story()
    story.move("release", *TAGS)
    story.move("resume", "weights", really=TAGS)
    assert story.found() == ["wrong-set"]
    story = Story()
    story.move("release", "weights", really=(), error="Refused")
    story.move("release", "weights", really=("kv_cache",), error="Refused")
    assert story.found() == ["wrong-set"]


def test_ready_is_asked_of_it_only_where_something_is_released() -> None:
    story = Story()
    story.events.append(Change("engine.ready", {"ready": False}))
    story.move("release", "weights")
    story.events.append(Change("engine.ready", {"ready": True}))
    assert story.found() == ["ready-while-released"]


def test_an_adapter_that_went_with_the_weights_may_be_missed() -> None:
    """Served it must be with the version that was acknowledged."""
    story = Story()
    story.load("a", 1)
    story.move("release", "weights")
    story.move("resume", "weights")
    story.ask("a", error="UnknownAdapter")
    assert story.found() == []
    story.load("a", 2)
    story.ask("a", error="UnknownAdapter")
    assert story.found() == ["refused-while-ready"]


def test_an_update_that_was_refused_has_not_failed() -> None:
    """One in which the suite made something fail has."""
    for fault, found in ((False, []), (True, ["computed-after-failure"])):
        story = Story()
        story.load("a", 1)
        story.load("a", 2, error="EngineNotReady", fault=fault)
        story.ask("a", "a@1", "a@1")
        assert story.found() == found


def test_a_failed_adapter_concerns_its_own_new_requests() -> None:
    story = Story()
    story.load("a", 1)
    story.load("b", 1)
    under_way = story.begin("generate", adapter="a", prompt="q")
    story.load("a", 2, error="OSError", fault=True)
    story.token(under_way, "a@1", "a@1", prompt="q")
    story.end(under_way)
    story.ask("b", "b@1", "b@1")
    story.ask("a", error="NotThere")
    story.load("a", 3)
    story.ask("a", "a@3", "a@3")
    assert story.found() == []
    assert story.times("EN-02", "computed-after-failure") == 1


def test_a_held_request_is_answered_once_ready() -> None:
    """One that returns before, with nothing computed, was neither refused nor held."""
    for resumed, found in ((True, []), (False, ["neither-refused-nor-held"])):
        story = Story()
        story.load("a", 1)
        story.move("release", "kv_cache")
        call = story.begin("generate", adapter="a", prompt="p")
        if resumed:
            story.move("resume", "kv_cache")
            story.token(call, "a@1", "a@1")
        story.end(call)
        assert story.found() == found


def test_a_token_with_memory_out_or_a_lost_base_is_found() -> None:
    story = Story(lora=False)
    story.ask("", released=["kv_cache"])
    story.ask("", base_valid=False)
    assert story.found() == ["computed-released", "computed-invalid"]


def test_an_entry_of_before_a_flush_is_stale_after_the_resume_only() -> None:
    """Whenever the flush was asked for; a flush that raised did not happen."""
    for late, error, found in (
        (False, "", ["hit-after-flush"]),
        (True, "", ["hit-after-late-flush"]),
        (True, "Busy", []),
    ):
        story = Story(lora=False)
        entry = story.ask("")
        if late:
            story.move("release", "kv_cache")
        story.end(story.begin("flush"), error)
        if not late:
            story.ask("", hit=entry)
            assert story.found() == []
            story.move("release", "kv_cache")
        story.move("resume", "kv_cache")
        fresh = story.ask("")
        story.ask("", hit=fresh)
        assert story.found() == []
        story.ask("", hit=entry)
        assert story.found() == found


def test_a_request_during_a_replacement_sees_one_version_or_the_other() -> None:
    for seen, found in (
        (("a@1", "a@1"), []),
        (("a@2", "a@2"), []),
        (("a@1", "a@2"), ["mixed-versions"]),
        (("a@0", "a@0"), ["not-the-acknowledged"]),
        (("?", "?"), ["torn-adapter"]),
    ):
        story = Story()
        story.load("a", 1)
        call = story.begin("generate", adapter="a", prompt="p")
        load = story.begin("load_adapter", adapter="a", version=2)
        for label in seen:
            story.token(call, label, label)
        story.end(load)
        story.end(call)
        assert story.found() == found


def test_a_request_after_the_acknowledgement_sees_the_new_version_alone() -> None:
    """Also in what it takes over from the cache."""
    story = Story()
    story.load("a", 1)
    entry = story.ask("a", "a@1", "a@1")
    story.load("a", 2)
    story.ask("a", "a@2", "a@2", hit=entry)
    assert story.found() == ["mixed-versions"]
    story = Story()
    story.load("a", 1)
    story.load("a", 2)
    story.ask("a", "a@1", "a@1")
    story.ask("a")
    assert story.found() == ["not-the-acknowledged"]


def test_an_adapter_is_there_while_it_is_replaced() -> None:
    """Not before it was ever loaded, and not where memory moves at the same time."""
    for first, moving, found in ((True, False, ["missing-in-between"]), (False, False, []), (True, True, [])):
        story = Story()
        if first:
            story.load("a", 1)
        load = story.begin("load_adapter", adapter="a", version=2)
        call = story.begin("generate", adapter="a", prompt="p")
        if moving:
            story.end(story.begin("release", tags=[]))
        story.end(call, "UnknownAdapter")
        story.end(load)
        assert story.found() == found


def test_base_requests_are_served_where_they_are_claimed_or_there_is_no_lora() -> None:
    for lora, claimed, served, found in (
        (True, False, True, ["base-request-served"]),
        (True, False, False, []),
        (True, True, True, []),
        (False, False, True, []),
        (False, False, False, ["refused-while-ready"]),
    ):
        story = Story(lora, claimed)
        story.ask("", error="" if served else "Refused")
        assert story.found() == found


def test_an_unknown_adapter_is_an_error() -> None:
    story = Story()
    story.ask("b", error="UnknownAdapter")
    assert story.found() == []
    story.ask("b")
    assert story.found() == ["unknown-served"]

"""A story: a trace written by hand, event by event, and what the rules make of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from colocert.judge_trace import TraceJudged, judge_events
from colocert.record.scenarios import make_config
from colocert.rules.catalogue import catalogue
from colocert.trace import POISON, AnyEvent
from colocert.trace.events import (
    Believed,
    CallBegin,
    CallEnd,
    CallRaise,
    Change,
    ClaimsStated,
    Config,
    Data,
    Fault,
    GroupCreate,
    GroupDestroy,
    GroupUse,
    SaverAlloc,
    SaverCall,
    SaverFatal,
    SaverPause,
    SaverRefused,
    SaverResume,
    SaverTouch,
    Send,
)
from colocert_reference.colocert_impl import CLAIMS


class Story:
    """Timeline: built with a configuration, told event by event, judged. Contents are tokens of the teller's choice.

    `with story.call("sleep"):` writes the begin and the end of a call; `raises=` makes it end with that error, `dies=`
    leaves the end out.
    """

    def __init__(self, claims: dict[str, Any] | None = None, **config: Any) -> None:
        self.events: list[AnyEvent] = []
        self._calls = self._saver_calls = 0
        built = make_config({"lora": True, **config})
        self.allocations: dict[str, tuple[str, int, bool]] = {}
        self.contents: dict[str, str] = {}
        self._tell(Config(built.facts()), ClaimsStated({**CLAIMS.facts(), **(claims or {})}))
        for tag, regions in built.regions.items():
            for place, r in enumerate(regions):
                self.allocations[r.name] = (tag, r.nbytes, r.backup)
                self.contents[r.name] = f"#{r.name}"
                self._tell(SaverAlloc(tag, r.name, r.nbytes, r.backup, r.kind, 1000 + place, f"#{r.name}"))

    def _tell(self, *events: AnyEvent) -> Story:
        for event in events:
            event.seq = len(self.events) + 1
            self.events.append(event)
        return self

    @contextmanager
    def call(self, method: str, *, raises: str = "", dies: bool = False) -> Iterator[Story]:
        self._calls += 1
        number = self._calls
        self._tell(CallBegin("trainer", method, number))
        yield self
        if raises:
            self._tell(CallRaise("trainer", method, number, raises))
        elif not dies:
            self._tell(CallEnd("trainer", method, number))

    def quietly(self, *methods: str) -> Story:
        """Calls in which nothing happens."""
        for method in methods:
            with self.call(method):
                pass
        return self

    def pause(self, tag: str | None, *only: str) -> Story:
        return self._move("pause", tag, only)

    def resume(self, tag: str | None, *only: str, address: int = 0) -> Story:
        return self._move("resume", tag, only, address)

    def _move(self, op: str, tag: str | None, only: tuple[str, ...], address: int = 0) -> Story:
        self._saver_calls += 1
        self._tell(SaverCall(op, tag, self._saver_calls))
        for name, (mine, nbytes, backup) in self.allocations.items():
            if (tag not in (None, mine)) or (only and name not in only):
                continue
            if op == "pause":
                content = self.contents[name] if backup else ""
                self._tell(SaverPause(mine, name, nbytes, backup, self._saver_calls, content))
            else:
                if not backup:
                    self.contents[name] = POISON
                where = address or 1000 + [n for n, a in self.allocations.items() if a[0] == mine].index(name)
                self._tell(SaverResume(mine, name, nbytes, backup, self._saver_calls, self.contents[name], where))
        return self

    def data(self, name: str, how: str, content: str = "") -> Story:
        tag, _, _ = self.allocations[name]
        kind = "grads" if tag == "grad_buffer" else "other"
        if how != "read":
            self.contents[name] = content or f"#{how}{len(self.events)}"
        return self._tell(Data(tag, name, how, kind, self.contents[name]))

    def step(self, name: str = "grads", *, consume: bool = True) -> Story:
        """The numerical work of a `train()`."""
        self.data(name, "zero").data("base", "read").data(name, "accumulate")
        return self.data(name, "consume", self.contents[name]) if consume else self

    def refused(self, op: str, tag: str | None) -> Story:
        self._saver_calls += 1
        number = self._saver_calls
        return self._tell(
            SaverCall(op, tag, number), Fault(f"saver.{op}.{tag}", "refused"), SaverRefused(op, tag, number)
        )

    def fatal(self, op: str, tag: str | None, alloc: str, reason: str) -> Story:
        self._saver_calls += 1
        return self._tell(SaverCall(op, tag, self._saver_calls), SaverFatal(op, tag, alloc, self._saver_calls, reason))

    def ends_at(self, alloc: str, reason: str) -> Story:
        """The last saver call goes on to an allocation at which it ends the process."""
        made = next(event for event in reversed(self.events) if isinstance(event, SaverCall))
        return self._tell(SaverFatal(made.op, made.tag, alloc, made.saver_call, reason))

    def fault(self, point: str, when: str = "before") -> Story:
        return self._tell(Fault(point, when))

    def believes(self, **released: bool) -> Story:
        return self._tell(Believed(released, statement=True))

    def create(self, name: str = "data", **args: Any) -> Story:
        return self._tell(GroupCreate(name, {"ranks": [0], "backend": "nccl", "timeout": 600, **args}))

    def destroy(self, name: str = "data") -> Story:
        return self._tell(GroupDestroy(name))

    def use(self, name: str = "data", *, alive: bool = True) -> Story:
        return self._tell(GroupUse(name, alive))

    def change(self, what: str, **facts: Any) -> Story:
        return self._tell(Change(what, facts))

    def send(self, kind: str = "base") -> Story:
        return self._tell(Send(kind, 1, "device"))

    def touch(self, name: str, how: str = "read") -> Story:
        return self._tell(SaverTouch(self.allocations[name][0], name, how))

    def judged(self, rule: str) -> TraceJudged:
        return judge_events(self.events, [catalogue()[rule]])

    def found(self, rule: str) -> list[str]:
        """The codes of the rule's findings, in order."""
        return [finding.code for finding in self.judged(rule).findings]

    def times(self, rule: str, code: str) -> int:
        """How often the code's condition occurred."""
        return self.judged(rule).exercised[rule].get(code, 0)


@pytest.fixture
def story() -> Callable[..., Story]:
    """The class, to be called with a configuration."""
    return Story

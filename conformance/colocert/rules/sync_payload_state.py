"""What the rules of the sync-payload profile look at: one sync at a time, with the tensors before and after it.

Knows what arrived at the engine during a sync and how it ended. Does not know any rule's sentence, and no tensors:
contents are tokens, comparisons were made by the rig.
"""

from __future__ import annotations

from typing import Any

from colocert.rules.fold import RunFold
from colocert.rules.run import RunView
from colocert.trace.events import (
    AnyEvent,
    CallBegin,
    CallEnd,
    CallRaise,
    Data,
    EngineLoad,
    EngineSession,
    Fault,
    Measured,
)

ADAPTER, MERGED, FULL = "adapter", "merged", "full"
SEEN = (CallBegin, CallEnd, CallRaise, Data, EngineLoad, EngineSession, Fault, Measured)


class Sync:
    """One sync. `before` and `after` are states as the rig saw them; `order` holds what happened: open, base, adapter.

    `doubtful`: a sync before it raised, and none has returned since. `replaced`: the engine's base has not been valid
    since another engine took its place.
    """

    def __init__(self, before: dict[str, Any], *, doubtful: bool, replaced: bool) -> None:
        self.before, self.after = before, before
        self.doubtful, self.replaced = doubtful, replaced
        self.loads: list[EngineLoad] = []
        self.session = 0
        self.order: list[str] = []
        self.touched: list[str] = []
        self.faulted = False
        self.end: CallEnd | CallRaise | None = None

    @property
    def returned(self) -> bool:
        return isinstance(self.end, CallEnd)

    @property
    def lost(self) -> bool:
        """Whether what was asked for had neither memory nor a host copy."""
        where: dict[str, str] = self.before["where"]
        return where.get(self.before["asked"]) == "lost"

    def last(self, kind: str) -> list[EngineLoad]:
        """The last attempt of a kind that arrived: a load of an adapter, or all loads of a base session."""
        if kind == "base":
            return [load for load in self.loads[self.session :] if load.kind == "base"]
        return [load for load in self.loads if load.kind == kind][-1:]

    def loaded(self, kind: str) -> set[str]:
        """Names of a kind that the engine took."""
        return {name for load in self.loads if load.kind == kind for name in load.loaded}

    def missed(self, mode: str) -> list[str]:
        """What the engine does not have of what this sync owed: parts of an adapter, or base tensors never sent."""
        if mode == ADAPTER:
            return list(self.after["absent"])
        sent = self.loaded("base")
        return [n for n in self.after["stale"] if n not in sent and n not in self.after["outside_differs"]]


class SyncFold(RunFold):
    """A fold over syncs. A base: it has no rule of its own."""

    sees = SEEN

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.seen: dict[str, Any] = {}
        self.now: Sync | None = None
        self.ended: CallEnd | CallRaise | None = None
        self.failed = self.replaced = False
        self.incarnation = 0

    @property
    def mode(self) -> str:
        """What is sent in this scenario: adapter, merged or full."""
        return str(self.view.config.get("sync", ADAPTER))

    def on(self, event: AnyEvent) -> None:
        now = self.now
        if isinstance(event, CallBegin):
            if event.method == "sync":
                self.now = Sync(self.seen, doubtful=self.failed, replaced=self.replaced)
        elif isinstance(event, Measured):
            if event.what == "levels":
                self.levels(event)
            else:
                self._state(event.facts)
        elif now is not None:
            self._happened(now, event)

    def _happened(self, now: Sync, event: AnyEvent) -> None:
        if isinstance(event, (CallEnd, CallRaise)):
            now.end = event
        elif isinstance(event, EngineLoad):
            now.loads.append(event)
            now.order.append(event.kind)
        elif isinstance(event, EngineSession):
            now.order.append(event.op)
            if event.op == "open":
                now.session = len(now.loads)
        elif isinstance(event, Data):
            now.touched.append(event.alloc)
        elif isinstance(event, Fault):
            now.faulted = True

    def _state(self, facts: dict[str, Any]) -> None:
        now, self.now = self.now, None
        if facts["incarnation"] != self.incarnation:
            self.incarnation, self.replaced = facts["incarnation"], True
        if facts["base_valid"]:
            self.replaced = False
        if now is not None and now.end is not None:
            now.after = facts
            self.ended = now.end
            self.judge(now, now.end)
            self.failed = not now.returned
        elif self.seen:
            self.between(self.seen, facts)
        self.seen = facts

    def judge(self, sync: Sync, end: CallEnd | CallRaise) -> None:
        """A sync has ended."""

    def between(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """The states after one sync and before the next."""

    def levels(self, event: Measured) -> None:
        """Levels were measured, after the sync's state."""

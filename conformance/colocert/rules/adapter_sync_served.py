"""AS-09 … AS-18: what the engine serves after a sync, what an error leaves, and what the next step finds.

Knows the sentences of these rules as folds over a whole run. Does not know which implementation or scenario produced a
trace.
"""

from __future__ import annotations

from colocert.rules.adapter_sync import backloads, beliefs
from colocert.rules.run import RunView
from colocert.rules.sync_state import BASE, SyncFold
from colocert.trace.events import (
    AnyEvent,
    Believed,
    CallBegin,
    CallEnd,
    CallRaise,
    Data,
    EngineServe,
    Fault,
    Move,
    RequestBegin,
    SaverTouch,
)


class VersionChangesOnce(SyncFold):
    """AS-09: the served version changes once per successful sync and adapter, not at all on a failed one.

    A change whose answer got lost (the engine's own call failed after its effect) is not the sync's: nobody could know
    of it; the retry may give the same version again. A sync of what the last one delivered may leave it alone. The base
    stands for an adapter where the adapter is merged into it: a version of the base alone is not the adapter's.
    """

    rule = "AS-09"

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.before: dict[str, int] = {}
        self.said: dict[str, int] = {}
        self.changes: dict[str, int] = {}
        self.lost: set[str] = set()
        self.delivered: dict[tuple[str, ...], tuple[str, ...]] = {}
        self.last: str | None = None

    def happened(self, event: AnyEvent) -> None:
        last, self.last = self.last, None
        if isinstance(event, CallBegin):
            self.before, self.changes = dict(self.said), {}
        elif isinstance(event, EngineServe):
            if event.version != self.said.get(event.adapter, 0):
                self.changes[event.adapter] = self.changes.get(event.adapter, 0) + 1
                self.last = event.adapter
            self.said[event.adapter] = event.version
        elif isinstance(event, Fault) and event.when == "after" and last in self.changes:
            self.lost.add(last)
            self.changes[last] -= 1

    def synced(self, event: CallEnd | CallRaise) -> None:
        state, self.last = self.state, None
        asked = (state.subject,) if state.subject else (*state.adapters(), BASE)
        if isinstance(event, CallRaise):
            self._failed(event, asked)
            return
        weights = tuple(state.current(name) for name in asked)
        new, self.delivered[asked] = weights != self.delivered.get(asked), weights
        self.met("changed-twice")
        if twice := [n for n in asked if self.changes.get(n, 0) > 1]:
            told = f"it changed {self.changes[twice[0]]} times"
            self.found(event, "changed-twice", "the served version changes once per sync", told)
        if new:
            self.met("not-changed")
            if not any(self.changes.get(n) for n in asked if self._stands(n)) and not self.lost.intersection(asked):
                told = "it is what it was before new weights were synced"
                self.found(event, "not-changed", "the served version changes once per sync", told)
        self.lost.difference_update(asked)

    def _stands(self, name: str) -> bool:
        """Whether what was sent to be served under a name holds what a sync is to bring."""
        state = self.state
        return name != BASE or not state.adapters() or any(send.kind == "merged" for send in state.sends)

    def _failed(self, event: CallRaise, asked: tuple[str, ...]) -> None:
        self.met("changed-on-failure")
        for name in self.changes.keys() & set(asked) - self.lost:
            before, now = self.before.get(name, 0), self.said[name]
            if now != before:
                told = f"the sync raised, and the version went from {before} to {now}"
                self.found(event, "changed-on-failure", "a failed sync changes no version", told)


class NoStalePrefix(SyncFold):
    """AS-10: no cached prefix or encoder state of an older version can be hit after a sync.

    It occurs at requests after a sync that returned, for what has been asked for before under older weights.
    """

    rule = "AS-10"

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.asked: dict[str, frozenset[str]] = {}
        self.settled = False

    def synced(self, event: CallEnd | CallRaise) -> None:
        self.settled = isinstance(event, CallEnd)

    def happened(self, event: AnyEvent) -> None:
        if not isinstance(event, RequestBegin) or not event.ready:
            return
        before = self.asked.get(event.adapter, frozenset())
        self.asked[event.adapter] = before | {event.content}
        if not self.settled or self.state.in_call or not before - {event.content}:
            return
        self.met("stale-prefix")
        if event.cached not in ("", event.content):
            told = f"a prefix of {event.cached} answers for {event.content}"
            self.found(event, "stale-prefix", "what is hit was computed with the weights that are served", told)


class ErrorsAreUndone(SyncFold):
    """AS-12: an error in the middle leaves `believed()` true and what the sync brought on off; a retry delivers.

    What the sync brought on is trainer memory that was off the device when it began, less what is claimed to stay.
    """

    rule = "AS-12"

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.due: set[str] = set()
        self.failed = False

    def happened(self, event: AnyEvent) -> None:
        if isinstance(event, CallBegin):
            self.failed = False
        for told in beliefs(self.state, event) if isinstance(event, Believed) and self.failed else ():
            self.met("belief-differs")
            if told:
                self.found(event, "belief-differs", "what is believed after an error is true", told)

    def synced(self, event: CallEnd | CallRaise) -> None:
        state = self.state
        if state.subject in self.due and not state.faulted:
            self.due.discard(state.subject)
            self.met("not-delivered")
            if isinstance(event, CallRaise):
                told = f"it raised {event.error}"
                self.found(event, "not-delivered", "a retry after an error delivers what was due", told)
            elif not state.delivered(state.subject):
                told = "the engine serves something else"
                self.found(event, "not-delivered", "a retry after an error delivers what was due", told)
        if isinstance(event, CallRaise):
            self.failed = True
            if state.faulted:
                self.due.add(state.subject)
            self._left(event)

    def _left(self, event: CallRaise) -> None:
        state = self.state
        if not state.colocated:
            return
        self.met("left-on-device")
        left = sorted(f"{r}'s {n}" for r, n in state.on - state.on_before if state.kinds[r, n] not in state.kept)
        if left:
            told = f"{', '.join(left)} came and stayed"
            self.found(event, "left-on-device", "an error takes off the device what the sync brought on", told)


class AdapterAskedFor(SyncFold):
    """AS-16: the adapter asked for is the one exported and served, and activating it does not backload the base."""

    rule = "AS-16"

    def synced(self, event: CallEnd | CallRaise) -> None:
        state = self.state
        if not state.subject:
            return
        if state.adapter_only and state.sends and state.base_off(state.on_before):
            self.met("base-backloaded")
        if isinstance(event, CallRaise):
            return
        self.met("wrong-adapter")
        exported = {name for send in state.sends for name in send.tensors} & set(state.adapters())
        if exported - {state.subject}:
            told = f"{', '.join(sorted(exported))} was exported"
            self.found(event, "wrong-adapter", f"{state.subject} is exported and served", told)
        elif not state.delivered(state.subject):
            told = f"{state.served.get(state.subject) or 'nothing'} is served as {state.subject}"
            self.found(event, "wrong-adapter", f"{state.current(state.subject)} is served as {state.subject}", told)

    def happened(self, event: AnyEvent) -> None:
        if isinstance(event, Move) and backloads(self, event) and self.state.adapter_only and self.state.subject:
            told = f"{event.nbytes} bytes come back for {self.state.subject}"
            self.found(event, "base-backloaded", "activating an adapter does not backload the base", told)


class NeverLeaks(SyncFold):
    """AS-18: a forward or step after any sync reads only resident storage."""

    rule = "AS-18"

    def happened(self, event: AnyEvent) -> None:
        state = self.state
        if not state.syncs or not state.in_call or state.call not in ("forward", "train_step"):
            return
        if isinstance(event, Data) and event.how == "read":
            self.met("read-released")
        elif isinstance(event, SaverTouch):
            what = f"{event.owner}'s {event.alloc} was read while it was released"
            self.found(event, "read-released", "a forward or step reads resident storage", what)

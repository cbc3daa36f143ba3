"""SP-01 … SP-07: what a weight sync sends, and what the engine serves after it.

Knows the sentences of these rules as folds over syncs. Does not know tensors, transports, or which scenario produced a
trace.
"""

from __future__ import annotations

from typing import Any

from colocert.rules.run import RunView
from colocert.rules.sync_payload_state import ADAPTER, FULL, MERGED, Sync, SyncFold
from colocert.trace.events import CallEnd, CallRaise, Measured

Ended = CallEnd | CallRaise
SYNCS, SETTLED, WINDOW = 6, 2, 3
"""Levels are judged with so many syncs, from the third on, a window of the first against one of the last."""


class BaseValidity(SyncFold):
    """SP-01: a base that is not valid is sent, before the adapter; a valid one is left alone.

    After a sync that raised, a valid base may be sent again: the sender cannot know what arrived.
    """

    rule = "SP-01"

    def judge(self, sync: Sync, end: Ended) -> None:
        if self.mode != ADAPTER or sync.faulted or sync.lost:
            return
        if not sync.before["base_valid"]:
            self._owed(sync, end)
        elif not sync.doubtful and sync.last("adapter") and not self.view.config.get("outside"):
            self.met("base-sent-again")
            self.met("session-opened")
            if sent := sync.loaded("base"):
                self.found(end, "base-sent-again", "the base is valid and stays", f"{len(sent)} base tensors were sent")
            elif "open" in sync.order:
                self.found(end, "session-opened", "the base is valid, no base session opens", "one was opened")

    def _owed(self, sync: Sync, end: Ended) -> None:
        code = "base-not-sent-to-replacement" if sync.replaced else "base-not-sent"
        self.met(code)
        if not sync.loaded("base"):
            self.found(end, code, "the base is not valid: it is sent", "no base tensor arrived")
        elif sync.last("adapter"):
            self.met("base-after-adapter")
            if "base" in sync.order[sync.order.index("adapter") :]:
                self.found(end, "base-after-adapter", "base, then adapter", ", then ".join(sync.order))


class OneDelta(SyncFold):
    """SP-02: after every sync the engine's base is the trainer's, and the effective weights are it plus one delta."""

    rule = "SP-02"

    def judge(self, sync: Sync, end: Ended) -> None:
        after = sync.after
        if not sync.returned or self.mode == FULL:
            return
        if self.mode == ADAPTER:
            self.met("base-differs")
            if differs := after["base_differs"]:
                self.found(end, "base-differs", "the engine's base is the trainer's, bit by bit", _some(differs))
        if after["delta"] == "unknown" or sync.missed(self.mode):
            return
        self.met("delta-twice")
        self.met("effective-differs")
        expected = "effective weights are the base plus one delta"
        if after["delta"] == "twice":
            self.found(end, "delta-twice", expected, "the delta is in them twice")
        elif after["delta"] != "once":
            told = "they are the base alone" if after["delta"] == "none" else _some(after["stale"])
            self.found(end, "effective-differs", expected, told)


class NothingIsDropped(SyncFold):
    """SP-03: a sync that matches no tensor, drops one or misses one fails; no trainable tensor is left out silently."""

    rule = "SP-03"

    def judge(self, sync: Sync, end: Ended) -> None:
        loads = sync.last("adapter" if self.mode == ADAPTER else "base")
        unknown = [name for load in loads for name in load.unknown]
        if loads and not any(load.loaded for load in loads):
            self.met("nothing-matched")
            if sync.returned:
                told = f"none of {len(unknown)} was taken, and the sync returned"
                self.found(end, "nothing-matched", "a sync that matches no tensor fails", told)
                return
        elif unknown:
            self.met("tensor-dropped")
            if sync.returned:
                told = f"{_some(unknown)} was not taken, and the sync returned"
                self.found(end, "tensor-dropped", "a sync of which a tensor is dropped fails", told)
                return
        if sync.returned:
            self.met("tensor-missed")
            if missed := sync.missed(self.mode):
                told = f"the engine has nothing of {_some(missed)}"
                self.found(end, "tensor-missed", "a sync that misses a tensor fails", told)
        if self.view.config.get("outside"):
            self.met("trainable-dropped")
            left = [n for n in sync.after["outside_differs"] if n not in sync.loaded("base")]
            if sync.returned and left:
                expected = "what trains beside the adapters is delivered, or refused"
                self.found(end, "trainable-dropped", expected, f"{_some(left)} was left out")


class ValidSource(SyncFold):
    """SP-04: the source of the adapter bytes is valid memory; with none left the sync fails before it touches any."""

    rule = "SP-04"

    def judge(self, sync: Sync, end: Ended) -> None:
        if self.mode == FULL or sync.faulted:
            return
        arrived = [load for load in sync.loads if load.kind == ("adapter" if self.mode == ADAPTER else "base")]
        if any(where != "device" for where in sync.before["where"].values()) and arrived:
            self.met("read-poisoned")
            if any(load.poisoned for load in arrived):
                self.found(end, "read-poisoned", "bytes are read from valid memory", "released memory was sent")
        if not sync.lost:
            return
        self.met("not-refused")
        self.met("touched-before-refusal")
        if sync.returned:
            self.found(end, "not-refused", "without memory or a host copy the sync fails", "it returned")
        elif sync.touched or sync.order:
            told = f"{_some(sync.touched)} was read" if sync.touched else f"first came {sync.order[0]}"
            self.found(end, "touched-before-refusal", "it fails before any tensor is touched", told)


class NoAlias(SyncFold):
    """SP-05: after the acknowledgement the served adapter shares no memory; loading leaves its source as it was."""

    rule = "SP-05"

    def judge(self, sync: Sync, end: Ended) -> None:
        loaded = {load.adapter for load in sync.loads if load.kind == "adapter"}
        if loaded:
            self.met("source-changed")
            before, after = sync.before["trainer_adapters"], sync.after["trainer_adapters"]
            if changed := [name for name in after if after[name] != before.get(name)]:
                self.found(end, "source-changed", "loading leaves its source as it was", f"{_some(changed)} changed")
        changed = _changed(sync.before["served"], sync.after["served"], loaded)
        if loaded and sync.returned:
            self.met("aliased")
        if sync.returned and (shared := sync.after["aliased"]):
            told = ", ".join(f"{name} shares memory with the {whose}" for name, whose in sorted(shared.items()))
            self.found(end, "aliased", "the served adapter's memory is its own", told)
        elif changed:
            self._changed(end, changed)

    def between(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        if changed := _changed(before["served"], after["served"], set()):
            assert self.ended is not None
            self._changed(self.ended, changed)

    def _changed(self, event: Ended, changed: list[str]) -> None:
        told = f"{_some(changed)} changed without being loaded"
        self.found(event, "aliased", "the served adapter's memory is its own", told)


class FlatLevels(SyncFold):
    """SP-06: device bytes, host bytes, open files and loaded adapters do not grow from the third sync on.

    Judged where no fault was injected: what an error leaves behind once is not what a sync leaves behind each time.
    """

    rule = "SP-06"
    CODES = (
        ("device-grows", "device", "bytes on the device"),
        ("host-grows", "host", "bytes on the host"),
        ("files-grow", "files", "open files"),
        ("adapters-grow", "adapters", "loaded adapters"),
    )

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.measured: list[tuple[Measured, dict[str, int]]] = []
        self.delivered = self.faulted = False

    def judge(self, sync: Sync, end: Ended) -> None:
        self.faulted |= sync.faulted
        self.delivered = sync.returned and any(load.loaded for load in sync.loads)

    def levels(self, event: Measured) -> None:
        if self.delivered:
            self.measured.append((event, event.facts))

    def end(self) -> None:
        if len(self.measured) < SYNCS or self.faulted:
            return
        settled = [facts for _, facts in self.measured[SETTLED:]]
        last = self.measured[-1][0]
        for code, level, told in self.CODES:
            self.met(code)
            early = max(facts[level] for facts in settled[: min(WINDOW, len(settled) // 2)])
            late = max(facts[level] for facts in settled[-WINDOW:])
            if late > early:
                expected = f"{early} {told} from the third sync on"
                self.found(last, code, expected, f"{late} after {len(self.measured)} syncs")


class MergeLeavesTheBase(SyncFold):
    """SP-07: a merge never changes the frozen base."""

    rule = "SP-07"

    def judge(self, sync: Sync, end: Ended) -> None:
        if self.mode != MERGED or not sync.loaded("base"):
            return
        self.met("base-changed")
        if sync.before["trainer_base"] != sync.after["trainer_base"]:
            self.found(end, "base-changed", "the trainer's base holds the bits it had", "it holds others")


def _changed(before: dict[str, str], after: dict[str, str], loaded: set[str]) -> list[str]:
    """Adapters that are served before and after, were not loaded, and hold something else."""
    return [name for name, token in after.items() if name not in loaded and before.get(name, token) != token]


def _some(names: list[str]) -> str:
    """A list of names for a message."""
    shown = ", ".join(names[:2])
    return f"{shown} and {len(names) - 2} more" if len(names) > 2 else shown

"""LC-11 … LC-22: contents, refusals, failures, groups, and what must not happen while a region is released.

Knows the sentences of these rules as folds. Does not know which implementation or scenario produced a trace.
"""

from __future__ import annotations

from colocert.rules.fold import Fold
from colocert.rules.lifecycle import ended, tags_of
from colocert.rules.view import GRADS, PARAMS, View
from colocert.trace.events import (
    POISON,
    AnyEvent,
    Believed,
    CallBegin,
    CallEnd,
    CallRaise,
    Change,
    Data,
    GroupCreate,
    GroupDestroy,
    GroupUse,
    SaverAlloc,
    SaverCall,
    SaverFatal,
    SaverFree,
    SaverPause,
    SaverResume,
    SaverTouch,
    Send,
)

MOVERS = ("sleep", "wake_up")
RELEASERS = ("sleep", "offload_grad_buffer")


def refused_live(view: View, event: CallEnd | CallRaise) -> bool:
    """Whether `sleep()` kept live gradients by raising, as LC-11 lets it."""
    return event.method == "sleep" and isinstance(event, CallRaise) and bool(view.live | view.unsure)


class LiveGradientsSurvive(Fold):
    """LC-11: a no-backup region is released only when its content is dead, or the gradients survive the release.

    A call that was asked for the release and left live gradients where they are counts, raised or not, for a trainer
    that has released memory in this trace.
    """

    rule = "LC-11"
    sees = (CallBegin, SaverPause, CallEnd, CallRaise, Data)
    within_call = frozenset({"live"})
    code = "gradients-lost"

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self.owed: dict[str, str] = {}
        self.live: frozenset[str] = frozenset()
        self.worked: set[str] = set()

    def on(self, event: AnyEvent) -> None:
        if isinstance(event, CallBegin):
            self.live = frozenset(self.view.live)
        elif isinstance(event, SaverPause) and not event.backup:
            if event.alloc in self.view.lost:
                self.owed[event.alloc] = self.view.lost[event.alloc]
            elif event.alloc in self.worked:
                self.met(self.code)
        elif isinstance(event, (CallEnd, CallRaise)):
            if event.method in RELEASERS and self.view.moved and self.live & self.view.live:
                self.met(self.code)
        elif isinstance(event, Data):
            if event.how == "accumulate":
                self.worked.add(event.alloc)
            self._survives(event)

    def _survives(self, event: Data) -> None:
        if event.alloc not in self.owed or event.how == "read":
            return
        kept = self.owed.pop(event.alloc)
        self.met(self.code)
        if not (event.how == "overwrite" and event.content == kept):
            self.found(
                event,
                self.code,
                "gradients of an open accumulation survive the release, or the release is refused",
                f"{event.alloc} held live gradients when released; then {event.how} without restoring them",
            )


class NothingStaleRead(Fold):
    """LC-12: after a resume, no-backup content is written before it is read; no host bytes are spent on gradients."""

    rule = "LC-12"
    sees = (SaverResume, Data, SaverPause)

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self.stale: set[str] = set()

    def on(self, event: AnyEvent) -> None:
        if isinstance(event, SaverResume) and not event.backup:
            self.stale.add(event.alloc)
        elif isinstance(event, Data) and event.alloc in self.stale:
            self._first(event)
        elif isinstance(event, SaverPause):
            self.stale.discard(event.alloc)
            if self.view.named(event.alloc).kind == "grads":
                self._backup(event)

    def _first(self, event: Data) -> None:
        self.stale.discard(event.alloc)
        self.met("stale-read")
        if event.how not in ("zero", "overwrite") or event.content == POISON:
            self.found(
                event,
                "stale-read",
                "content is zeroed or overwritten before it is used",
                f"{event.how} of {event.alloc}",
            )

    def _backup(self, event: SaverPause) -> None:
        self.met("grads-backed-up")
        if event.backup and event.alloc not in self.view.live and not self.view.config.get("multi_lora"):
            self.found(
                event,
                "grads-backed-up",
                "gradients that nothing keeps cost no host bytes",
                f"{event.nbytes} bytes of {event.alloc} copied to the host",
            )


class RefusedMoves(Fold):
    """LC-13: a refused move leaves `believed()` equal to residency; the next call moves what is due, once."""

    rule = "LC-13"
    sees = (CallBegin, CallEnd, CallRaise, Believed, SaverFatal)

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self.check_belief = False
        self.pending = False

    def on(self, event: AnyEvent) -> None:
        view = self.view
        if isinstance(event, (CallEnd, CallRaise)):
            self._closed(event)
        elif isinstance(event, Believed) and self.check_belief:
            self.check_belief = False
            self._belief(event)
        elif isinstance(event, SaverFatal) and self.pending and event.reason != "out-of-memory":
            self.pending = False
            self.found(event, "moved-twice", "each tag still due is moved once", f"{event.alloc} was moved already")
        elif isinstance(event, CallBegin) and self.pending and not view.filled:
            self.check_belief = False

    def _closed(self, event: CallEnd | CallRaise) -> None:
        call, view = self.view.call, self.view
        assert call is not None
        refused = call.refused or (
            isinstance(event, CallRaise) and view.filled and not call.faulted and event.method in ("wake_up", "train")
        )
        if refused:
            self.check_belief = self.pending = True
        elif self.pending and event.method in MOVERS and not call.faulted and not refused_live(view, event):
            self.pending = False
            self._reached(event)

    def _belief(self, event: Believed) -> None:
        for tag, believed in event.released.items():
            actual = self.view.ledger.released(tag)
            if actual is None:
                continue
            self.met("belief-differs")
            if actual is not believed:
                says, is_ = ("released" if x else "resident" for x in (believed, actual))
                self.found(
                    event, "belief-differs", "believed() equals residency", f"it says {tag} is {says}; it is {is_}"
                )

    def _reached(self, event: CallEnd | CallRaise) -> None:
        view, call = self.view, self.view.call
        assert call is not None
        self.met("still-due")
        self.met("moved-twice")
        due = view.due() if event.method == "sleep" else list(view.ledger.allocations.values())
        left = [a for a in due if (a.name in view.ledger.out) != (event.method == "sleep")]
        if left and not (event.method == "sleep" and all(view.holds_live(a.tag) for a in left)):
            self.found(
                event, "still-due", f"{event.method}() moves each tag still due", f"{tags_of(left)} was not moved"
            )
        elif any(call.moves(a.name) > 1 for a in due):
            self.found(event, "moved-twice", "each tag still due is moved once", "a tag was moved repeatedly")


class FailuresAreRetried(Fold):
    """LC-14: after a failure inside `sleep()` or `wake_up()` the next call gets fully asleep or fully awake."""

    rule = "LC-14"
    sees = (SaverFatal, CallEnd, CallRaise)

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self.pending = False

    def on(self, event: AnyEvent) -> None:
        if isinstance(event, SaverFatal) and self.pending and event.reason in ("double-release", "double-resume"):
            self.pending = False
            self.found(event, "moved-twice", "nothing is released or resumed twice", f"a second move of {event.alloc}")
        elif isinstance(event, (CallEnd, CallRaise)) and event.method in MOVERS and self.view.call is not None:
            if self.view.call.faulted:
                self.pending = True
            elif self.pending and not self.view.filled and not refused_live(self.view, event):
                self.pending = False
                self._reached(event)

    def _reached(self, event: CallEnd | CallRaise) -> None:
        view, call = self.view, self.view.call
        assert call is not None
        self.met("stuck")
        self.met("moved-twice")
        if isinstance(event, CallRaise):
            self.found(
                event, "stuck", f"{event.method}() succeeds after an earlier failure", f"it raised {event.error}"
            )
        elif event.method == "sleep" and not view.asleep() and not (view.live | view.unsure):
            left = [a for a in view.due() if a.name not in view.ledger.out]
            self.found(event, "stuck", "sleep() gets fully asleep", f"{tags_of(left)} is resident")
        elif event.method == "wake_up" and view.ledger.out:
            self.found(event, "stuck", "wake_up() gets fully awake", f"{view.names(view.ledger.out)} is released")
        elif any(call.moves(name) > 1 for name, _ in [*call.paused, *call.resumed]):
            self.found(event, "moved-twice", "nothing is released or resumed twice", "an allocation moved repeatedly")


class ReleasedIsLeftAlone(Fold):
    """LC-15: while a region is released nothing frees, allocates in or reads that region."""

    rule = "LC-15"
    sees = (SaverPause, SaverFree, SaverAlloc, SaverTouch, SaverFatal)

    def on(self, event: AnyEvent) -> None:
        view = self.view
        if isinstance(event, SaverPause):
            for code in ("free-in-released", "alloc-in-released", "read-in-released"):
                self.met(code)
        elif isinstance(event, SaverFree) and event.released and not (view.call and view.call.method == "close"):
            self.found(event, "free-in-released", "nothing frees a released region", f"{event.alloc} was freed")
        elif isinstance(event, SaverAlloc):
            out = [n for n in view.ledger.out if view.named(n).tag == event.tag]
            if out:
                self.found(
                    event, "alloc-in-released", f"nothing allocates in {event.tag}", f"{event.alloc} was allocated"
                )
        elif isinstance(event, SaverTouch):
            self.found(event, "read-in-released", f"nothing reads {event.tag}", f"{event.how} of {event.alloc}")
        elif isinstance(event, SaverFatal) and event.reason == "no-backup":
            self.found(
                event, "read-in-released", "nothing reads a released region", f"its backup, which {event.alloc} lacks"
            )


class GroupsRebuilt(Fold):
    """LC-16: torn-down groups are rebuilt with what they were created with; no group, or one gone, is fine.

    A call without a group counts as fine only if it moved memory or groups: it did its work without one.
    """

    rule = "LC-16"
    sees = (GroupCreate, GroupDestroy, Change, GroupUse, CallEnd, CallRaise)

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self.args: dict[str, str] = {}
        self.down: set[str] = set()

    def on(self, event: AnyEvent) -> None:
        view = self.view
        if isinstance(event, GroupCreate):
            self._created(event)
        elif isinstance(event, GroupDestroy):
            self.down.add(event.name)
        elif isinstance(event, Change) and event.what == "groups.gone":
            self.down -= set(event.facts.get("groups", ()))
        elif isinstance(event, GroupUse) and event.name in self.down and view.call and view.call.method == "train":
            self.met("not-rebuilt")
            if not event.alive:
                self.found(event, "not-rebuilt", f"group {event.name} is rebuilt by its next use", "it is torn down")
        elif isinstance(event, (CallEnd, CallRaise)) and event.method in MOVERS and view.offload:
            self._without_group(event)

    def _created(self, event: GroupCreate) -> None:
        args = ", ".join(f"{k}={v}" for k, v in sorted(event.args.items()))
        first = self.args.setdefault(event.name, args)
        if event.name in self.view.groups and self.view.call is not None:
            self.met("rebuilt-differently")
            self.met("not-rebuilt")
            if first != args:
                self.found(event, "rebuilt-differently", f"group {event.name} has {first}", args)
        self.down.discard(event.name)

    def _without_group(self, event: CallEnd | CallRaise) -> None:
        view, call = self.view, self.view.call
        assert call is not None
        without = not view.groups or "gone" in view.groups.values()
        if not without or call.faulted or view.filled or refused_live(view, event):
            return
        if isinstance(event, CallRaise):
            self.found(
                event, "raised-without-group", f"{event.method}() without a group is fine", f"it raised {event.error}"
            )
        elif call.effects:
            self.met("raised-without-group")


class BackedUpIsUnchanged(Fold):
    """LC-17: backed-up regions are bit-identical after a cycle and addresses are unchanged."""

    rule = "LC-17"
    sees = (SaverPause, SaverResume, Data, CallEnd)

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self.before: dict[str, str] = {}
        self.addresses: dict[str, int] = {}

    def on(self, event: AnyEvent) -> None:
        if isinstance(event, SaverPause):
            self.addresses.setdefault(event.alloc, self.view.named(event.alloc).address)
            if event.backup:
                self.before[event.alloc] = self.view.contents[event.alloc]
        elif isinstance(event, SaverResume) and event.address != self.addresses.get(event.alloc, event.address):
            self.found(event, "address-changed", "addresses are unchanged", f"{event.alloc} came back elsewhere")
        elif isinstance(event, Data) and event.how != "read" and self._training():
            self.before.pop(event.alloc, None)
        elif ended(self, event, "wake_up") and not self.view.ledger.out:
            self._compare(event)

    def _training(self) -> bool:
        return self.view.call is not None and self.view.call.method == "train"

    def _compare(self, event: AnyEvent) -> None:
        for name, before in self.before.items():
            allocation = self.view.ledger.allocations.get(name)
            self.met("content-changed")
            self.met("address-changed")
            if allocation is None or allocation.address != self.addresses[name]:
                where = "is gone" if allocation is None else "lies elsewhere"
                self.found(event, "address-changed", "addresses are unchanged after a cycle", f"{name} {where}")
            elif self.view.contents[name] != before:
                self.found(
                    event, "content-changed", "backed-up content is bit-identical after a cycle", f"{name} differs"
                )
        self.before.clear()


class ParametersUntilSent(Fold):
    """LC-19: rematerialised parameters stay resident through `sleep()` until they are sent, then are released."""

    rule = "LC-19"
    sees = (Send, SaverPause, SaverResume, CallEnd, CallRaise, SaverFatal)

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self.sent = False
        self.failed = False

    def on(self, event: AnyEvent) -> None:
        view = self.view
        if not view.rematerializes or not view.offload:
            return
        if isinstance(event, Send):
            self.sent = True
        elif isinstance(event, SaverPause) and event.tag == PARAMS and not self.sent:
            self.found(
                event, "params-released-early", f"{PARAMS} stays resident until it is sent", "it was released unsent"
            )
        elif (isinstance(event, SaverResume) and event.tag == PARAMS) or (
            isinstance(event, CallEnd) and event.method == "train"
        ):
            self.sent = False
        elif isinstance(event, SaverFatal) and self.failed:
            self.failed = False
            self.found(event, "unreachable", "an error leaves both ends reachable", "the next call ended the process")
        elif isinstance(event, (CallEnd, CallRaise)) and view.call is not None:
            self._closed(event)

    def _closed(self, event: CallEnd | CallRaise) -> None:
        view, call = self.view, self.view.call
        assert call is not None
        if call.faulted and event.method in (*MOVERS, "update_weights"):
            self.failed = True
            return
        if self.failed and event.method in (*MOVERS, "update_weights") and not view.filled:
            self.failed = False
            self.met("unreachable")
            if isinstance(event, CallRaise):
                self.found(
                    event,
                    "unreachable",
                    "an error leaves both ends reachable",
                    f"{event.method}() raised {event.error}",
                )
        if isinstance(event, CallEnd) and event.method == "sleep" and view.asleep():
            self.met("params-released-early")
        if isinstance(event, CallEnd) and event.method == "update_weights" and view.asleep():
            self.met("params-kept")
            kept = [a for a in view.ledger.allocations.values() if a.tag == PARAMS and a.name not in view.ledger.out]
            if kept:
                self.found(
                    event, "params-kept", f"{PARAMS} is released once it is sent", "it is resident after the sync"
                )


class TagsExist(Fold):
    """LC-20: no release names a tag that no allocation of the run, on any rank, has used."""

    rule = "LC-20"
    sees = (SaverCall, SaverAlloc)

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self.unknown: dict[str, SaverCall] = {}

    def on(self, event: AnyEvent) -> None:
        if isinstance(event, SaverCall) and event.op == "pause":
            self.met("unknown-tag")
            if event.tag is not None and event.tag not in self.view.ledger.seen_tags:
                self.unknown.setdefault(event.tag, event)
        elif isinstance(event, SaverAlloc):
            self.unknown.pop(event.tag, None)

    def end(self) -> None:
        for tag, event in self.unknown.items():
            self.found(
                event, "unknown-tag", "a release names a tag that has allocations", f"{tag} has none: nothing moves"
            )

    def unsaid(self) -> bool:
        return bool(self.unknown)

    def key(self) -> tuple[object, ...]:
        return tuple(sorted(self.unknown))


class KeptGradientsAreCopied(Fold):
    """LC-22: with several adapters, gradients kept across steps are never released without a copy.

    Pending gradients that a call was asked to release and left alone count as in LC-11.
    """

    rule = "LC-22"
    sees = (CallBegin, Data, CallEnd, CallRaise, SaverPause)
    within_call = frozenset({"live"})
    code = "released-without-copy"

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self.copied: dict[str, str] = {}
        self.live: frozenset[str] = frozenset()

    def on(self, event: AnyEvent) -> None:
        if not self.view.config.get("multi_lora"):
            return
        if isinstance(event, CallBegin):
            self.live = frozenset(self.view.live)
        elif isinstance(event, Data) and event.kind == "grads":
            if event.how == "read":
                self.copied[event.alloc] = event.content
            else:
                self.copied.pop(event.alloc, None)
        elif isinstance(event, (CallEnd, CallRaise)):
            if event.method in RELEASERS and self.view.moved and self.live & self.view.live:
                self.met(self.code)
        elif isinstance(event, SaverPause) and event.tag == GRADS:
            self._released(event)

    def _released(self, event: SaverPause) -> None:
        kept = self.view.lost.get(event.alloc)
        if event.backup and event.alloc in self.view.live:
            self.met(self.code)
        elif kept is not None:
            self.met(self.code)
            if self.copied.get(event.alloc) != kept:
                self.found(event, self.code, "kept gradients are copied before their release", f"{event.alloc} was not")

"""LC-01 … LC-10: what a trainer releases, resumes, and leaves alone.

Knows the sentences of these rules as folds. Does not know which implementation or scenario produced a trace. The other
half of the profile is in `recovery`.
"""

from __future__ import annotations

from collections.abc import Iterable

from colocert.rules.fold import Fold
from colocert.rules.view import DEFAULT, GRADS, Call, View
from colocert.trace.events import (
    AnyEvent,
    CallBegin,
    CallEnd,
    CallRaise,
    Change,
    Data,
    GroupUse,
    SaverCall,
    SaverFatal,
    SaverPause,
    SaverResume,
    SaverTouch,
)
from colocert.trace.ledger import Allocation


def ended(fold: Fold, event: AnyEvent, *methods: str) -> Call | None:
    """The call, if `event` is its normal end, it is one of `methods`, and no fault was injected into it."""
    call = fold.view.call
    if isinstance(event, CallEnd) and event.method in methods and call is not None and not call.faulted:
        return call
    return None


def tags_of(allocations: Iterable[Allocation]) -> str:
    """Allocations for a message: their tags."""
    return ", ".join(sorted({a.tag for a in allocations})) or "nothing"


class SleepReleases(Fold):
    """LC-01: under LoRA, `sleep()` releases gradients and default, gradients not after default, each once."""

    rule = "LC-01"
    sees = (CallEnd,)

    def on(self, event: AnyEvent) -> None:
        call = ended(self, event, "sleep")
        if call is None or not self.view.lora or not self.view.offload:
            return
        due = [a for a in self.view.due() if a.tag in (GRADS, DEFAULT)]
        was_resident = [a for a in due if a.name not in call.out_before]
        if not was_resident:
            return
        for tag, code in ((GRADS, "grads-kept"), (DEFAULT, "default-kept")):
            mine = [a for a in was_resident if a.tag == tag]
            if not mine or self.view.holds_live(tag):
                continue
            self.met(code)
            kept = [a for a in mine if a.name not in self.view.ledger.out]
            if kept:
                self.found(event, code, f"sleep() releases {tag}", f"{tag} is resident after sleep()")
        self._once(event, call, was_resident)
        self._order(event, call)

    def _once(self, event: AnyEvent, call: Call, allocations: list[Allocation]) -> None:
        self.met("released-twice")
        moved = [a for a in allocations if call.moves(a.name) > 1]
        if moved:
            self.found(event, "released-twice", "each allocation is moved once", f"{tags_of(moved)} moved repeatedly")

    def _order(self, event: AnyEvent, call: Call) -> None:
        grads, default = (call.saver_calls_on(call.paused, tag) for tag in (GRADS, DEFAULT))
        if not grads or not default:
            return
        self.met("grads-after-default")
        if max(grads) > min(default):
            self.found(event, "grads-after-default", f"{GRADS} not after {DEFAULT}", f"{DEFAULT} was released first")


class WakeResumes(Fold):
    """LC-02: under LoRA, `wake_up()` resumes what was released, default not after gradients, each once.

    What was released is read with LC-01: gradients that a cycle never released are gradients it does not resume. A
    cycle is one whose `sleep()` returned; live gradients may stay out of it (LC-11).
    """

    rule = "LC-02"
    sees = (CallEnd,)

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self.slept: frozenset[str] = frozenset()

    def on(self, event: AnyEvent) -> None:
        view = self.view
        if ended(self, event, "sleep"):
            self.slept = frozenset(tag for tag in (DEFAULT, GRADS) if not view.holds_live(tag))
            return
        if not isinstance(event, CallEnd) or event.method not in ("wake_up", "train"):
            return
        slept, self.slept = self.slept, frozenset()
        call = ended(self, event, "wake_up")
        if call is not None and view.lora:
            self._woken(event, call, slept)

    def _woken(self, event: AnyEvent, call: Call, slept: frozenset[str]) -> None:
        view = self.view
        was_out = [a for a in view.ledger.allocations.values() if a.name in call.out_before]
        if not any(a.tag == DEFAULT for a in was_out):
            return
        for tag, code in ((DEFAULT, "default-not-resumed"), (GRADS, "grads-not-resumed")):
            released = any(a.tag == tag for a in was_out)
            kept = tag in slept and not released and any(a.tag == tag for a in view.due())
            if not released and not kept:
                continue
            self.met(code)
            if kept:
                self.found(event, code, f"{tag} is resumed after a sleep()", f"{tag} was never released in this cycle")
            elif any(a.tag == tag and a.name in view.ledger.out for a in was_out):
                self.found(event, code, f"wake_up() resumes {tag}", f"{tag} is released after wake_up()")
        self.met("resumed-twice")
        moved = [a for a in was_out if call.moves(a.name) > 1]
        if moved:
            self.found(event, "resumed-twice", "each allocation is moved once", f"{tags_of(moved)} moved repeatedly")
        self._order(event, call)

    def _order(self, event: AnyEvent, call: Call) -> None:
        grads, default = (call.saver_calls_on(call.resumed, tag) for tag in (GRADS, DEFAULT))
        if not grads or not default:
            return
        self.met("grads-before-default")
        if max(default) > min(grads):
            self.found(event, "grads-before-default", f"{DEFAULT} not after {GRADS}", f"{GRADS} was resumed first")


class EarlyReleaseOnce(Fold):
    """LC-03: an early release and the `sleep()` that follows release the gradients exactly once between them.

    Gradients that are live when `sleep()` returns were rightly kept by both (LC-11).
    """

    rule = "LC-03"
    sees = (SaverPause, SaverResume, SaverFatal, CallBegin, CallEnd, CallRaise)

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self.open = False
        self.count = 0

    def on(self, event: AnyEvent) -> None:
        if not self.view.lora or not self.view.offload:
            return
        if isinstance(event, SaverPause):
            self.count += event.tag == GRADS
        elif isinstance(event, SaverResume) and event.tag == GRADS:
            self.open, self.count = False, 0
        elif isinstance(event, SaverFatal):
            self._fatal(event)
        elif isinstance(event, CallEnd) and event.method == "offload_grad_buffer":
            self.open = self.open or self._released_early()
        elif isinstance(event, CallEnd) and event.method == "sleep" and self.open:
            self._closed(event)
        elif self._abandoned(event):
            self.open = False

    @staticmethod
    def _abandoned(event: AnyEvent) -> bool:
        """Whether no `sleep()` is going to follow the early release."""
        if isinstance(event, CallBegin):
            return event.method in ("train", "wake_up")
        return isinstance(event, CallRaise) and event.method == "sleep"

    def _released_early(self) -> bool:
        """Whether the call that ends found gradients resident: only then is there a release to share."""
        call = self.view.call
        grads = {a.name for a in self.view.ledger.allocations.values() if a.tag == GRADS}
        return call is not None and not call.faulted and not grads <= call.out_before

    def _fatal(self, event: SaverFatal) -> None:
        call = self.view.call
        again = event.op == "pause" and event.reason == "double-release" and event.tag in (GRADS, None)
        if self.count and call and call.method in ("sleep", "offload_grad_buffer") and again and not self.view.faults:
            self.found(event, "released-again", f"{GRADS} is released exactly once", f"a second release of {GRADS}")

    def _closed(self, event: AnyEvent) -> None:
        grads = sum(a.tag == GRADS for a in self.view.ledger.allocations.values())
        self.open = False
        if self.view.holds_live(GRADS):
            return
        self.met("released-again")
        self.met("never-released")
        if self.count > grads:
            self.found(
                event, "released-again", f"{GRADS} is released exactly once", f"it was released {self.count} times"
            )
        elif self.count == 0 and grads:
            self.found(event, "never-released", f"{GRADS} is released by one of the two", "neither released it")
        self.count = 0


class NothingDue(Fold):
    """LC-04: a call whose target state already holds makes no saver call and raises nothing.

    A call that does so counts only for a trainer that has released memory before in this trace: where nothing ever
    moves every target state holds, and leaving the saver alone is no merit.
    """

    rule = "LC-04"
    sees = (CallBegin, SaverCall, CallRaise)
    within_call = frozenset({"holds"})

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self.holds = False

    def on(self, event: AnyEvent) -> None:
        if isinstance(event, CallBegin):
            self.holds = self._target_holds(event.method)
            if self.holds and self.view.moved:
                self.met("saver-call")
                self.met("raised")
        elif not self.holds:
            return
        elif isinstance(event, SaverCall):
            self.holds = False
            self.found(event, "saver-call", f"{self._what()} calls no saver", f"it called {event.op}({event.tag!r})")
        elif isinstance(event, CallRaise):
            self.holds = False
            if not (self.view.call and self.view.call.faulted):
                self.found(event, "raised", f"{self._what()} raises nothing", f"it raised {event.error}")

    def _what(self) -> str:
        return f"{self.view.call.method if self.view.call else 'a call'}() with its target state already holding"

    def _target_holds(self, method: str) -> bool:
        view = self.view
        if not view.offload:
            return False
        if method == "sleep":
            return view.asleep()
        if method == "wake_up":
            return not view.ledger.out
        if method == "offload_grad_buffer" and view.lora:
            grads = [a.name for a in view.ledger.allocations.values() if a.tag == GRADS]
            return bool(grads) and all(name in view.ledger.out for name in grads)
        return False


class NoIllegalTransition(Fold):
    """LC-05: without an injected fault no sequence of calls makes the saver see an illegal transition.

    Each saver call is an occasion for one; each that is made while some allocations are released and some are not is
    an occasion for a tagless one. What is partial is read from the ledger at the call, not at the allocation where it
    ended: those before it have moved by then.
    """

    rule = "LC-05"
    sees = (CallBegin, SaverCall, SaverFatal)
    within_call = frozenset({"partial"})

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self.partial = False

    def on(self, event: AnyEvent) -> None:
        if self.view.faults:
            return
        if isinstance(event, CallBegin):
            self.partial = False
        elif isinstance(event, SaverCall):
            self.partial = 0 < len(self.view.ledger.out) < len(self.view.ledger.allocations)
            self.met("double-release" if event.op == "pause" else "double-resume")
            if self.partial:
                self.met("tagless-after-partial")
        elif isinstance(event, SaverFatal) and event.reason in ("double-release", "double-resume"):
            code = "tagless-after-partial" if event.tag is None and self.partial else event.reason
            state = "released" if event.op == "pause" else "resident"
            self.found(event, code, f"{event.op} only of what is not {state}", f"{event.alloc} is {state}: exit(1)")


class SameEffects(Fold):
    """LC-06: from the second cycle on, the same starting state and calls have the same saver effects.

    An occurrence is a call that moves memory and is compared with an earlier one from the same state.
    """

    rule = "LC-06"
    sees = (CallBegin, CallEnd, CallRaise, Change)
    within_call = frozenset({"start"})

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self.cycled = False
        self.slept = False
        self.start: tuple[object, ...] | None = None
        self.seen: dict[tuple[object, ...], str] = {}

    def on(self, event: AnyEvent) -> None:
        view = self.view
        if isinstance(event, CallBegin):
            starts = self.cycled and not view.faults
            self.start = (event.method, *self._state()) if starts else None
        elif isinstance(event, (CallEnd, CallRaise)) and view.call is not None:
            if self.start is not None and not view.faults:
                self._compare(event, "returns" if isinstance(event, CallEnd) else "raises")
            if view.asleep():
                self.slept = True
            elif self.slept and not view.ledger.out:
                self.slept = False
                self.cycled = True
        elif isinstance(event, Change):
            self.start = None

    def _state(self) -> tuple[object, ...]:
        view = self.view
        return (
            frozenset(view.ledger.out),
            tuple(sorted(view.groups.items())),
            frozenset(view.live),
            frozenset(view.lost),
            view.filled,
        )

    def _compare(self, event: AnyEvent, outcome: str) -> None:
        call = self.view.call
        assert call is not None
        assert self.start is not None
        effects = "; ".join([*(f"-{n}" for n, _ in call.paused), *(f"+{n}" for n, _ in call.resumed), outcome])
        first = self.seen.setdefault(self.start, "")
        if not first:
            self.seen[self.start] = effects
        elif first != effects:
            self.found(event, "drift", f"{call.method}() has the effects it had before: {first}", effects)
        elif call.paused or call.resumed:
            self.met("drift")


class WakeWhileResident(Fold):
    """LC-07: `wake_up()` while resident resumes nothing; groups that were gone are usable at their next use.

    Resuming nothing counts only for a trainer that has released memory before in this trace, as in LC-04.
    """

    rule = "LC-07"
    sees = (CallBegin, SaverCall, Change, CallEnd, GroupUse)
    within_call = frozenset({"resident"})

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self.resident = False
        self.promised: set[str] = set()
        self.gone: set[str] = set()

    def on(self, event: AnyEvent) -> None:
        view = self.view
        if isinstance(event, CallBegin):
            self.resident = event.method == "wake_up" and not view.ledger.out and view.offload
            if self.resident and view.moved:
                self.met("resumed-while-resident")
        elif isinstance(event, SaverCall) and event.op == "resume" and self.resident:
            self.resident = False
            self.found(event, "resumed-while-resident", "wake_up() while resident resumes nothing", "a resume call")
        elif isinstance(event, Change) and event.what == "groups.gone":
            self.gone = set(event.facts.get("groups", ()))
        elif ended(self, event, "wake_up"):
            self.promised, self.gone = self.promised | self.gone, set()
        elif isinstance(event, GroupUse) and event.name in self.promised:
            self._used(event)

    def _used(self, event: GroupUse) -> None:
        self.promised.discard(event.name)
        self.met("groups-unusable")
        if not event.alive:
            self.found(
                event, "groups-unusable", f"group {event.name} is usable after wake_up()", "there is no such group"
            )


class EarlyReleaseUndone(Fold):
    """LC-08: an early release that no `sleep()` follows is undone; no computation touches a released region.

    A computation counts once something has been released in this trace: before that there is nothing to touch.
    """

    rule = "LC-08"
    sees = (CallBegin, SaverTouch, Data, CallEnd)
    within_call = frozenset({"early"})

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self.early = False

    def on(self, event: AnyEvent) -> None:
        view = self.view
        if isinstance(event, CallBegin):
            self.early = self._only_gradients_out()
        elif isinstance(event, SaverTouch):
            if view.call is not None and view.call.method == "train":
                self.found(
                    event, "computed-on-released", "train() computes on resident memory", f"{event.tag} is released"
                )
        elif isinstance(event, Data) and view.call is not None and view.call.method == "train" and event.how != "zero":
            if view.moved:
                self.met("computed-on-released")
        elif self.early and isinstance(event, CallEnd):
            self._closed(event)

    def _only_gradients_out(self) -> bool:
        out = {self.view.named(name).tag for name in self.view.ledger.out}
        return out == {GRADS} and self.view.lora

    def _closed(self, event: CallEnd) -> None:
        call = self.view.call
        if call is None or call.faulted or event.method not in ("wake_up", "train"):
            return
        code = "early-release-left" if event.method == "wake_up" else "trained-released"
        self.met(code)
        if event.method == "wake_up" and self._only_gradients_out():
            self.found(
                event, code, f"wake_up() undoes the early release of {GRADS}", f"{GRADS} is released after wake_up()"
            )
        elif event.method == "train" and not call.resumed and self._only_gradients_out():
            self.found(event, code, "train() wakes or refuses", f"it returned with {GRADS} released throughout")


class FullParameterReleases(Fold):
    """LC-09: without LoRA, `sleep()` releases everything managed and `wake_up()` mirrors it."""

    rule = "LC-09"
    sees = (SaverPause, CallBegin, CallEnd)

    def on(self, event: AnyEvent) -> None:
        view = self.view
        if view.lora or not view.offload:
            return
        call = ended(self, event, "sleep", "wake_up", "offload_grad_buffer")
        if isinstance(event, SaverPause) and view.call and view.call.method == "offload_grad_buffer":
            self.found(
                event, "lora-step-released", "a LoRA-only step releases nothing without LoRA", f"{event.tag} released"
            )
        elif isinstance(event, CallBegin) and event.method == "offload_grad_buffer":
            self.met("lora-step-released")
        elif call is not None and call.method == "sleep":
            due = [a for a in view.due() if a.name not in call.out_before and not view.holds_live(a.tag)]
            if due:
                self.met("kept")
            kept = [a for a in due if a.name not in view.ledger.out]
            if kept:
                self.found(event, "kept", "sleep() releases everything managed", f"{tags_of(kept)} is resident")
        elif call is not None and call.method == "wake_up" and call.out_before:
            self.met("not-resumed")
            out = [a for a in view.ledger.allocations.values() if a.name in view.ledger.out]
            if out:
                self.found(event, "not-resumed", "wake_up() resumes what was released", f"{tags_of(out)} is released")


class RefusedWhenOff(Fold):
    """LC-10: `sleep()` and `wake_up()` raise before any effect when train offload is off."""

    rule = "LC-10"
    sees = (CallBegin, CallEnd, CallRaise, SaverFatal)
    methods: tuple[str, ...] = ("sleep", "wake_up")

    def on(self, event: AnyEvent) -> None:
        call = self.view.call
        if not self.binds() or call is None or call.method not in self.methods:
            return
        if isinstance(event, CallBegin):
            self.met("no-raise")
            self.met("effect-before-raise")
        elif isinstance(event, CallEnd):
            self.found(event, "no-raise", f"{call.method}() raises", "it returned")
        elif isinstance(event, CallRaise) and call.effects:
            self.found(
                event, "effect-before-raise", f"{call.method}() raises before any effect", "memory or groups moved"
            )
        elif isinstance(event, SaverFatal) and not self.view.faults:
            self.found(
                event, "effect-before-raise", f"{call.method}() raises before any effect", "the saver was called"
            )

    def binds(self) -> bool:
        """Whether the scenario is one in which the calls must be refused."""
        return not self.view.offload


class EarlyReleaseRefused(RefusedWhenOff):
    """LC-21: `offload_grad_buffer()` without LoRA or without train offload raises before any effect."""

    rule = "LC-21"
    methods = ("offload_grad_buffer",)

    def binds(self) -> bool:
        return not self.view.offload or not self.view.lora

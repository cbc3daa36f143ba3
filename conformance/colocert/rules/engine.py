"""EN-01 … EN-04: an engine that gives memory back by tag, takes weights and adapters, and is asked all the while.

Knows the sentences of these rules as folds over a whole run. Does not know which engine or scenario produced a trace.
"""

from __future__ import annotations

from colocert.rules.engine_state import MEMORY, UNTYPED, Asked, EngineFold
from colocert.rules.run import RunView
from colocert.trace.events import (
    AnyEvent,
    CallBegin,
    CallEnd,
    CallRaise,
    Change,
    EngineToken,
    SaverFatal,
    SaverResume,
)


class ReleasedIsASet(EngineFold):
    """EN-01: what is released is a set of tags; a resume takes only released ones; ready means the set is empty.

    A call of which the suite made something fail is judged by the next one. Two moves at once are not judged.
    """

    rule = "EN-01"

    def begun(self, event: CallBegin, asked: Asked) -> None:
        if asked.method == "release" and asked.tags & asked.before:
            self.met("released-again")
        if asked.method == "resume" and asked.tags - asked.before:
            self.met("resumed-resident")
            self.met("untyped-error")

    def returned(self, event: CallEnd | CallRaise, asked: Asked) -> None:
        if asked.method not in MEMORY or sum(o.method in MEMORY for o in self.now.others()) > 1:
            return
        before, after, tags = asked.before, self.now.released(), asked.tags
        wanted = before | tags if asked.method == "release" else before - tags
        if isinstance(event, CallEnd):
            self.met("wrong-set")
            if after != wanted:
                self._wrong(event, asked, wanted, after)
            return
        low, high = min(before, wanted, key=len), max(before, wanted, key=len)
        if not low <= after <= high:
            self._wrong(event, asked, before, after)
        if asked.method == "resume" and tags - before and not asked.faulted and event.error in UNTYPED:
            told = f"resume() of {_tags(tags - before)}, which is resident, raises {event.error}"
            self.found(event, "untyped-error", "a no-op, or an error of a type of its own", told)

    def answered(self, event: CallEnd | CallRaise, asked: Asked) -> None:
        self._served(event, asked, event.error if isinstance(event, CallRaise) else "")

    def overdue(self, event: Change, asked: Asked) -> None:
        if asked.method == "generate":
            self._served(event, asked, "no answer within the deadline")

    def _served(self, event: AnyEvent, asked: Asked, instead: str) -> None:
        now = self.now
        sure = asked.adapter in now.sure if asked.adapter else now.known("")
        if asked.blocked or asked.beside or asked.faulted or not sure:
            return
        self.met("refused-while-ready")
        if instead:
            self.found(event, "refused-while-ready", "nothing is released, so requests are served", instead)

    def happened(self, event: AnyEvent) -> None:
        if isinstance(event, SaverFatal) and event.reason in ("double-release", "double-resume"):
            code = "released-again" if event.reason == "double-release" else "resumed-resident"
            expected = "a tag that is in that state already is not moved again"
            self.found(event, code, expected, f"the saver ends the process: {event.op}({event.tag})")
        elif isinstance(event, Change) and event.what == "engine.ready" and self.now.released():
            self.met("ready-while-released")
            if event.facts["ready"]:
                told = f"ready, with {_tags(self.now.released())} released"
                self.found(event, "ready-while-released", "not ready while a tag is released", told)

    def _wrong(self, event: CallEnd | CallRaise, asked: Asked, wanted: frozenset[str], after: frozenset[str]) -> None:
        told = f"{_tags(after)} released after {asked.method}({_tags(asked.tags)})"
        self.found(event, "wrong-set", f"{_tags(wanted)} released", told)


class NoTokenUnlessReady(EngineFold):
    """EN-02: no token while a tag is released, the base is invalid or an update failed; the request is refused or held.

    An adapter's failed update concerns the requests for that adapter. An update has failed where something that the
    suite made fail ended it in an error; one that the engine refused was never begun.
    """

    rule = "EN-02"

    def begun(self, event: CallBegin, asked: Asked) -> None:
        if asked.method == "generate":
            self._condition(asked)
        elif asked.method == "release" and self.now.requests():
            self.met("computed-released")
        elif asked.method == "update_base" and self.now.requests():
            self.met("computed-invalid")

    def _condition(self, asked: Asked) -> None:
        now = self.now
        if not now.blocked(asked.adapter):
            return
        self.met("hangs")
        if now.released():
            self.met("computed-released")
        elif not now.base_valid:
            self.met("computed-invalid")
        if asked.failed & {"", asked.adapter}:
            self.met("computed-after-failure")

    def token(self, event: EngineToken, asked: Asked) -> None:
        who = f"a token for {asked.adapter or 'the base'}"
        if event.released:
            told = f"{who} with {', '.join(event.released)} released"
            self.found(event, "computed-released", "no token is computed while a tag is released", told)
        elif not event.base_valid:
            expected = "no token is computed with weights that were lost or are of several versions"
            self.found(event, "computed-invalid", expected, who)
        if failed := self.now.failed & asked.failed & {"", asked.adapter}:
            told = f"{who} after a failed update of {' and '.join(sorted(f or 'the base' for f in failed))}"
            self.found(event, "computed-after-failure", "no token is computed until an update has succeeded", told)

    def answered(self, event: CallEnd | CallRaise, asked: Asked) -> None:
        if asked.ready or not asked.blocked or asked.faulted:
            return
        self.met("neither-refused-nor-held")
        self.met("untyped-refusal")
        if isinstance(event, CallRaise) and event.error in UNTYPED:
            self.found(event, "untyped-refusal", "the refusal is an error of a type of its own", event.error)
        elif isinstance(event, CallEnd) and not asked.tokens:
            told = "the request returned, and nothing was computed"
            self.found(event, "neither-refused-nor-held", "the request is refused, or held until ready", told)

    def overdue(self, event: Change, asked: Asked) -> None:
        if asked.blocked:
            self.found(event, "hangs", "a request ends within its deadline", "no answer and no error")


class NothingFlushedIsHit(EngineFold):
    """EN-03: what was cached before a flush is not hit once the KV has come back, whenever the flush was asked for.

    `entries`: cached entry to its prompt. `doomed`: those that a flush met, and its code. `stale`: after the resume.
    """

    rule = "EN-03"

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.entries: dict[int, str] = {}
        self.doomed: dict[int, str] = {}
        self.stale: dict[int, str] = {}

    def returned(self, event: CallEnd | CallRaise, asked: Asked) -> None:
        if asked.method == "flush" and isinstance(event, CallEnd):
            code = "hit-after-late-flush" if "kv_cache" in asked.before else "hit-after-flush"
            for entry in self.entries:
                self.doomed.setdefault(entry, code)

    def happened(self, event: AnyEvent) -> None:
        if isinstance(event, SaverResume) and event.tag == "kv_cache":
            self.stale.update(self.doomed)

    def token(self, event: EngineToken, asked: Asked) -> None:
        for code in sorted({c for entry, c in self.stale.items() if self.entries[entry] == event.prompt}):
            self.met(code)
        if event.hit in self.stale:
            told = f"a request with prompt {event.prompt} goes on from an entry of before"
            self.found(event, self.stale[event.hit], "no entry of before the flush is hit", told)
        self.entries[event.entry] = event.prompt


class ReplacedAtOnce(EngineFold):
    """EN-04: requesters see one version of an adapter or the next, whole; an unknown adapter or none is an error.

    A request may be computed with what was acknowledged when it began, or with what is loaded while it is under way.
    `entries`: cached entry to the adapter tensors it was computed with.
    """

    rule = "EN-04"

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.entries: dict[int, tuple[str, frozenset[str]]] = {}

    def token(self, event: EngineToken, asked: Asked) -> None:
        labels = frozenset(event.adapters)
        if asked.adapter and self.now.known(asked.adapter):
            self._with_adapter(event, asked, labels)
        self.entries[event.entry] = (event.prompt, labels)

    def _with_adapter(self, event: EngineToken, asked: Asked, labels: frozenset[str]) -> None:
        self.met("torn-adapter")
        if len(labels) > 1 or "?" in labels:
            told = f"its tensors are of {', '.join(sorted(labels))}"
            self.found(event, "torn-adapter", f"{asked.adapter} is of one version and whole", told)
            return
        if asked.allowed and asked.adapter not in self.now.failed:
            self.met("not-the-acknowledged")
            if not labels <= asked.allowed or not labels:
                told = f"computed with {', '.join(sorted(labels)) or 'the base alone'}"
                expected = " or ".join(sorted(asked.allowed))
                self.found(event, "not-the-acknowledged", f"computed with {expected}", told)
        before = self.entries.get(event.hit, (event.prompt, labels))[1]
        if len(asked.allowed) > 1 or any(p == event.prompt and w != labels for p, w in self.entries.values()):
            self.met("mixed-versions")
        if len(asked.seen) > 1 or before != labels:
            told = ", ".join(sorted(asked.seen | before))
            self.found(event, "mixed-versions", "a request is computed with one version from its first token", told)

    def answered(self, event: CallEnd | CallRaise, asked: Asked) -> None:
        now = self.now
        if asked.ready and not now.known(asked.adapter):
            code = "unknown-served" if asked.adapter else "base-request-served"
            self.met(code)
            if isinstance(event, CallEnd):
                told = f"a request for {asked.adapter or 'no adapter'} was answered"
                self.found(event, code, "it is an error", told)
        if asked.blocked or asked.faulted or len(asked.allowed) < 2 or asked.beside != {"load_adapter"}:
            return
        self.met("missing-in-between")
        if isinstance(event, CallRaise):
            told = f"a request for {asked.adapter} while it is being replaced raises {event.error}"
            self.found(event, "missing-in-between", "it is served with the old version or the new", told)


def _tags(tags: frozenset[str]) -> str:
    return ", ".join(sorted(tags)) or "nothing"

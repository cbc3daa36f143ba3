"""The folds of the live profile about what is the same: losses, tokens and adapters' digests of a running pair.

Knows what LV-02, LV-03 and ML-01 compare. Does not know how a pair computes any of it, and no bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from colocert.rules.fold import RunFold
from colocert.rules.run import RunView
from colocert.trace.events import AnyEvent, CallBegin, CallEnd, LossSeen, RunBegan, StateSeen, TokensSeen

WEIGHTS = ("params", "masters")
"""What of a new adapter is drawn anew; the rest starts at zero."""


class LossesEqual(RunFold):
    """LV-02. Judged at the end: two runs without hand-offs have to agree, and to train, or nothing can be said."""

    rule = "LV-02"
    sees = (LossSeen, RunBegan, StateSeen)

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.runs: list[_LossRun] = []

    def on(self, event: AnyEvent) -> None:
        if isinstance(event, RunBegan):
            self.runs.append(_LossRun(event.kind))
        elif self.runs and isinstance(event, LossSeen):
            self.runs[-1].losses.append(event)
        elif self.runs and isinstance(event, StateSeen) and event.of == "fingerprint":
            self.runs[-1].state = event

    def end(self) -> None:
        plain = [run for run in self.runs if run.kind == "plain"]
        if len(plain) < 2 or plain[0].told() != plain[1].told() or not plain[0].trains():
            return
        for run in self.runs:
            if run.kind == "hand-offs" and len(run.losses) == len(plain[0].losses):
                self._losses(plain[0], run)
                self._detached(plain[0], run)
                self._state(plain, run)

    def _losses(self, plain: _LossRun, run: _LossRun) -> None:
        self.met("losses-differ")
        for step, (event, wanted) in enumerate(zip(run.losses, plain.losses, strict=True), 1):
            if event.loss != wanted.loss:
                observed = (
                    f"step {step} on batch {event.batch} has the loss {event.loss}, without hand-offs {wanted.loss}"
                )
                self.found(
                    event, "losses-differ", "losses are those of the run without hand-offs, bit for bit", observed
                )
                return

    def _detached(self, plain: _LossRun, run: _LossRun) -> None:
        """A step after which the same batch has the same loss again, where without hand-offs it has another."""
        self.met("optimizer-detached")
        for one, two in plain.repeats():
            event = run.losses[two]
            if run.losses[one].loss == event.loss and plain.losses[one].loss != plain.losses[two].loss:
                observed = (
                    f"the loss on batch {event.batch} is {event.loss} at step {one + 1} and at step {two + 1} alike"
                )
                self.found(event, "optimizer-detached", "steps change the tensors that forward uses", observed)
                return

    def _state(self, plain: list[_LossRun], run: _LossRun) -> None:
        states = [r.state.facts for r in plain[:2] if r.state is not None]
        if run.state is None or len(states) < 2:
            return
        stable = {name: value for name, value in states[0].items() if states[1].get(name) == value}
        if not stable:
            return
        self.met("state-differs")
        differ = sorted(name for name, value in stable.items() if run.state.facts.get(name) != value)
        if differ:
            observed = f"fingerprint() differs in {', '.join(differ)}"
            self.found(run.state, "state-differs", "the logical state is that of the run without hand-offs", observed)


class _LossRun:
    """One run. Not kept across exploration: this profile has none."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.losses: list[LossSeen] = []
        self.state: StateSeen | None = None

    def told(self) -> list[tuple[int, str]]:
        return [(event.batch, event.loss) for event in self.losses]

    def trains(self) -> bool:
        """Whether some batch has another loss when its turn comes again."""
        return any(self.losses[one].loss != self.losses[two].loss for one, two in self.repeats())

    def repeats(self) -> list[tuple[int, int]]:
        """Each place of a batch, and its next one."""
        last: dict[int, int] = {}
        found = []
        for n, event in enumerate(self.losses):
            if event.batch in last:
                found.append((last[event.batch], n))
            last[event.batch] = n
        return found


class TokensEqual(RunFold):
    """LV-03. Each asking against the one after a cycle without training, and trained weights against the delta zero.

    The first is of an engine that has never released anything: what comes back wrong alike each time differs from it.
    """

    rule = "LV-03"
    sees = (TokensSeen,)

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.asked: dict[str, list[TokensSeen]] = {}

    def on(self, event: AnyEvent) -> None:
        assert isinstance(event, TokensSeen)
        self.asked.setdefault(event.when, []).append(event)

    def end(self) -> None:
        trained = self.asked.get("trained", [])
        if not trained or _tokens(trained) != _tokens(self.asked.get("trained-again", [])):
            return
        for when in ("untrained", "trained", "further"):
            self._cycled(self.asked.get(when, []), self.asked.get(f"{when}-cycled", []))
        self._delta(self.asked.get("untrained", []), trained)

    def _cycled(self, before: list[TokensSeen], after: list[TokensSeen]) -> None:
        if not before or len(before) != len(after):
            return
        self.met("tokens-differ")
        for one, two in zip(before, after, strict=True):
            if one.tokens != two.tokens:
                observed = (
                    f"prompt {one.prompt} gave {one.tokens} before a cycle without training and {two.tokens} after"
                )
                self.found(two, "tokens-differ", "tokens for a seed are the same before and after a cycle", observed)
                return

    def _delta(self, untrained: list[TokensSeen], trained: list[TokensSeen]) -> None:
        if not untrained:
            return
        self.met("delta-not-served")
        if _tokens(untrained) == _tokens(trained):
            observed = "for every prompt the trained weights give the tokens of the untrained ones"
            self.found(trained[0], "delta-not-served", "tokens differ from the base's: the delta is not zero", observed)


class AdaptersApart(RunFold):
    """ML-01. An adapter's digests between two looks during which nothing was asked of it by name.

    Counts from where training has been seen to change the digests of what was trained.
    """

    rule = "ML-01"
    sees = (CallBegin, CallEnd, StateSeen)
    kinds: ClassVar[Mapping[str, str]] = {
        "params": "weights-touched",
        "masters": "weights-touched",
        "moments": "moments-touched",
        "gradients": "gradients-touched",
    }

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.fresh: dict[str, dict[str, str]] = {}
        self.seen: dict[str, dict[str, str]] = {}
        self.worked: set[str] = set()
        self.other: set[str] = set()
        self.renewed: dict[str, dict[str, str]] = {}
        self.telling = False

    def on(self, event: AnyEvent) -> None:
        if isinstance(event, CallBegin):
            if event.method in ("train_step", "renew_adapter"):
                self.worked.add(event.subject)
                self.other |= set(self.seen) - {event.subject}
            elif event.method.startswith("to_"):
                self.other |= set(self.seen)
            if event.method == "renew_adapter":
                self.renewed[event.subject] = self.seen.get(event.subject, {})
        elif isinstance(event, StateSeen) and event.of != "fingerprint":
            self._state(event.of, event)

    def _state(self, name: str, event: StateSeen) -> None:
        known = self.seen.get(name)
        self.telling = self.telling or (known is not None and name in self.worked and known != event.facts)
        if not self.telling:
            pass
        elif name in self.renewed:
            self._pristine(name, event, self.renewed.pop(name))
        elif known is not None and name not in self.worked and name in self.other:
            self._untouched(name, event, known)
        self.fresh.setdefault(name, event.facts)
        self.seen[name] = event.facts
        self.worked.discard(name)
        self.other.discard(name)

    def _untouched(self, name: str, event: StateSeen, known: dict[str, str]) -> None:
        for kind, code in self.kinds.items():
            if kind not in known:
                continue
            self.met(code)
            if event.facts.get(kind) != known[kind]:
                observed = f"the {kind} of {name} changed"
                self.found(event, code, f"work on other adapters leaves the {kind} of {name} as they were", observed)

    def _pristine(self, name: str, event: StateSeen, dropped: dict[str, str]) -> None:
        fresh = self.fresh[name]
        self.met("slot-not-pristine")
        mine = event.facts
        wrong = [kind for kind, value in fresh.items() if kind not in WEIGHTS and mine.get(kind) != value]
        wrong += [k for k in WEIGHTS if k in dropped and dropped[k] != fresh.get(k) and mine.get(k) == dropped[k]]
        if wrong:
            observed = f"a new adapter in the slot of {name} has the old one's {', '.join(wrong)}"
            self.found(event, "slot-not-pristine", "a reused slot starts as a new one", observed)


def _tokens(asked: list[TokensSeen]) -> list[list[int]]:
    return [event.tokens for event in asked]

"""Exploration: every sequence of lifecycle calls, shortest first, with every single fault, judged as it runs.

Knows how to extend a sequence by a call, how to merge sequences that reach the same state, and how to count what that
covers. Does not know which calls or faults matter, or what a finding means.

A trainer with a `fingerprint()` promises that equal fingerprints behave equally from there on. Together with the
state of every double and every fold it makes a state: sequences that reach the same state are extended once and
counted as many times as they occur. The promise is audited: where two sequences first meet, the second one is
extended as well, and a difference ends the merging. Without a fingerprint every sequence is run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from colocert.record.drive import OPTIONAL_METHODS, Session, build
from colocert.record.manifest import COMPLETE, ExplorationRecord
from colocert.record.scenarios import Scenario
from colocert.record.steps import DEVICE_CAPACITY
from colocert.rig.contract import Claims
from colocert.rig.rig import Rig
from colocert.rules.catalogue import FOLDS, Rule
from colocert.rules.fold import BaseFold, Panel
from colocert.rules.view import View
from colocert.trace.events import AnyEvent

METHODS = ("sleep", "wake_up", "train", "update_weights")
AUDITED_MEETINGS = 60
_TOKEN = re.compile(r"#\d+")

FaultPlan = tuple[str, str, int]
"""A fault for one call: point, when, and which passing of the point within the call."""


class Taken(msgspec.Struct, frozen=True):
    """One call of a sequence, with the fault that was armed for it."""

    method: str
    fault: FaultPlan | None = None

    def steps(self) -> Iterator[str]:
        """The call as scenario steps."""
        if self.fault is not None:
            point, when, nth = self.fault
            yield f"fault {point} {when}" + (f" {nth}" if nth > 1 else "")
        yield self.method


class _State:
    """A state reached: the shortest sequence to it, and the folds as they stood there."""

    __slots__ = ("key", "panel", "path")

    def __init__(self, path: tuple[Taken, ...], key: str, panel: Panel) -> None:
        self.path, self.key, self.panel = path, key, panel


class _Outcome(msgspec.Struct):
    """What one call from one state led to. `key` is None where the process ended; `points` are fault points passed."""

    key: str | None
    points: tuple[tuple[str, tuple[str, ...]], ...]


class Discovery(msgspec.Struct):
    """The first sequence that showed a rule broken with a code, and in how many runs it showed."""

    rule: str
    code: str
    path: tuple[Taken, ...]
    times: int = 1


class Explorer:
    """One configuration's exploration. `run()` gives the counts; `discoveries` what was found broken.

    `calls` narrows the calls that are taken (none: all that the trainer has). `note` is called before each run with the
    sequence that is about to be run, so that a hang can be named.
    """

    def __init__(
        self,
        implementation: Any,
        claims: Claims,
        scenario: Scenario,
        rules: list[Rule],
        *,
        note: Callable[[str], None] = lambda _: None,
        merge: bool = True,
        calls: tuple[str, ...] = (),
    ) -> None:
        self.implementation, self.claims, self.scenario = implementation, claims, scenario
        self.rules = [rule for rule in rules if rule.explore and rule.profile == scenario.profile]
        self.config = scenario.build_config()
        self._note = note
        self._events: list[AnyEvent] = []
        self._states: dict[str, _State] = {}
        self._cache: dict[tuple[str, str, FaultPlan | None], _Outcome] = {}
        self._audits = AUDITED_MEETINGS
        self.merging = merge
        self.calls = calls
        self.runs = 0
        self.discoveries: dict[tuple[str, str], Discovery] = {}
        self.exercised: dict[str, dict[str, int]] = {}
        self.detail = ""

    def run(self, depth: int, fault_depth: int) -> ExplorationRecord:
        """Takes every sequence of up to `depth` calls, and with every single fault every one of up to `fault_depth`."""
        try:
            return self._run(depth, fault_depth)
        except _BrokenPromise as broken:
            again = Explorer(
                self.implementation,
                self.claims,
                self.scenario,
                self.rules,
                note=self._note,
                merge=False,
                calls=self.calls,
            )
            again.detail = str(broken)
            record = again._run(depth, fault_depth)
            self.discoveries, self.exercised = again.discoveries, again.exercised
            return record

    def _run(self, depth: int, fault_depth: int) -> ExplorationRecord:
        root = self._root()
        clean: dict[str, int] = {root.key: 1}
        faulted: dict[str, int] = {}
        sequences = with_fault = 0
        for level in range(1, max(depth, fault_depth) + 1):
            next_clean: dict[str, int] = {}
            next_faulted: dict[str, int] = {}
            for key, times in clean.items() if level <= depth else ():
                sequences += times * len(self.calls)
                for method in self.calls:
                    outcome = self._extend(key, Taken(method))
                    self._count(next_clean, outcome, times)
                    if level <= fault_depth:
                        with_fault += times * self._with_faults(key, method, outcome, times, next_faulted)
            for key, times in faulted.items() if level <= fault_depth else ():
                with_fault += times * len(self.calls)
                for method in self.calls:
                    self._count(next_faulted, self._extend(key, Taken(method)), times)
            clean, faulted = next_clean, next_faulted
        return ExplorationRecord(
            id=self.scenario.id,
            profile=self.scenario.profile,
            status=COMPLETE,
            depth=depth,
            fault_depth=fault_depth,
            calls=self.calls,
            sequences=sequences,
            faulted=with_fault,
            states=len(self._states) if self.merging else 0,
            runs=self.runs,
            exercised=self.exercised,
            detail=self.detail,
        )

    def _with_faults(self, key: str, method: str, clean: _Outcome, times: int, into: dict[str, int]) -> int:
        seen: dict[str, int] = {}
        plans = 0
        for point, ways in clean.points:
            nth = seen[point] = seen.get(point, 0) + 1
            for when in ways:
                plans += 1
                self._count(into, self._extend(key, Taken(method, (point, when, nth))), times)
        return plans

    @staticmethod
    def _count(into: dict[str, int], outcome: _Outcome, times: int) -> None:
        if outcome.key is not None:
            into[outcome.key] = into.get(outcome.key, 0) + times

    # ---- running one call from one state

    def _root(self) -> _State:
        session = self._build(())
        self.calls = self.calls or (*METHODS, *(m for m in OPTIONAL_METHODS if session.has(m)))
        self.merging = self.merging and session.has("fingerprint")
        view = View()
        panel = Panel(view, [FOLDS[rule.id](view) for rule in self.rules])
        self._fold(panel, ())
        state = _State((), self._key(session, panel, ()), panel)
        self._states[state.key] = state
        session.rig.close()
        return state

    def _extend(self, key: str, taken: Taken) -> _Outcome:
        cached = self._cache.get((key, taken.method, taken.fault))
        if cached is not None:
            return cached
        outcome = self._take(self._states[key], taken)
        self._cache[key, taken.method, taken.fault] = outcome
        return outcome

    def _take(self, state: _State, taken: Taken, *, auditing: bool = False) -> _Outcome:
        path = (*state.path, taken)
        self._note(" ".join(step for t in path for step in t.steps()))
        session = self._build(state.path)
        if taken.fault is not None:
            session.rig.faults.arm(*taken.fault)
        session.call(taken.method)
        session.rig.faults.disarm()
        self.runs += not auditing
        points = tuple(session.rig.faults.passed)
        panel = state.panel.clone()
        self._fold(panel, path, counting=not auditing)
        key = None if session.over else self._key(session, panel, path)
        if key is not None and not auditing:
            self._reached(key, path, panel)
        session.rig.close()
        return _Outcome(key, points)

    def _build(self, path: tuple[Taken, ...]) -> Session:
        """A fresh trainer taken along a path; the events of the path are dropped, those that follow are kept."""
        self._events = []
        rig = Rig(self.config, self.claims, self._events.append, capacity=DEVICE_CAPACITY)
        session = build(self.implementation, rig)
        if path:
            for taken in path:
                if taken.fault is not None:
                    rig.faults.arm(*taken.fault)
                session.call(taken.method)
                rig.faults.disarm()
            self._events.clear()
            rig.faults.passed.clear()
        return session

    def _fold(self, panel: Panel, path: tuple[Taken, ...], *, counting: bool = True) -> None:
        for event in self._events:
            panel.feed(event)
        if not counting:
            return
        for fold in panel.folds:
            if not fold.exercised and type(fold).end is BaseFold.end:
                continue
            counts = self.exercised.setdefault(fold.rule, {})
            for code, times in fold.exercised.items():
                counts[code] = counts.get(code, 0) + times
            for code in dict.fromkeys(finding.code for finding in (*fold.findings, *_at_end(fold))):
                found = self.discoveries.get((fold.rule, code))
                if found is None:
                    self.discoveries[fold.rule, code] = Discovery(fold.rule, code, path)
                else:
                    found.times += 1
            fold.findings.clear()
            fold.exercised.clear()

    # ---- merging

    def _key(self, session: Session, panel: Panel, path: tuple[Taken, ...]) -> str:
        if not self.merging:
            return repr(path)
        mine = session.trainer.fingerprint()
        state = repr((mine, session.rig.fingerprint(), panel.key()))
        names: dict[str, str] = {}
        return _TOKEN.sub(lambda found: names.setdefault(found[0], f"#{len(names)}"), state)

    def _reached(self, key: str, path: tuple[Taken, ...], panel: Panel) -> None:
        known = self._states.get(key)
        if known is None:
            self._states[key] = _State(path, key, panel)
        elif self._audits > 0 and known.path != path:
            self._audits -= 1
            self._audit(known, _State(path, key, panel))

    def _audit(self, known: _State, other: _State) -> None:
        for method in self.calls:
            a, b = (self._take(state, Taken(method), auditing=True).key for state in (known, other))
            if a != b:
                raise _BrokenPromise(
                    "fingerprint() must be equal only where every later call has the same effect (got two sequences "
                    f"with one fingerprint and another outcome of {method}(): {_shown(known.path)}; "
                    f"{_shown(other.path)})"
                    ": every sequence was run instead"
                )


class _BrokenPromise(Exception):
    """Two sequences with the same fingerprint behaved differently."""


def _at_end(fold: BaseFold) -> tuple[Any, ...]:
    """What the fold would find if the trace ended here, without ending it."""
    if type(fold).end is BaseFold.end:
        return ()
    probe = fold.clone(fold.view)
    probe.end()
    return tuple(probe.findings)


def _shown(path: tuple[Taken, ...]) -> str:
    return ", ".join(step for taken in path for step in taken.steps()) or "no call"

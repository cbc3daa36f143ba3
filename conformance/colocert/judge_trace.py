"""Judging one trace: the folds of some rules over its events, in one pass.

Knows folds, and that the ranks of a trace are judged apart. Does not know outcomes, verdicts or where a trace is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from colocert.rules.catalogue import FOLDS, Rule
from colocert.rules.fold import Finding, Fold, Panel, RunFold
from colocert.rules.handoff_state import TransportIsCollected
from colocert.rules.replay import Cursor, Replay
from colocert.rules.run_index import IndexedRunView, IndexedTransport
from colocert.trace import AnyEvent

PATIENCE = 2000
"""Events of a rank before what it repeats is looked up: a trace of the suite is shorter."""

_TOGETHER = 256
"""Events of a rank that are judged together: ranks are judged apart."""


class TraceJudged(msgspec.Struct, frozen=True):
    """What the folds made of one trace: findings in order, and per rule and code how often its condition occurred."""

    findings: tuple[Finding, ...]
    exercised: dict[str, dict[str, int]]


def judge_events(events: Iterable[AnyEvent], rules: Iterable[Rule]) -> TraceJudged:
    """Runs the folds of these rules over one trace, in one pass."""
    chosen = [FOLDS[rule.id] for rule in rules]
    by_rank = [fold for fold in chosen if issubclass(fold, Fold)]
    by_run = [fold for fold in chosen if issubclass(fold, RunFold)]
    view = IndexedRunView()
    whole = Panel(view, [(IndexedTransport if fold is TransportIsCollected else fold)(view) for fold in by_run])
    replay = Replay(by_rank, patience=PATIENCE)
    ranks: dict[int, Cursor] = {}
    found: dict[int, list[list[Finding]]] = {}
    waiting: dict[int, list[AnyEvent]] = {}
    table = whole.table
    for event in events:
        if by_run:  # `Panel.feed`, written out: a call an event shows
            calls: Any = table.get(event.__class__)
            if calls.__class__ is dict:
                calls = calls.get(event.actor)  # type: ignore[union-attr]
            for call in whole.handlers(event) if calls is None else calls:
                call(event)
        if by_rank and not event.owner:
            mine = waiting.get(event.rank)
            if mine is None:
                mine = waiting[event.rank] = []
                lists = found[event.rank] = [[] for _ in by_rank]
                ranks[event.rank] = Cursor(replay, _appender(lists))
            mine.append(event)
            if len(mine) == _TOGETHER:
                ranks[event.rank].feed(mine, 0, 0)
                mine.clear()
    for rank, mine in waiting.items():
        ranks[rank].feed(mine, 0, 0)
    findings: list[Finding] = []
    exercised: dict[str, dict[str, int]] = {}
    for rank in sorted(ranks):
        cursor = ranks[rank]
        panel = cursor.ends()
        for fold in panel.folds if panel is not None else ():
            fold.end()
        for kind, its_own, counts in zip(by_rank, found[rank], cursor.exercised(), strict=True):
            findings += its_own
            add_counts(exercised, kind.rule, counts)
    for fold in whole.folds:
        fold.end()
        findings += fold.findings
        add_counts(exercised, fold.rule, fold.exercised)
    return TraceJudged(tuple(findings), exercised)


def _appender(lists: list[list[Finding]]) -> Callable[[int, Finding, int, int], None]:
    return lambda fold, finding, _fed, _line: lists[fold].append(finding)


def add_counts(exercised: dict[str, dict[str, int]], rule: str, counts: Mapping[str, int]) -> None:
    """Adds how often a fold's conditions occurred to what was counted by rule."""
    known = exercised.setdefault(rule, {})
    for code, times in counts.items():
        known[code] = known.get(code, 0) + times

"""Looking calls up changes nothing: findings and counts are those of folds that are fed every event."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import msgspec
import pytest

import colocert_fixtures
from colocert import judge_trace as judging
from colocert.judge_trace import TraceJudged, judge_events
from colocert.rules import replay
from colocert.trace import AnyEvent, read_trace
from colocert.trace.events import Header, SaverCall
from colocert_fixtures.judging import rules

from .test_fold_properties import drawn

TRACES = sorted((Path(colocert_fixtures.__file__).parent / "traces").glob("LC-*/*.jsonl"))
RULES = rules()
NEVER = 1 << 60


def _judged(events: list[AnyEvent], patience: int) -> TraceJudged:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judging, "PATIENCE", patience)
        return judge_events(events, RULES)


def _again(events: list[AnyEvent], times: int) -> list[AnyEvent]:
    """The same events several times over, as one rank goes on, with numbers and contents that rise."""
    numbers, made = count(1), []
    for turn in range(times):
        for event in events:
            if isinstance(event, Header):
                continue
            new = msgspec.structs.replace(event, seq=next(numbers))
            if getattr(event, "content", "").startswith("#"):
                new.content = f"#{turn}.{event.content}"  # type: ignore[union-attr]
            if getattr(event, "saver_call", None) is not None:
                new.saver_call += 10_000 * turn  # type: ignore[union-attr]
            made.append(new)
    return made


def _same(events: list[AnyEvent]) -> None:
    plain, looked_up = _judged(events, NEVER), _judged(events, 0)
    assert looked_up.findings == plain.findings
    assert looked_up.exercised == plain.exercised


@drawn
def test_any_trace_is_judged_as_by_folds_alone(events: list[AnyEvent]) -> None:
    _same(events)
    _same(_again(events, 3))


@pytest.mark.parametrize("part", range(4))
def test_each_kept_trace_is_judged_as_by_folds_alone(part: int) -> None:
    for path in TRACES[part::4]:
        events = list(read_trace(path))
        _same(events)
        _same(_again(events, 4))
        for cut in range(1, len(events), 5):
            _same(events[:cut])


def test_ranks_that_do_the_same_share_what_was_learned() -> None:
    events = _again(list(read_trace(TRACES[1])), 3)
    several = [msgspec.structs.replace(event, rank=rank) for event in events for rank in range(5)]
    _same(several)


def test_states_that_never_recur_are_judged_event_by_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more states are kept than the limit, and the verdict is the same."""
    monkeypatch.setattr(replay, "STATES", 5)
    for path in TRACES[::9]:
        _same(_again(list(read_trace(path)), 3))


def test_calls_that_never_recur_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_PATIENCE", 4)
    for path in TRACES[::9]:
        _same(_again(list(read_trace(path)), 3))


def test_a_rank_without_calls_holds_no_more_than_a_stretch() -> None:
    """A recording of the saver alone has no call that ends: its events are not kept until the end."""
    state = replay.Replay([judging.FOLDS["LC-05"], judging.FOLDS["LC-20"]])
    cursor = replay.Cursor(state, lambda *_: None)
    for number in range(1, 1000):
        cursor.feed([SaverCall("resume", "default", number, seq=number)], number, number)
        assert len(cursor.events) < 64
    assert cursor.ends() is not None
    assert cursor.exercised()[0] == {"double-resume": 999}

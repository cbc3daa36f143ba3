"""What exploration rests on: folds can be cut between two calls, copied, compared, and fed only what they see."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest

from colocert.record.explore import Explorer
from colocert.record.scenarios import EXPLORATIONS, FULL, LORA, MULTI_LORA, REMATERIALIZE, Scenario
from colocert.rig.contract import Claims
from colocert.rules.catalogue import FOLDS
from colocert.rules.fold import Finding, Panel
from colocert.rules.view import View
from colocert.trace import AnyEvent
from colocert.trace.events import CallBegin
from colocert_fixtures import matrix
from colocert_fixtures.judging import rules, run
from colocert_fixtures.variants import leaves_live_gradients, refuses_live_release
from colocert_reference.colocert_impl import implementation as reference

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")

SUBJECTS = {
    "reference": reference,
    "refuses_live_release": refuses_live_release.implementation,
    "leaves_live_gradients": leaves_live_gradients.implementation,
    **{matrix.name(m): m.implementation for m in matrix.modules()},
}
CONFIGS = {
    "lora": LORA,
    "accumulation": {**LORA, "accumulate": 2},
    "multi-lora": MULTI_LORA,
    "full": FULL,
    "rematerialize": REMATERIALIZE,
    "critic": {**REMATERIALIZE, "role": "critic"},
    "offload-off": {**LORA, "offload_train": False},
}
STEPS = (
    *("sleep", "wake_up", "train", "update_weights", "offload_grad_buffer", "clear_memory") * 2,
    *("groups gone", "fill device", "relieve device"),
    *("fault saver.pause refused", "fault saver.pause refused 2", "fault saver.resume refused"),
    *("fault clear_memory before", "fault groups.create after", "fault groups.destroy after 2", "fault train after"),
    "fault send before",
)


def _run(who: str, config: str, steps: Iterable[str]) -> list[AnyEvent]:
    return run(SUBJECTS[who], Scenario("drawn", CONFIGS[config], tuple(steps)))


def drawn(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test on traces of drawn steps, and first on some that chance finds rarely: live and doubtful gradients."""
    known = (
        ("refuses_live_release", "accumulation", ("sleep", "wake_up", "train", "sleep", "train", "sleep")),
        ("leaves_live_gradients", "accumulation", ("fault train after", "train", "sleep", "wake_up", "train")),
        ("leaves_live_gradients", "multi-lora", ("sleep", "wake_up", "train", "sleep", "wake_up", "train", "sleep")),
    )
    for who, config, steps in known:
        test = hypothesis.example(_run(who, config, steps))(test)
    names = (st.sampled_from(sorted(SUBJECTS)), st.sampled_from(sorted(CONFIGS)))
    events = st.builds(_run, *names, st.lists(st.sampled_from(STEPS), min_size=2, max_size=14))
    settings = hypothesis.settings(derandomize=True, deadline=None, max_examples=300, database=None)
    return settings(hypothesis.given(events)(test))


def _panel() -> Panel:
    view = View()
    return Panel(view, [FOLDS[rule.id](view) for rule in rules()])


def _fed(panel: Panel, events: list[AnyEvent], *, end: bool = False) -> Panel:
    for event in events:
        panel.feed(event)
    for fold in panel.folds if end else ():
        fold.end()
    return panel


def _findings(panel: Panel) -> dict[str, list[Finding]]:
    return {fold.rule: list(fold.findings) for fold in panel.folds}


def _exercised(panel: Panel) -> set[tuple[str, str]]:
    return {(fold.rule, code) for fold in panel.folds for code in fold.exercised}


@drawn
def test_a_trace_cut_between_two_calls_is_judged_as_the_whole(events: list[AnyEvent]) -> None:
    """At each boundary: the findings before the cut and those of a copy after it are those of the whole trace."""
    whole = _fed(_panel(), events, end=True)
    for cut in [place for place, event in enumerate(events) if isinstance(event, CallBegin)]:
        first = _fed(_panel(), events[:cut])
        rest = _fed(first.clone(), events[cut:], end=True)
        before, after = _findings(first), _findings(rest)
        assert {rule: before[rule] + after[rule] for rule in before} == _findings(whole)
        assert _exercised(first) | _exercised(rest) == _exercised(whole)


@drawn
def test_a_copy_shares_nothing_with_its_original(events: list[AnyEvent]) -> None:
    """Keys are equal at the cut, and what the copy sees leaves the original where it was."""
    cuts = [place for place, event in enumerate(events) if isinstance(event, CallBegin)]
    for cut in cuts[::3]:
        original = _fed(_panel(), events[:cut])
        key, found = original.key(), _findings(original)
        copy = original.clone()
        assert copy.key() == key
        hash(copy.key())
        _fed(copy, events[cut:], end=True)
        assert (original.key(), _findings(original)) == (key, found)


@drawn
def test_a_fold_names_every_event_that_it_looks_at(events: list[AnyEvent]) -> None:
    """Fed with all events it finds and counts what it does with those it `sees`."""
    sparing, lavish = _fed(_panel(), events, end=True), _panel()
    for event in events:
        lavish.view.apply(event)
        for fold in lavish.folds:
            fold.on(event)
    for fold in lavish.folds:
        fold.end()
    assert _findings(lavish) == _findings(sparing)
    assert [fold.exercised for fold in lavish.folds] == [fold.exercised for fold in sparing.folds]


@drawn
def test_a_trace_that_ends_anywhere_can_be_judged(events: list[AnyEvent]) -> None:
    """A process may die within a call; what was found by then stays found."""
    whole = _findings(_fed(_panel(), events, end=True))
    for cut in range(1, len(events), 7):
        part = _findings(_fed(_panel(), events[:cut], end=True))
        assert all(set(found) <= set(whole[rule]) for rule, found in part.items() if rule != "LC-20")


@pytest.mark.slow
@pytest.mark.parametrize("module", matrix.modules(), ids=matrix.name)
@pytest.mark.parametrize("which", ["explore-lora", "explore-rematerialize"])
def test_merging_sequences_that_reach_one_state_hides_nothing(module: ModuleType, which: str) -> None:
    """The same rules and codes are found, and the same are exercised, as where every sequence is run."""
    scenario = next(s for s in EXPLORATIONS if s.id == which)
    merged, each = (_explored(module.implementation, scenario, merge) for merge in (True, False))
    assert set(merged.discoveries) == set(each.discoveries)
    assert _codes(merged) == _codes(each)


def _explored(implementation: Any, scenario: Scenario, merge: bool) -> Explorer:
    explorer = Explorer(implementation, Claims.of(implementation.claims), scenario, rules(), merge=merge)
    explorer.run(depth=3, fault_depth=2)
    return explorer


def _codes(explorer: Explorer) -> set[tuple[str, str]]:
    return {(rule, code) for rule, counts in explorer.exercised.items() for code, times in counts.items() if times}

"""Recording a weight sync: what the scenarios ask of it, and what a bad one is told."""

from __future__ import annotations

import importlib
import pkgutil
from types import SimpleNamespace
from typing import Any

import pytest

from colocert.record.adapter_sync import run_adapter_sync
from colocert.record.adapter_sync_scenarios import ADAPTER_SYNC_SCENARIOS, EFFECTS
from colocert.record.drive import ProcessGone, TrainerShapeError
from colocert.record.registry import BY_ID, smoke
from colocert.rig.contract import Claims
from colocert.trace import events as ev
from colocert_fixtures import variants
from colocert_fixtures.judging import run
from colocert_reference.colocert_impl import CLAIMS, implementation
from colocert_reference.dispatch import Dispatch

VARIANTS = [m.name for m in pkgutil.iter_modules(variants.__path__) if m.name.startswith("sync_")]


@pytest.mark.parametrize("name", ["reference", *VARIANTS])
def test_no_sync_has_more_effects_than_can_be_made_to_fail(name: str) -> None:
    """Of those that are right."""
    made: Any = implementation
    if name != "reference":
        made = importlib.import_module(f"{variants.__name__}.{name}").implementation
    claims = Claims.of(made.claims)
    for scenario in ADAPTER_SYNC_SCENARIOS:
        if "-faults-" in scenario.id and scenario.wanted(claims):
            events = run(made, scenario)
            fired = sum(isinstance(e, ev.Fault) for e in events)
            assert 2 <= fired < EFFECTS, scenario.id
            assert sum(isinstance(e, ev.CallBegin) and e.method == "sync" for e in events) >= 2 * fired + 1


def test_the_starting_adapter_is_delivered_before_any_step() -> None:
    events = run(implementation, BY_ID["sync-adapter-built"])
    assert [e.contents for e in events if isinstance(e, ev.Send)] == [["#policy.adapter"]] * 3


def test_a_scenario_is_run_only_where_its_sync_is_claimed() -> None:
    facts = {**CLAIMS.facts(), "sync_strategies": ["adapter"], "disaggregated": False, "multi_lora": False}
    wanted = [s.id for s in ADAPTER_SYNC_SCENARIOS if s.wanted(Claims.of(facts))]
    assert wanted
    assert all(name.startswith("sync-adapter") and "apart" not in name for name in wanted)


def test_the_smoke_stage_takes_a_sync_that_is_claimed_or_none() -> None:
    facts = {**CLAIMS.facts(), "sync_strategies": ["full"]}
    first = smoke("adapter-sync", Claims.of(facts))
    assert first is not None
    assert (first.id, first.config["lora"]) == ("smoke-adapter-sync", False)
    assert smoke("adapter-sync", Claims.of({**facts, "sync_strategies": []})) is None


def _run(weight_sync: Any) -> list[Any]:
    events: list[Any] = []
    made = SimpleNamespace(claims=CLAIMS, weight_sync=weight_sync)
    run_adapter_sync(made, CLAIMS, BY_ID["sync-adapter-trained"], events.append)
    return events


def test_an_object_without_the_calls_is_refused_by_name() -> None:
    with pytest.raises(TrainerShapeError, match=r"train_step\(\).*without .*believed\(\)"):
        _run(lambda rig: SimpleNamespace(sync=len))


def test_beliefs_are_by_role_and_kind() -> None:
    class Believes(Dispatch):
        def believed(self) -> Any:
            return {"policy": True}

    with pytest.raises(TrainerShapeError, match=r"\(role, kind\).*'policy'"):
        _run(lambda rig: Believes(rig.workers, rig.engine, implementation.weight_sync(rig).settings))


def test_what_a_call_raises_is_in_the_trace_and_an_exit_is_a_death() -> None:
    class Raises(Dispatch):
        def sync(self, adapter: str | None = None) -> None:
            raise RuntimeError("no")

    class Exits(Dispatch):
        def sync(self, adapter: str | None = None) -> None:
            raise SystemExit(3)

    def over(kind: type[Dispatch]) -> Any:
        return lambda rig: kind(rig.workers, rig.engine, implementation.weight_sync(rig).settings)

    raised = [e for e in _run(over(Raises)) if isinstance(e, ev.CallRaise)]
    assert [(e.method, e.error) for e in raised] == [("sync", "RuntimeError")] * 3
    with pytest.raises(ProcessGone):
        _run(over(Exits))

"""Every scenario of every profile, and how each profile's are run.

Knows which module runs which profile. Does not know what a scenario's steps mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from colocert.record import engine, group, handoff, steps
from colocert.record.engine_scenarios import ENGINE_SCENARIOS
from colocert.record.group_scenarios import GROUP_SCENARIOS
from colocert.record.handoff_scenarios import HANDOFF_SCENARIOS
from colocert.record.scenarios import FULL, LORA, SCENARIOS, Scenario
from colocert.rig.contract import Claims
from colocert.trace.events import AnyEvent

ALL_SCENARIOS: tuple[Scenario, ...] = (*SCENARIOS, *HANDOFF_SCENARIOS, *GROUP_SCENARIOS, *ENGINE_SCENARIOS)
BY_ID: Mapping[str, Scenario] = MappingProxyType({s.id: s for s in ALL_SCENARIOS})

_RUNNERS: Mapping[str, Callable[[Any, Claims, Scenario, Callable[[AnyEvent], None]], Any]] = MappingProxyType(
    {
        "lifecycle": steps.run_scenario,
        "handoff": handoff.run_handoff,
        "group": group.run_group,
        "engine": engine.run_engine,
    }
)

PATIENCE: Mapping[str, float] = MappingProxyType({"group": 4.0})
"""Profiles whose scenarios take longer than others, and by what factor: their processes are real and have to start."""


def run(implementation: Any, claims: Claims, scenario: Scenario, sink: Callable[[AnyEvent], None]) -> None:
    """Runs a scenario of any profile; events go to `sink` as they happen."""
    _RUNNERS[scenario.profile](implementation, claims, scenario, sink)


def smoke(profile: str, claims: Claims) -> Scenario | None:
    """The stage before any judging: build, one cycle, close. None for a profile that has no scenarios."""
    config: Mapping[str, Any] = LORA if claims.lora else FULL
    if profile == "lifecycle":
        return Scenario("smoke-lifecycle", config, ("sleep", "wake_up"))
    if profile == "handoff":
        peak = "gpu" if "gpu" in claims.peak_device else "cpu"
        return Scenario("smoke-handoff", {**config, "peak_device": peak}, ("run 1", "close"), profile=profile)
    if profile == "group":
        return Scenario("smoke-group", {**config, "ranks": 2}, ("offload", "onload"), profile=profile)
    if profile == "engine":
        steps_of = ("release kv_cache,cuda_graph,weights", "resume kv_cache,cuda_graph,weights")
        return Scenario("smoke-engine", config, steps_of, profile=profile)
    return None

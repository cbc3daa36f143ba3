"""Every scenario of every profile, and how each profile's are run.

Knows which module runs which profile. Does not know what a scenario's steps mean.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from colocert.record.adapter_sync_scenarios import ADAPTER_SYNC_SCENARIOS
from colocert.record.engine_scenarios import ENGINE_SCENARIOS
from colocert.record.frozen_offload_scenarios import FROZEN_SCENARIOS
from colocert.record.group_scenarios import GROUP_SCENARIOS
from colocert.record.handoff_scenarios import HANDOFF_SCENARIOS
from colocert.record.live_scenarios import LIVE_SCENARIOS
from colocert.record.payload_scenarios import MODES, PAYLOAD_SCENARIOS
from colocert.record.scenarios import FULL, LORA, SCENARIOS, Scenario
from colocert.rig.contract import Claims
from colocert.trace.events import AnyEvent

ALL_SCENARIOS: tuple[Scenario, ...] = (
    *SCENARIOS,
    *HANDOFF_SCENARIOS,
    *ADAPTER_SYNC_SCENARIOS,
    *PAYLOAD_SCENARIOS,
    *FROZEN_SCENARIOS,
    *GROUP_SCENARIOS,
    *ENGINE_SCENARIOS,
    *LIVE_SCENARIOS,
)
BY_ID: Mapping[str, Scenario] = MappingProxyType({s.id: s for s in ALL_SCENARIOS})

_RUNNERS: Mapping[str, str] = MappingProxyType(
    {
        "lifecycle": "steps:run_scenario",
        "handoff": "handoff:run_handoff",
        "adapter-sync": "adapter_sync:run_adapter_sync",
        "sync-payload": "payload:run_payload",
        "frozen-offload": "frozen_offload:run_frozen_offload",
        "group": "group:run_group",
        "engine": "engine:run_engine",
        "live": "live:run_live",
    }
)
"""What runs the scenarios of a profile: a module beside this one, imported with the profile's first scenario."""

PATIENCE: Mapping[str, float] = MappingProxyType(
    {"live": 8.0, "group": 4.0, "frozen-offload": 3.0, "sync-payload": 2.0}
)
"""Profiles whose scenarios take longer than others, and by what factor: their processes are real and have to start, or
the first of them imports torch and a whole framework."""


def run(implementation: Any, claims: Claims, scenario: Scenario, sink: Callable[[AnyEvent], None]) -> None:
    """Runs a scenario of any profile; events go to `sink` as they happen."""
    module, _, name = _RUNNERS[scenario.profile].partition(":")
    runner = getattr(importlib.import_module(f"colocert.record.{module}"), name)
    runner(implementation, claims, scenario, sink)


def smoke(profile: str, claims: Claims) -> Scenario | None:
    """The stage before any judging: build, one cycle, close. None for a profile that has no scenarios."""
    config: Mapping[str, Any] = LORA if claims.lora else FULL
    if profile == "lifecycle":
        return Scenario("smoke-lifecycle", config, ("sleep", "wake_up"))
    if profile == "handoff":
        peak = "gpu" if "gpu" in claims.peak_device else "cpu"
        return Scenario("smoke-handoff", {**config, "peak_device": peak}, ("run 1", "close"), profile=profile)
    if profile == "adapter-sync":
        wanted = (s for s in ADAPTER_SYNC_SCENARIOS if s.id.endswith("-trained") and s.wanted(claims))
        first = next(wanted, None)
        return first and msgspec.structs.replace(
            first, id="smoke-adapter-sync", steps=("after_build", "train_step", "sync")
        )
    if profile == "group":
        return Scenario("smoke-group", {**config, "ranks": 2}, ("offload", "onload"), profile=profile)
    if profile == "sync-payload":
        modes = ("adapter", "merged", "full") if claims.lora else ("full",)
        mode = next((m for m in modes if m in claims.sync_strategies), modes[0])
        return Scenario("smoke-sync-payload", MODES[mode][0], ("sync",), profile=profile)
    if profile == "frozen-offload":
        kind = {**config, "file_backed": claims.file_backed_frozen}
        return Scenario("smoke-frozen-offload", kind, ("start", "offload", "backload", "end"), profile=profile)
    if profile == "engine":
        steps_of = ("release kv_cache,cuda_graph,weights", "resume kv_cache,cuda_graph,weights")
        return Scenario("smoke-engine", config, steps_of, profile=profile)
    if profile == "live":
        adapters = {} if claims.lora else {"adapters": ()}
        return Scenario("smoke-live", {**config, **adapters}, ("build plain", "rollout", "training"), profile=profile)
    return None

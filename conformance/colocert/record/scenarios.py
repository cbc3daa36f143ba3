"""The scenarios of the lifecycle profile, as data: a configuration and the steps to take.

Knows which situations matter. Does not know how a step is taken (`run_scenario`) or which rule looks at it.

`seed` is the order in which remote calls are acknowledged. A step is a call (`sleep`), a change of the world (`groups
gone`, `fill device`, `relieve device`), or a fault for the next call (`fault POINT WHEN [NTH]`). Every scenario ends
with `close`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from colocert.rig.contract import (
    FULL_REGIONS,
    LORA_REGIONS,
    MIB,
    MULTI_LORA_REGIONS,
    REMATERIALIZE_REGIONS,
    Claims,
    Config,
)
from colocert.rules.conditions import holds

LEFT_WHEN_FILLED = 2 * MIB
"""Bytes that stay free when the suite fills the device: no region fits."""


class Scenario(msgspec.Struct, frozen=True):
    """One situation. `needs` are claims that must hold for it to be run, in the catalogue's notation.

    `golden`: its transcript is one for code review, and is compared under `--snapshot-dir`. Not so those that differ
    from another one's in an order that a seed draws, in an injected error, or from recording to recording.
    """

    id: str
    config: Mapping[str, Any]
    steps: tuple[str, ...]
    needs: str = ""
    profile: str = "lifecycle"
    seed: int = 0
    golden: bool = True

    def wanted(self, claims: Claims) -> bool:
        """Whether an implementation with these claims is put into this situation."""
        facts = claims.facts()
        if not self.config.get("lora") and not self.config.get("rematerialize"):
            return holds(self.needs, facts) and (claims.full_parameter or not claims.lora)
        return holds(self.needs, facts)

    def build_config(self) -> Config:
        """The configuration that the implementation sees."""
        return make_config(self.config)

    def paste(self) -> str:
        """The scenario as Python, to paste into a test."""
        config = ", ".join(f'"{k}": {v!r}' for k, v in self.config.items())
        steps = "".join(f'        "{step}",\n' for step in self.steps)
        return f'Scenario(\n    "{self.id}",\n    {{{config}}},\n    (\n{steps}    ),\n)'


def make_config(facts: Mapping[str, Any]) -> Config:
    """A configuration with the regions that go with it."""
    if facts.get("rematerialize"):
        regions = REMATERIALIZE_REGIONS
    elif facts.get("multi_lora"):
        regions = MULTI_LORA_REGIONS
    else:
        regions = LORA_REGIONS if facts.get("lora") else FULL_REGIONS
    return Config(**{"lora": False, "regions": regions, **facts})


LORA: Mapping[str, Any] = MappingProxyType({"lora": True})
FULL: Mapping[str, Any] = MappingProxyType({"lora": False})
REMATERIALIZE: Mapping[str, Any] = MappingProxyType({"lora": False, "rematerialize": True})
MULTI_LORA: Mapping[str, Any] = MappingProxyType({"lora": True, "multi_lora": True})

CYCLE = ("sleep", "wake_up")
THREE = ("train", "offload_grad_buffer", "sleep", "update_weights", "wake_up") * 3


def _both(prefix: str, config: Mapping[str, Any], needs: str) -> list[Scenario]:
    """The situations that exist with LoRA and without."""

    def scenario(name: str, *steps: str, **more: Any) -> Scenario:
        extra = more.pop("needs", "")
        return Scenario(f"{prefix}-{name}", {**config, **more}, steps, "; ".join(n for n in (needs, extra) if n))

    three = THREE if config.get("lora") else tuple(s for s in THREE if s != "offload_grad_buffer")
    return [
        scenario("plain-cycle", *CYCLE, "train", *CYCLE, "train"),
        scenario(
            "cycle", "train", "offload_grad_buffer", "sleep", "sleep", "wake_up", "wake_up", "train", *CYCLE, "train"
        )
        if not config.get("lora")
        else scenario("cycle", "train", "sleep", "sleep", "wake_up", "wake_up", "train", *CYCLE, "train"),
        scenario("three-cycles", *three, "train"),
        scenario("train-wakes", *(("sleep", "update_weights", "train") * 4)),
        scenario(
            "sync-asleep", "train", "update_weights", "sleep", "update_weights", "wake_up", "update_weights", "train"
        ),
        scenario("train-asleep", "sleep", "train", "sleep", "wake_up", "train"),
        scenario("no-groups", *CYCLE, "train", groups="absent"),
        scenario("groups-gone", "groups gone", "wake_up", "train", "groups gone", *CYCLE, "train"),
        scenario("groups-gone-asleep", "sleep", "groups gone", "sleep", "wake_up", "train"),
        scenario(
            "offload-off",
            "sleep",
            "wake_up",
            "offload_grad_buffer",
            "train",
            "update_weights",
            offload_train=False,
            needs="offload_train_optional",
        ),
        scenario(
            "refused-release",
            "fault saver.pause refused",
            "sleep",
            "sleep",
            "wake_up",
            "fault saver.pause refused 2",
            "sleep",
            "sleep",
            "wake_up",
            "fault saver.pause refused 2",
            "sleep",
            "wake_up",
            "train",
        ),
        scenario(
            "refused-resume",
            "sleep",
            "fault saver.resume refused",
            "wake_up",
            "wake_up",
            "sleep",
            "fault saver.resume refused 2",
            "wake_up",
            "wake_up",
            "sleep",
            "fault saver.resume refused 2",
            "wake_up",
            "sleep",
            "wake_up",
            "train",
        ),
        scenario("does-not-fit", "sleep", "fill device", "wake_up", "wake_up", "relieve device", "wake_up", "train"),
        scenario("fault-clear-memory-sleep", *_faulted("clear_memory", "sleep", "wake_up"), "train"),
        scenario("fault-clear-memory-wake", "sleep", *_faulted("clear_memory", "wake_up", "sleep"), "wake_up", "train"),
        scenario(
            "fault-groups-destroy", *_faulted("groups.destroy", "sleep", "wake_up"), "train", needs="group_teardown"
        ),
        scenario(
            "fault-groups-create",
            "sleep",
            *_faulted("groups.create", "wake_up", "sleep"),
            "wake_up",
            "train",
            needs="group_teardown",
        ),
        scenario("fault-train", "fault train before", "train", *CYCLE, "fault train after", "train", *CYCLE, "train"),
        scenario(
            "fault-send",
            "fault send before",
            "update_weights",
            "sleep",
            "fault send after",
            "update_weights",
            "wake_up",
        ),
    ]


def _faulted(point: str, call: str, back: str) -> list[str]:
    """The call fails before and after the point's effect, is retried, and is turned round instead."""
    return [
        f"fault {point} before",
        call,
        call,
        back,
        f"fault {point} after",
        call,
        call,
        back,
        f"fault {point} before",
        call,
        back,
    ]


SCENARIOS: tuple[Scenario, ...] = (
    *_both("lora", LORA, "lora"),
    # --8<-- [start:example]
    Scenario(
        "lora-cpu-peak",
        {**LORA, "peak_device": "cpu"},
        ("train", "sleep", "update_weights", "wake_up", "train"),
        "lora; peak_device∋cpu",
    ),
    # --8<-- [end:example]
    Scenario(
        "lora-early-release",
        LORA,
        (
            "train",
            "offload_grad_buffer",
            "offload_grad_buffer",
            "sleep",
            "sleep",
            "offload_grad_buffer",
            "wake_up",
            "train",
            "offload_grad_buffer",
            "sleep",
            "update_weights",
            "wake_up",
            "train",
        ),
        "lora; early_grad_release",
    ),
    Scenario(
        "lora-early-release-undone",
        LORA,
        ("train", "offload_grad_buffer", "wake_up", "train", "offload_grad_buffer", "train", *CYCLE, "train"),
        "lora; early_grad_release",
    ),
    Scenario(
        "lora-early-release-refused",
        LORA,
        (
            "fault saver.pause refused",
            "offload_grad_buffer",
            "offload_grad_buffer",
            "sleep",
            "wake_up",
            "offload_grad_buffer",
            "fill device",
            "wake_up",
            "relieve device",
            "wake_up",
            "train",
        ),
        "lora; early_grad_release",
    ),
    Scenario(
        "lora-accumulation",
        {**LORA, "accumulate": 2},
        (
            "train",
            "offload_grad_buffer",
            "sleep",
            "wake_up",
            "train",
            "train",
            "offload_grad_buffer",
            "train",
            *CYCLE,
            "train",
        ),
        "lora; gradients_traced",
    ),
    Scenario(
        "multi-lora",
        MULTI_LORA,
        (
            *CYCLE,
            "train",
            "offload_grad_buffer",
            "sleep",
            "wake_up",
            "train",
            "train",
            *CYCLE,
            "train",
            "train",
            *CYCLE,
            "train",
        ),
        "multi_lora",
    ),
    *_both("full", FULL, ""),
    Scenario("critic-cycle", {**FULL, "role": "critic"}, ("train", *CYCLE, "train", *CYCLE, "train"), "full_parameter"),
    Scenario(
        "rematerialize-cycle",
        REMATERIALIZE,
        (
            "train",
            "sleep",
            "sleep",
            "update_weights",
            "update_weights",
            "wake_up",
            "train",
            "update_weights",
            "sleep",
            "wake_up",
            "train",
        ),
        "rematerialize",
    ),
    Scenario(
        "rematerialize-fault-send",
        REMATERIALIZE,
        (
            "train",
            "sleep",
            "fault send before",
            "update_weights",
            "update_weights",
            "wake_up",
            "train",
            "sleep",
            "fault send after",
            "update_weights",
            "wake_up",
            "train",
            "sleep",
            "fault saver.pause refused",
            "update_weights",
            "update_weights",
            "wake_up",
            "train",
        ),
        "rematerialize",
    ),
    Scenario(
        "rematerialize-critic",
        {**REMATERIALIZE, "role": "critic"},
        ("train", *CYCLE, "train", "sleep", "update_weights", "wake_up", "train"),
        "rematerialize",
    ),
)

EXPLORATIONS: tuple[Scenario, ...] = (
    Scenario("explore-lora", LORA, (), "lora"),
    Scenario("explore-accumulation", {**LORA, "accumulate": 2}, (), "lora; gradients_traced"),
    Scenario("explore-multi-lora", MULTI_LORA, (), "multi_lora"),
    Scenario("explore-full", FULL, ()),
    Scenario("explore-rematerialize", REMATERIALIZE, (), "rematerialize"),
)
"""Configurations over which exploration takes every sequence of calls."""

"""The scenarios of the live profile, as data: what a pair on a real device is asked to do, in which order.

Knows which situations matter. Does not know how a step is taken (`live`) or which rule looks at it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from colocert.record.scenarios import Scenario

TRAINED = ("train 0", "train 1", "train 0", "train 1")
AND_BACK = ("rollout", "training")
MEMORY = (
    *("build plain", "train 0", "train 1", "look before", "rollout", "look asleep", "ask once", "training", "train 0"),
    *("look awake", "rollout", "look asleep", "ask twice", "training", "look awake"),
    *("release trainer", "resume trainer", "train 1", "rollout", "release engine", "resume engine", "training"),
)
"""A tag is released by itself where nothing but tags is on the device: no step comes before it since the hand-off."""

LOSSES = (
    *("build plain", *TRAINED, *TRAINED, "fingerprint", "close"),
    *("build plain", *TRAINED, *TRAINED, "fingerprint", "close", "agreed losses"),
    *("build hand-offs", "train 0", "train 1", *AND_BACK, "train 0", "train 1", "rollout", "ask during", "training"),
    *("train 0", "train 1", *AND_BACK, *AND_BACK, "train 0", "train 1", "fingerprint"),
)
TOKENS = (
    *("build plain", "rollout", "ask untrained", "training", "rollout", "ask untrained-cycled", "training", *TRAINED),
    *("rollout", "ask trained", "ask trained-again", "agreed tokens", "training", "rollout", "ask trained-cycled"),
    *("training", "train 0", "train 1", "rollout", "ask further", "training", "rollout", "ask further-cycled"),
)
CYCLES = ("build plain", "train 0", "cycles 10", "look settled", "cycles 90", "look flat")
ADAPTERS = (
    *("build plain", "state policy", "state other"),
    *("train 0 policy", "state policy", "state other", "train 0 other", "state policy", "state other"),
    *("train 1 other hold", "state other", "train 1 policy", "train 0 policy hold", "state other", "state policy"),
    *("rollout", "ask both", "training", "state policy", "state other", "train 1 policy", "state other"),
    *("renew other", "state other", "state policy", "train 0 policy", "state other"),
)


def _both(name: str, *steps: str, **config: Any) -> Iterator[Scenario]:
    """With adapters; without, for an implementation that has none."""
    yield Scenario(f"live-{name}", {"lora": True, **config}, steps, "lora", "live", golden=False)
    bare = {"lora": False, "adapters": (), **config}
    yield Scenario(f"live-{name}-full", bare, steps, "lora=False", "live", golden=False)


LIVE_SCENARIOS: tuple[Scenario, ...] = (
    *_both("memory", *MEMORY),
    *_both("losses", *LOSSES),
    *_both("tokens", *TOKENS),
    *_both("hundred-cycles", *CYCLES, size="small"),
    Scenario(
        "live-adapters",
        {"lora": True, "multi_lora": True, "adapters": ("policy", "other")},
        ADAPTERS,
        "multi_lora",
        "live",
        golden=False,
    ),
)

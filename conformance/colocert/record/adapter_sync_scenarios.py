"""The scenarios of the adapter-sync profile, as data: which sync, from which state, beside which engine.

Knows which situations matter to a weight sync. Does not know how a step is taken (`adapter_sync`) or which rule looks
at it.

The adapter is never zero: it starts with contents of its own. `EFFECTS` is how many effects of one sync can be made to
fail, each before and after, each followed by a retry; a scenario ends with the first fault that does not go off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from colocert.record.scenarios import Scenario

EFFECTS = 32
THREE = 3
_KINDS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "adapter": ({"lora": True}, "lora; sync_strategies∋adapter"),
    "merged": ({"lora": True, "merge_lora": True}, "lora; sync_strategies∋merged"),
    "full": ({"lora": False}, "sync_strategies∋full"),
    "fsdp": ({"lora": True, "strategy": "fsdp"}, "lora; sync_strategies∋fsdp"),
}


def _syncs(*before: str, adapters: tuple[str, ...] = (), asleep: bool) -> tuple[str, ...]:
    """Some work, then a sync of each adapter, then a rollout: three times."""
    syncs = [f"sync {name}" for name in adapters] or ["sync"]
    sleeps = ["engine sleeps"] if asleep else []
    return ("after_build", *(step for _ in range(THREE) for step in (*sleeps, *before, *syncs, "rollout")))


def _faults(when: str, *before: str, after: tuple[str, ...] = (), sync: str = "sync", asleep: bool) -> tuple[str, ...]:
    """Each effect of a sync fails once; after it the retry, or something else that comes first."""
    sleeps = ["engine sleeps"] if asleep else []
    return (
        "after_build",
        *(
            step
            for n in range(1, EFFECTS + 1)
            for step in (*sleeps, *before, f"fault {n} {when}", sync, *after, sync, "rollout")
        ),
    )


def _kind(kind: str) -> Iterator[Scenario]:
    config, needs = _KINDS[kind]

    def scenario(name: str, steps: tuple[str, ...], claim: str = "", **more: Any) -> Scenario:
        asked = f"{needs}; {claim}" if claim else needs
        return Scenario(f"sync-{kind}-{name}", {**config, **more}, steps, asked, "adapter-sync")

    yield scenario("built", _syncs(asleep=True))
    yield scenario("trained", _syncs("train_step", asleep=True))
    yield scenario("other-ran", _syncs("train_step", "forward critic", "forward ref", asleep=True))
    yield scenario("overlap", _syncs("train_step", "forward ref", asleep=False), overlap=True)
    for when in ("before", "after"):
        yield scenario(f"faults-{when}", _faults(when, "train_step", asleep=True))
        yield scenario(f"faults-{when}-other-ran", _faults(when, "train_step", "forward critic", asleep=True))
        yield scenario(f"faults-{when}-offloaded", _faults(when, asleep=True))
        yield scenario(f"overlap-faults-{when}", _faults(when, "train_step", asleep=False), overlap=True)
        yield scenario(
            f"faults-{when}-forward", _faults(when, "train_step", after=("forward policy", "train_step"), asleep=True)
        )
    apart: dict[str, Any] = {"claim": "disaggregated", "colocated": False}
    yield scenario("apart-built", _syncs(asleep=False), **apart)
    yield scenario("apart", _syncs("train_step", "forward ref", asleep=False), **apart)
    yield scenario("apart-overlap", _syncs("train_step", asleep=False), overlap=True, **apart)
    for when in ("before", "after"):
        yield scenario(f"apart-faults-{when}", _faults(when, "train_step", asleep=False), **apart)


def _several() -> Iterator[Scenario]:
    names = ("alpha", "beta")
    config: Mapping[str, Any] = {"lora": True, "multi_lora": True, "adapters": names}
    needs = "lora; multi_lora; sync_strategies∋adapter"

    def scenario(name: str, steps: tuple[str, ...], claim: str = "", **more: Any) -> Scenario:
        asked = f"{needs}; {claim}" if claim else needs
        return Scenario(f"sync-several-{name}", {**config, **more}, steps, asked, "adapter-sync")

    yield scenario("built", _syncs(adapters=names, asleep=True))
    yield scenario("trained", _syncs("train_step", adapters=names[::-1], asleep=True))
    yield scenario("other-ran", _syncs("train_step", "forward ref", adapters=names, asleep=True))
    yield scenario("overlap", _syncs("train_step", adapters=names, asleep=False), overlap=True)
    yield scenario("apart", _syncs("train_step", adapters=names, asleep=False), "disaggregated", colocated=False)
    for when in ("before", "after"):
        yield scenario(f"faults-{when}", _faults(when, "train_step", sync="sync beta", asleep=True))
        between = ("sync alpha",)
        yield scenario(
            f"faults-{when}-other-synced", _faults(when, "train_step", after=between, sync="sync beta", asleep=True)
        )


ADAPTER_SYNC_SCENARIOS: tuple[Scenario, ...] = (*(s for kind in _KINDS for s in _kind(kind)), *_several())

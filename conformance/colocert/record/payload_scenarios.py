"""The scenarios of the sync-payload profile, as data: what is sent, how it arrives, and what happened before.

Knows which situations matter to what a sync sends. Does not know how a step is taken (`payload`) or which rule looks
at it. Adapters are never zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from colocert.record.scenarios import Scenario

ENGINE_POINTS = ("engine.base.open", "engine.base.load", "engine.base.close", "engine.adapter.load")
THREE = ("sync", "train", "sync", "train", "sync")
LOST = ("sync", "train", "lose", "sync", "regain", "sync")
SIX = ("sync", *(("train", "sync") * 7))

MODES: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "adapter": ({"lora": True}, "lora; sync_strategies∋adapter"),
    "merged": ({"lora": True, "merge_lora": True}, "lora; sync_strategies∋merged"),
    "full": ({"lora": False, "adapters": ()}, "full_parameter; sync_strategies∋full"),
}


def _scenario(mode: str, name: str, *steps: str, needs: str = "", **more: Any) -> Scenario:
    config, claims = MODES[mode]
    asked = f"{claims}; {needs}" if needs else claims
    return Scenario(f"payload-{mode}-{name}", {**config, **more}, steps, asked, "sync-payload")


def _every_mode(mode: str) -> Iterator[Scenario]:
    """What any sync meets."""
    yield _scenario(mode, "three", *THREE)
    yield _scenario(mode, "six", *SIX)
    yield _scenario(mode, "alias", *THREE, transport="alias")
    yield _scenario(mode, "asleep", "sleep", "sync", "train", "sleep", "sync", "wake", "sync")
    yield _scenario(mode, "names", "break names", "sync", "mend", "sync", "train", "break names", "sync")
    yield _scenario(mode, "loses", "sync", "train", "break transport", "sync", "mend", "sync")


def _adapter() -> Iterator[Scenario]:
    """What an adapter's sync owes the base, and what can become of an adapter."""

    def scenario(name: str, *steps: str, **more: Any) -> Scenario:
        return _scenario("adapter", name, *steps, **more)

    yield from _every_mode("adapter")
    yield scenario("dummy", *THREE, engine_base="dummy")
    yield scenario("no-mirror", "sync", *(("train", "release", "resume", "sync") * 2), "sync", engine_mirror=False)
    yield scenario("mirror", "sync", *(("train", "release", "resume", "sync") * 2))
    yield scenario("dummy-asleep", "sleep", "sync", "train", "sync", engine_base="dummy")
    yield scenario("replaced", "sync", "replace", "sync", "train", "sync", needs="replacement")
    yield scenario(
        "replaced-asleep", "sync", "train", "sleep", "replace", "sync", "sync", needs="replacement", transport="alias"
    )
    yield scenario("slot", "break slot", "sync", "sync", "mend", "sync")
    yield scenario("outside", "train", "sync", "train", "sync", outside=True)
    yield scenario("lost", *LOST, needs="adapter_source≠resident")
    yield scenario("lost-first", "lose", "sync", needs="adapter_source≠resident", transport="alias")
    for point in ENGINE_POINTS:
        name = point.removeprefix("engine.").replace(".", "-")
        for when in ("before", "after"):
            yield scenario(
                f"fault-{name}-{when}", f"fault {point} {when}", "sync", "sync", "train", "sync", engine_base="dummy"
            )
    yield scenario("fault-base-half", "fault engine.base.load after 5", "sync", "sync", "sync", engine_base="dummy")
    yield scenario("fault-adapter-load", "sync", *_faulted("engine.adapter.load"), "train", "sync", "sync")
    yield scenario("fault-adapter-unload", "sync", *_faulted("engine.adapter.unload"), "train", "sync", "sync")
    yield scenario("fault-backload", *_faulted("trainer.backload", "sleep"), "sync")
    both: dict[str, Any] = {"multi_lora": True, "adapters": ("a", "b"), "needs": "multi_lora"}
    yield scenario("two", "sync a", "sync b", "train a", "sync a", "train b", "sync b", "sync a", **both)
    turns = tuple(step for name in "abababab" for step in (f"train {name}", f"sync {name}"))
    yield scenario("two-six", *turns, **both)
    yield scenario("two-dummy", "sync b", "train", "sync a", "sync b", engine_base="dummy", **both)
    yield scenario("two-alias", "sync a", "sync b", "train", "sync b", "sync a", transport="alias", **both)
    fault = ("fault engine.adapter.load before", "sync b")
    yield scenario("two-fault", "sync a", "sync b", "train", "sync a", *fault, "sync b", "sync a", **both)


def _faulted(point: str, *before: str) -> tuple[str, ...]:
    return tuple(s for when in ("before", "after") for s in ("train", *before, f"fault {point} {when}", "sync", "sync"))


def _base(mode: str) -> Iterator[Scenario]:
    """Syncs that send the base: merged or full."""
    yield from _every_mode(mode)
    for point in ("engine.base.load", "engine.base.close"):
        name = point.removeprefix("engine.").replace(".", "-")
        yield _scenario(mode, f"fault-{name}", "sync", *_faulted(point), "train", "sync")
    yield _scenario(mode, "no-mirror", "sync", "train", "release", "resume", "sync", engine_mirror=False)


def _merged() -> Iterator[Scenario]:
    yield from _base("merged")
    yield _scenario("merged", "outside", "train", "sync", "train", "sync", outside=True)
    yield _scenario("merged", "lost", *LOST, needs="adapter_source≠resident")


PAYLOAD_SCENARIOS: tuple[Scenario, ...] = (*_adapter(), *_merged(), *_base("full"))

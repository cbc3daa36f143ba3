"""The reference dispatch: the seed's cases, each of which a mutant fails, and recovery from every effect."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from colocert import InjectedFault
from colocert.rig.sync_rig import SyncConfig, SyncRig
from colocert.rig.workers import StorageReleased
from colocert.trace import events as ev
from colocert_fixtures.mutants.adapter_sync import (
    copies_at_the_finish,
    leaves_others_on,
    leaves_the_optimizer_on,
    moves_apart,
    needs_the_model_always,
    needs_the_model_never,
    takes_fsdp_adapters_for_resident,
)
from colocert_reference.colocert_impl import CLAIMS, implementation
from colocert_reference.dispatch import Dispatch

MIB = 1 << 20
SYNCS: dict[str, dict[str, Any]] = {
    "adapter": {"lora": True},
    "merged": {"lora": True, "merge_lora": True},
    "full": {"lora": False},
    "fsdp": {"lora": True, "strategy": "fsdp"},
}


class World:
    """A rig, a weight sync on it, and the moves of what was done last."""

    def __init__(self, made_by: Any, **config: Any) -> None:
        self.events: list[Any] = []
        facts: dict[str, Any] = {"regions": {}, "engine_server": "lenient", **config}
        self.rig = SyncRig(SyncConfig(**facts), CLAIMS, self.events.append)
        self.sync: Dispatch = made_by.weight_sync(self.rig)

    def does(self, *calls: str) -> dict[tuple[str, str, str], int]:
        """Makes the calls; role, kind and direction to the bytes that the last one moved."""
        for call in calls:
            del self.events[:]
            method, *args = call.split()
            getattr(self.sync, method)(*args)
        moves = [e for e in self.events if isinstance(e, ev.Move) and e.nbytes]
        return {(e.owner, e.kind, e.to): e.nbytes for e in moves}

    def sent(self) -> list[ev.Send]:
        return [e for e in self.events if isinstance(e, ev.Send)]


def case_adapter_only_skips_the_backload(made_by: Any) -> None:
    """After building and after another role ran."""
    for before in ((), ("train_step", "forward ref")):
        world = World(made_by, lora=True)
        moved = world.does("after_build", *before, "sync")
        assert ("policy", "model", "device") not in moved
        assert [s.nbytes for s in world.sent()] == [4 * MIB]


def case_others_and_the_optimizer_are_offloaded(made_by: Any) -> None:
    world = World(made_by, lora=True)
    assert ("critic", "model", "host") in world.does("after_build", "forward critic", "sync")
    world.does("train_step")
    world.does("sync")
    order = [type(e) for e in world.events if isinstance(e, ev.Send) or (isinstance(e, ev.Move) and "opt" in e.kind)]
    assert order[0] is ev.Move


def case_merged_full_and_fsdp_keep_the_backload(made_by: Any) -> None:
    for kind in ("merged", "full", "fsdp"):
        world = World(made_by, **SYNCS[kind])
        assert world.does("after_build", "sync")["policy", "model", "device"] >= 64 * MIB
        assert world.sent()


def case_not_colocated_is_untouched(made_by: Any) -> None:
    for config in SYNCS.values():
        world = World(made_by, colocated=False, **config)
        assert world.does("after_build", "train_step", "forward ref", "sync") == {}
        assert world.sent()


def case_finish_is_a_no_op(made_by: Any) -> None:
    """On a model that is off the device."""
    world = World(made_by, lora=True)
    world.does("after_build", "sync")
    after = world.events[world.events.index(world.sent()[0]) :]
    assert [e.nbytes for e in after if isinstance(e, ev.Move) and e.nbytes] == []


CASES: list[tuple[Callable[[Any], None], ModuleType]] = [
    (case_adapter_only_skips_the_backload, needs_the_model_always),
    (case_others_and_the_optimizer_are_offloaded, leaves_others_on),
    (case_others_and_the_optimizer_are_offloaded, leaves_the_optimizer_on),
    (case_merged_full_and_fsdp_keep_the_backload, needs_the_model_never),
    (case_merged_full_and_fsdp_keep_the_backload, takes_fsdp_adapters_for_resident),
    (case_not_colocated_is_untouched, moves_apart),
    (case_finish_is_a_no_op, copies_at_the_finish),
]


@pytest.mark.parametrize(("case", "mutant"), CASES, ids=lambda part: getattr(part, "__name__", "").rpartition(".")[2])
def test_the_seeds_case_holds_and_its_mutant_fails_it(case: Callable[[Any], None], mutant: ModuleType) -> None:
    case(implementation)
    with pytest.raises((AssertionError, KeyError, StorageReleased)):
        case(mutant.implementation)


@pytest.mark.parametrize("kind", SYNCS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_whatever_effect_fails_the_flags_are_true_and_the_retry_delivers(kind: str, when: str) -> None:
    """Every effect of a sync from trained memory, on a fresh world each."""
    for nth in range(1, 100):
        world = World(implementation, **SYNCS[kind])
        world.does("after_build", "train_step")
        world.rig.faults.arm("*", when, nth)
        try:
            world.does("sync")
        except InjectedFault:
            policy = world.rig.workers["policy"]
            assert world.sync.believed() == {
                (role, k): not worker.resident(k) for role, worker in world.rig.workers.items() for k in worker.kinds
            }
            world.does("sync")
            name = "adapter" if kind in ("adapter", "fsdp") else ""
            trained = "base" if kind == "full" else "adapter"
            held = {**policy.contents("model"), **policy.contents("adapters")}[trained]
            assert held in world.rig.engine.serving(name).split("+")
            assert world.rig.engine.versions[name] == 1
        else:
            assert nth > 6
            return


def test_an_adapter_by_name_is_made_live_sent_and_served_alone() -> None:
    world = World(implementation, lora=True, multi_lora=True, adapters=("alpha", "beta"))
    world.does("after_build", "sync beta")
    assert [s.tensors for s in world.sent()] == [["beta"]]
    assert (world.rig.engine.serving("beta"), world.rig.engine.serving("alpha")) == ("#policy.beta", "")


def test_bytes_sent_are_the_adapters_and_nothing_moves_for_a_second_sync() -> None:
    world = World(implementation, lora=True)
    assert world.does("after_build", "sync", "sync") == {}
    assert sum(s.nbytes for s in world.sent()) == 4 * MIB

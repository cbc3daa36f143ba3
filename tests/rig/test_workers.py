"""The worker group keeps the truth about each storage, and its engine about what it serves and what it has cached."""

from __future__ import annotations

from typing import Any

import pytest

from colocert import InjectedFault
from colocert.rig.engine import EngineNotReady
from colocert.rig.sync_rig import SyncConfig, SyncRig
from colocert.rig.workers import StorageReleased
from colocert.trace import events as ev
from colocert_reference.colocert_impl import CLAIMS


def rig(**config: Any) -> tuple[SyncRig, list[Any]]:
    events: list[Any] = []
    made = SyncRig(
        SyncConfig(**{"lora": True, "regions": {}, "engine_server": "lenient", **config}), CLAIMS, events.append
    )
    return made, events


def of(events: list[Any], kind: type) -> list[Any]:
    return [e for e in events if isinstance(e, kind)]


def test_each_role_holds_what_its_kind_of_training_needs() -> None:
    made, _ = rig()
    assert {role: worker.kinds for role, worker in made.workers.items()} == {
        "policy": ("model", "adapters", "optimizer", "grads"),
        "critic": ("model", "optimizer", "grads"),
        "ref": ("model",),
    }


def test_adapters_of_fsdp_move_with_the_model() -> None:
    policy = rig(strategy="fsdp")[0].workers["policy"]
    policy.move("model", "host")
    with pytest.raises(StorageReleased):
        policy.send("adapter")


def test_a_move_counts_what_moves_and_a_repeated_one_nothing() -> None:
    made, events = rig()
    for _ in range(2):
        made.workers["policy"].move("model", "host")
    assert [(e.owner, e.tensors, e.nbytes) for e in of(events, ev.Move)] == [
        ("policy", ["base"], 64 << 20),
        ("policy", [], 0),
    ]


def test_reading_what_is_not_there_is_written_down_and_raises() -> None:
    made, events = rig()
    made.workers["ref"].move("model", "host")
    with pytest.raises(StorageReleased):
        made.workers["ref"].forward()
    assert [(e.owner, e.alloc) for e in of(events, ev.SaverTouch)] == [("ref", "base")]


def test_a_host_copy_is_as_old_as_the_move_that_made_it() -> None:
    policy = rig()[0].workers["policy"]
    with pytest.raises(ValueError, match="never offloaded"):
        policy.send("adapter", source="host")
    policy.move("adapters", "host")
    policy.move("adapters", "device")
    before = policy.send("adapter", source="host")
    policy.train()
    assert policy.send("adapter", source="host") == before != policy.send("adapter")


def test_gradients_come_back_without_their_contents() -> None:
    policy = rig()[0].workers["policy"]
    policy.move("grads", "host")
    policy.move("grads", "device")
    assert policy.read("grads") == {"grads": ev.POISON}


def test_a_send_exports_the_named_adapter_or_the_live_one() -> None:
    policy = rig(multi_lora=True, adapters=("alpha", "beta"))[0].workers["policy"]
    assert list(policy.send("adapter")) == ["alpha"]
    policy.activate("beta")
    assert list(policy.send("adapter")) == ["beta"]
    assert list(policy.send("merged", "alpha")) == ["alpha", "base"]
    with pytest.raises(KeyError):
        policy.send("adapter", "gamma")


@pytest.mark.parametrize("call", [("furniture", "host"), ("model", "moon")])
def test_a_move_names_what_it_takes(call: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="model, adapters, optimizer, grads"):
        rig()[0].workers["policy"].move(*call)


@pytest.mark.parametrize(("when", "moved"), [("before", False), ("after", True)])
def test_any_effect_can_fail_before_or_after_it(when: str, moved: bool) -> None:
    made, _ = rig()
    made.faults.arm("*", when, 2)
    policy = made.workers["policy"]
    policy.move("optimizer", "host")
    with pytest.raises(InjectedFault):
        policy.move("model", "host")
    assert policy.resident("model") is not moved


def test_the_engine_refuses_weights_and_requests_while_its_own_are_out() -> None:
    made, _ = rig()
    made.engine.release()
    with pytest.raises(EngineNotReady):
        made.engine.load("adapter", {"adapter": "#1"}, "adapter")
    with pytest.raises(EngineNotReady):
        made.engine.request()


def _cached(made: SyncRig, events: list[Any], name: str = "adapter") -> str:
    made.engine.request(name)
    return str(of(events, ev.RequestBegin)[-1].cached)


def test_a_cached_prefix_is_found_until_something_drops_it() -> None:
    made, events = rig()
    made.engine.load("adapter", {"adapter": "#1"}, "adapter", 1)
    assert [_cached(made, events), _cached(made, events)] == ["", "#1"]
    made.engine.load("adapter", {"adapter": "#2"}, "adapter", 2)
    assert _cached(made, events) == "#1"
    made.engine.flush()
    assert [_cached(made, events), _cached(made, events)] == ["", "#2"]
    made.engine.release(["kv_cache"])
    made.engine.resume(["kv_cache"])
    assert _cached(made, events) == ""


def test_a_salted_adapter_and_one_under_another_route_miss_what_was_cached_before() -> None:
    made, events = rig()
    made.engine.load("adapter", {"adapter": "#1"}, "adapter", 1, salt=True)
    made.engine.request("adapter")
    made.engine.serve("adapter", 2)
    assert _cached(made, events) == ""
    made.engine.load("adapter", {"adapter": "#2"}, "adapter@3")
    assert made.engine.serving("adapter") == "#1"
    made.engine.serve("adapter", 3, "adapter@3")
    assert (made.engine.serving("adapter"), _cached(made, events)) == ("#2", "")
    assert made.engine.names() == ["adapter"]


def test_requests_come_in_between_calls_while_trainer_and_engine_overlap() -> None:
    made, events = rig(overlap=True)
    made.engine.flush()
    assert len(of(events, ev.RequestBegin)) == 1
    made.engine.drain()
    made.engine.flush()
    assert len(of(events, ev.RequestBegin)) == 1
    made.engine.admit()
    assert len(of(events, ev.RequestBegin)) == 2


@pytest.mark.parametrize("call", [("adapter", ""), ("base", "alpha"), ("delta", "")])
def test_a_load_names_an_adapter_and_nothing_else(call: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="an adapter with its name"):
        rig()[0].engine.load(call[0], {"adapter": "#1"}, call[1])


def test_what_is_not_loaded_cannot_be_served() -> None:
    made, _ = rig()
    with pytest.raises(KeyError):
        made.engine.serve("gamma", 1)
    made.engine.load("adapter", {"adapter": "#1"}, "gamma")
    made.engine.unload("gamma")
    assert made.engine.serving("gamma") == ""

"""The rig gives every adapter the same world, and leaves nothing behind."""

from __future__ import annotations

import types
from typing import Any

import pytest

from colocert import Claims, Config, ContractError, GroupGone, InjectedFault, Rig, SaverFatal
from colocert.rig.contract import check_implementation
from colocert.trace import events as ev
from colocert_reference.colocert_impl import CLAIMS


def rig(**config: Any) -> tuple[Rig, list[Any]]:
    events: list[Any] = []
    return Rig(Config(**{"lora": True, **config}), CLAIMS, events.append, capacity=1 << 30), events


def test_it_starts_with_the_allocations_and_groups_of_its_configuration() -> None:
    made, events = rig()
    assert {a.name: a.tag for a in made.saver.allocations.values()} == {
        "base": "default",
        "adapter": "default",
        "optimizer": "default",
        "grads": "grad_buffer",
    }
    assert set(made.process_groups.alive) == {"world", "data", "control"}
    assert [e.seq for e in events] == list(range(1, len(events) + 1))
    assert not rig(groups="absent")[0].process_groups.alive


def test_it_can_start_empty_for_a_real_model() -> None:
    made, _ = rig()
    made.start_empty()
    assert made.saver.device_bytes == 0
    assert made.alloc("default", 5, backup=True, kind="base").backup


def test_data_returns_what_an_overwrite_can_restore() -> None:
    made, _ = rig()
    made.data("grad_buffer", "accumulate")
    kept = made.data("grad_buffer", "read")
    made.data("grad_buffer", "zero")
    assert made.data("grad_buffer", "read") != kept
    made.data("grad_buffer", "overwrite", content=kept)
    assert made.data("grad_buffer", "read") == kept
    with pytest.raises(ValueError, match="dance"):
        made.data("grad_buffer", "dance")


def test_nothing_is_written_after_the_saver_ended_the_process() -> None:
    made, events = rig()
    with pytest.raises(SaverFatal):
        made.saver.resume("default")
    count = len(events)
    made.record("too late")
    made.emit(ev.EngineAdmit())
    assert len(events) == count


def test_weights_are_sent_from_valid_memory_only() -> None:
    made, events = rig()
    made.send("adapter", "default", only="adapter")
    with pytest.raises(ValueError, match="no host copy"):
        made.send("adapter", "default", only="adapter", read_from="host")
    made.saver.pause("default")
    made.send("adapter", "default", only="adapter", read_from="host", version=2)
    assert [(e.kind, e.read_from, e.nbytes) for e in events if isinstance(e, ev.Send)] == [
        ("adapter", "device", 4 << 20),
        ("adapter", "host", 4 << 20),
    ]
    with pytest.raises(SaverFatal):
        made.send("adapter", "default", only="adapter")
    with pytest.raises(ValueError, match="kind"):
        rig()[0].send("adaptor", "default")


def test_a_filled_device_has_no_room_until_it_is_relieved() -> None:
    made, _ = rig()
    made.saver.pause("default")
    made.fill_device(2 << 20)
    assert made.free_bytes() == 2 << 20
    made.relieve_device()
    assert made.free_bytes() > 64 << 20


def test_groups_keep_their_arguments_and_say_when_they_are_gone() -> None:
    made, events = rig()
    groups = made.process_groups
    original = groups.arguments()
    groups.destroy("data")
    with pytest.raises(GroupGone):
        groups.use("data")
    with pytest.raises(GroupGone):
        groups.destroy("data")
    groups.create("data", **original["data"])
    groups.use("data")
    assert groups.arguments() == {name: original[name] for name in groups.alive}
    with pytest.raises(ValueError, match="already exists"):
        groups.create("data", **original["data"])
    groups.take_away()
    assert not groups.alive
    assert isinstance(events[-1], ev.Change)
    made.faults.arm("groups.create", "after")
    with pytest.raises(InjectedFault):
        groups.create("data", **original["data"])
    assert "data" in groups.alive


def test_patches_are_undone_last_first() -> None:
    made, _ = rig()
    target = types.SimpleNamespace(value=1)
    made.patch((target, "value"), 2)
    made.patch((target, "value"), 3)
    made.patch((target, "other"), 4)
    made.patch("colocert.__version__", "patched")
    made.close()
    assert vars(target) == {"value": 1}
    import colocert

    assert colocert.__version__ != "patched"


def test_a_patched_static_method_stays_one() -> None:
    class Target:
        @staticmethod
        def method() -> int:
            return 1

    made, _ = rig()
    made.patch((Target, "method"), lambda: 2)
    made.close()
    assert Target().method() == 1


def test_files_of_a_scenario_are_removed() -> None:
    made, _ = rig()
    folder = made.directory
    (folder / "x").write_text("x")
    made.close()
    assert not folder.exists()


def test_coroutines_and_remote_handles_run_to_their_end() -> None:
    made, _ = rig()

    class Actor:
        def plain(self, x: int) -> int:
            return x + 1

        async def slow(self, x: int) -> int:
            return x + 2

    handle = made.remote(Actor())
    assert made.get(handle.plain.remote(1)) == 2
    assert made.get(handle.slow.remote(1)) == 3
    assert made.run(5) == 5
    made.close()


def test_statements_are_marked() -> None:
    made, events = rig()
    made.record("loaded", layers=2)
    assert events[-1].statement
    assert not events[0].statement


def test_equal_worlds_have_equal_fingerprints() -> None:
    a, b = rig()[0], rig()[0]
    assert a.fingerprint() == b.fingerprint()
    a.saver.pause("grad_buffer")
    assert a.fingerprint() != b.fingerprint()


class TestClaims:
    def test_all_that_are_missing_or_unknown_are_named(self) -> None:
        facts = CLAIMS.facts()
        del facts["lora"], facts["versions"]
        with pytest.raises(ContractError, match=r"none for lora, versions.*unknown sparkle"):
            Claims.of({**facts, "sparkle": True})

    def test_any_object_with_the_attributes_will_do(self) -> None:
        assert Claims.of(types.SimpleNamespace(**CLAIMS.facts())) == CLAIMS
        assert Claims.of(CLAIMS) is CLAIMS

    def test_a_string_is_not_a_set(self) -> None:
        with pytest.raises(ContractError, match="peak_device"):
            Claims.of({**CLAIMS.facts(), "peak_device": "gpu"})

    def test_factories_decide_the_profiles(self) -> None:
        made = types.SimpleNamespace(name="x", version=1, claims=CLAIMS, trainer=lambda rig: None, engine=print)
        assert check_implementation(made, "x")[3] == ("lifecycle", "engine")

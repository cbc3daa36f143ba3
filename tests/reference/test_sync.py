"""The reference's weight sync over plain ports: what is due, what is raised, and what a retry finds out by itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from colocert_reference.sync import Adapter, Layout, NoSource, NotSynced, PayloadSync

pytestmark = pytest.mark.torch

LAYOUT = Layout(groups=1, head=2)
LINEAR = "decoder.layers.0.self_attention.linear_proj"
BASE = {f"{LINEAR}.weight": torch.arange(16.0).view(4, 4), "decoder.final_layernorm.weight": torch.ones(4)}
SLOTS = {f"{LINEAR}.lora_a": (0, (2, 4)), f"{LINEAR}.lora_b": (8, (4, 2))}


class Source:
    """A trainer whose adapter may be gone, and that may train something else."""

    def __init__(self) -> None:
        self.buffer: Any = torch.arange(16.0)
        self.beside: tuple[str, ...] = ()

    def base(self) -> dict[str, Any]:
        return BASE

    def adapter(self, name: str) -> Adapter:
        if self.buffer is None:
            raise NoSource(name)
        return Adapter(self.buffer, SLOTS, 2, 4.0)

    def outside(self) -> tuple[str, ...]:
        return self.beside


class Engine:
    """Takes everything but `loses`; `fails` once where a base arrives."""

    def __init__(self) -> None:
        self.valid = False
        self.log: list[str] = []
        self.loses: set[str] = set()
        self.fails = False
        self.adapters: dict[str, tuple[int, dict[str, Any]]] = {}

    def base_valid(self) -> bool:
        return self.valid

    def load_base(self, tensors: Iterable[tuple[str, Any]]) -> list[str]:
        self.log.append("base")
        taken = []
        for name, _ in tensors:
            if self.fails:
                self.fails = False
                raise OSError("gone")
            if name not in self.loses:
                taken.append(name)
        self.valid = True
        return taken

    def load_adapter(self, name: str, tensors: dict[str, Any], adapter: Adapter, version: int) -> list[str]:
        self.log.append(f"{name} {version}")
        self.adapters[name] = (version, tensors)
        return [n for n in tensors if n not in self.loses]

    def withdraw(self, name: str) -> None:
        del self.adapters[name]


@pytest.fixture
def world() -> tuple[Source, Engine, PayloadSync]:
    source, engine = Source(), Engine()
    return source, engine, PayloadSync(source, engine, LAYOUT)


World = tuple[Source, Engine, PayloadSync]


def test_the_base_goes_once_and_first_and_versions_count_up(world: World) -> None:
    _, engine, sync = world
    for _ in range(3):
        sync.sync_adapter("a")
    sync.sync_adapter("b")
    assert engine.log == ["base", "a 1", "a 2", "a 3", "b 1"]


def test_an_engine_that_lost_its_base_gets_it_again(world: World) -> None:
    _, engine, sync = world
    sync.sync_adapter("a")
    engine.valid = False
    sync.sync_adapter("a")
    assert engine.log == ["base", "a 1", "base", "a 2"]


def test_a_base_that_failed_is_sent_again_whatever_the_engine_says_of_it(world: World) -> None:
    _, engine, sync = world
    engine.fails = True
    with pytest.raises(OSError, match="gone"):
        sync.sync_adapter("a")
    engine.valid = True
    sync.sync_adapter("a")
    assert engine.log == ["base", "base", "a 1"]


def test_a_lost_base_tensor_is_named_and_the_base_stays_in_doubt(world: World) -> None:
    _, engine, sync = world
    engine.loses = {"model.norm.weight"}
    with pytest.raises(NotSynced, match="no other: model") as raised:
        sync.sync_adapter("a")
    assert raised.value.names == ("model.norm.weight",)
    engine.loses = set()
    sync.sync_adapter("a")
    assert engine.log == ["base", "base", "a 1"]


def test_a_torn_adapter_is_withdrawn_named_and_not_counted_as_a_version(world: World) -> None:
    _, engine, sync = world
    lost = "base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"
    engine.loses = {lost}
    with pytest.raises(NotSynced) as raised:
        sync.sync_adapter("a")
    assert raised.value.names == (lost,)
    assert (engine.adapters, sync.versions) == ({}, {})


def test_nothing_is_touched_where_there_is_no_source_or_something_else_trains(world: World) -> None:
    source, engine, sync = world
    source.beside = ("decoder.final_layernorm.weight",)
    with pytest.raises(NotSynced, match="final_layernorm"):
        sync.sync_adapter("a")
    source.beside, source.buffer = (), None
    for call in (sync.sync_adapter, sync.sync_merged):
        with pytest.raises(NoSource):
            call("a")
    assert engine.log == []


def test_what_is_sent_shares_no_memory_with_the_buffer(world: World) -> None:
    source, engine, sync = world
    sync.sync_adapter("a")
    theirs = {t.untyped_storage().data_ptr() for t in engine.adapters["a"][1].values()}
    assert source.buffer.untyped_storage().data_ptr() not in theirs


def test_half_a_pair_is_refused() -> None:
    odd = {f"{LINEAR}.lora_a": (0, (2, 4))}
    with pytest.raises(NotSynced, match="lora_a"):
        LAYOUT.adapter(Adapter(torch.zeros(8), odd, 2, 4.0))


def test_a_merge_adds_one_delta_and_leaves_the_base_alone() -> None:
    before = {name: tensor.clone() for name, tensor in BASE.items()}
    adapter = Adapter(torch.arange(16.0), SLOTS, 2, 4.0)
    merged = dict(LAYOUT.merged(BASE, adapter))
    parts = adapter.tensors()
    expected = BASE[f"{LINEAR}.weight"] + 2.0 * parts[f"{LINEAR}.lora_b"] @ parts[f"{LINEAR}.lora_a"]
    assert torch.equal(merged["model.layers.0.self_attn.o_proj.weight"], expected)
    assert all(torch.equal(BASE[n], before[n]) for n in BASE)


@pytest.mark.parametrize("copies", [True, False])
def test_what_is_exported_is_a_view_only_for_an_engine_that_copies_out(copies: bool) -> None:
    source = Source().adapter("a")
    memory = source.buffer.untyped_storage().data_ptr()
    sent = Layout(groups=1, head=2, copies=copies).adapter(source)
    assert {t.untyped_storage().data_ptr() == memory for t in sent.values()} == {not copies}
    same = Layout(groups=1, head=2).adapter(source)
    assert all(torch.equal(sent[name], same[name]) for name in same)

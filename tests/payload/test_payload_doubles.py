"""The payload doubles: what the trainer holds, what the engine takes, and what the rig sees of it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from colocert.record import payload
from colocert.record.drive import ProcessGone, TrainerShapeError
from colocert.record.registry import BY_ID
from colocert.record.scenarios import Scenario
from colocert.rig import payload_model as model
from colocert.rig.faults import InjectedFault
from colocert.rig.payload_engine import EngineAsleep
from colocert.rig.payload_files import BadAdapterFile, read_adapter
from colocert.rig.payload_rig import PayloadConfig, PayloadRig
from colocert.rig.payload_trainer import MemoryLost
from colocert.trace.events import AnyEvent, CallRaise, Data, EngineLoad
from colocert_fixtures.judging import run
from colocert_fixtures.variants.payload_sends_files import write
from colocert_reference.colocert_impl import CLAIMS
from colocert_reference.sync import Adapter, Layout

pytestmark = pytest.mark.torch


def rig_of(sink: Any = None, **config: Any) -> PayloadRig:
    return PayloadRig(PayloadConfig(lora=True, regions={}, **config), CLAIMS, sink or (lambda event: None))


def exported(rig: PayloadRig, name: str = "policy") -> dict[str, Any]:
    """New memory under PEFT's names."""
    return {key: tensor.clone() for key, tensor in rig.trainer.export_adapter(name).items()}


# ---- the trainer


def test_an_adapter_is_not_zero_and_its_views_fill_the_buffer() -> None:
    adapter = rig_of().trainer.adapters["policy"]
    assert all(bool(t.any()) for t in adapter.tensors.values())
    assert sum(t.numel() for t in adapter.tensors.values()) == adapter.buffer.numel()


def test_sleeping_memory_is_poison_with_a_host_copy_and_comes_back_bit_by_bit() -> None:
    trainer = rig_of().trainer
    buffer = trainer.adapters["policy"].buffer
    before, address = buffer.clone(), buffer.data_ptr()
    trainer.offload()
    assert bool(buffer.isnan().all())
    assert trainer.where("policy") == trainer.where() == "host"
    trainer.backload(frozen=False)
    assert torch.equal(buffer, before)
    assert (buffer.data_ptr(), trainer.where("policy"), trainer.where()) == (address, "device", "host")


def test_lost_memory_cannot_be_brought_back() -> None:
    trainer = rig_of().trainer
    trainer.lose()
    assert (trainer.where("policy"), trainer.host_copy("policy")) == ("lost", None)
    with pytest.raises(MemoryLost, match="policy"):
        trainer.backload()
    trainer.regain()
    trainer.backload()


def test_both_exports_of_the_layouts_agree() -> None:
    """The rig's, by rows, and the reference's, by reshaping, were written apart."""
    trainer = rig_of().trainer
    one, shape = trainer.adapters["policy"], trainer.shape
    layout, adapter = (
        Layout(groups=shape.groups, head=shape.head),
        Adapter(one.buffer, one.slots, shape.rank, shape.alpha),
    )
    for mine, theirs in (
        (trainer.export_base(), dict(layout.base(trainer.base))),
        (trainer.export_adapter("policy"), layout.adapter(adapter)),
        (trainer.export_merged("policy"), dict(layout.merged(trainer.base, adapter))),
    ):
        assert mine.keys() == theirs.keys()
        assert all(torch.allclose(mine[n], theirs[n]) for n in mine)


@pytest.mark.slow
def test_transformers_and_peft_load_the_exports_and_give_the_same_weights() -> None:
    """Names, shapes and the scale, judged by the libraries that own the format."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    rig = rig_of()
    trainer, shape = rig.trainer, rig.trainer.shape
    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        head_dim=shape.head,
        tie_word_embeddings=True,
    )
    llama = transformers.LlamaForCausalLM(config)
    loaded = llama.load_state_dict(trainer.export_base(), strict=False)
    assert loaded.unexpected_keys == []
    assert all("norm" in name or name == "lm_head.weight" for name in loaded.missing_keys)
    told = trainer.peft_config()
    wrapped = peft.get_peft_model(
        llama, peft.LoraConfig(r=told["r"], lora_alpha=told["lora_alpha"], target_modules=told["target_modules"])
    )
    taken = peft.set_peft_model_state_dict(wrapped, exported(rig))
    assert taken.unexpected_keys == []
    assert not [n for n in taken.missing_keys if "lora" in n]
    merged = wrapped.merge_and_unload().state_dict()
    expected = trainer.expected("policy")
    assert expected is not None
    assert all(torch.allclose(merged[n], expected[n], rtol=1e-4, atol=1e-5) for n in expected)


# ---- the engine


def test_a_release_without_backup_poisons_the_base_until_it_is_sent() -> None:
    rig = rig_of(engine_mirror=False)
    rig.engine.release()
    rig.engine.resume()
    assert not rig.engine.base_valid
    assert all(bool(t.isnan().all()) for t in rig.engine.base.values())
    rig.engine.update_base(rig.trainer.export_base())
    assert rig.engine.base_valid
    assert rig.measure.compared("policy")["base_differs"] == []


def test_a_release_with_backup_keeps_the_base_and_its_validity() -> None:
    rig = rig_of(engine_mirror=False)
    rig.engine.release(backup=True)
    rig.engine.resume()
    assert rig.engine.base_valid
    assert rig.measure.compared("policy")["base_differs"] == []


def test_weights_are_refused_while_the_engine_sleeps() -> None:
    rig = rig_of()
    rig.engine.release()
    with pytest.raises(EngineAsleep):
        rig.engine.load_adapter("policy", exported(rig), rig.trainer.peft_config())
    with pytest.raises(EngineAsleep):
        rig.engine.update_base(rig.trainer.export_base())


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_base_session_that_fails_in_the_middle_leaves_the_base_invalid(when: str) -> None:
    rig = rig_of()
    rig.faults.arm("engine.base.load", when, 3)
    with pytest.raises(InjectedFault):
        rig.engine.update_base(rig.trainer.export_base())
    assert not rig.engine.base_valid


def test_a_replaced_engine_has_another_base_and_no_adapters() -> None:
    rig = rig_of()
    rig.engine.load_adapter("policy", exported(rig), rig.trainer.peft_config())
    rig.engine.replace()
    assert (rig.engine.base_valid, rig.engine.adapters, rig.engine.incarnation) == (False, {}, 1)


def test_a_load_reports_what_it_had_no_place_for_and_what_did_not_come() -> None:
    rig = rig_of()
    tensors = exported(rig)
    name, odd = next(iter(tensors)), "base_model.model.model.layers.0.mlp.router.lora_A.weight"
    tensors[odd] = tensors.pop(name)
    report = rig.engine.load_adapter("policy", tensors, rig.trainer.peft_config())
    assert report.unknown == (odd,)
    assert report.missing == (name.removeprefix(model.PEFT_PREFIX).removesuffix(".weight"),)
    assert len(report.loaded) == len(tensors) - 1


def test_a_broken_transport_loses_one_tensor_silently() -> None:
    rig = rig_of()
    rig.engine.broken = "transport"
    report = rig.engine.load_adapter("policy", exported(rig), rig.trainer.peft_config())
    assert (len(report.loaded), report.unknown) == (27, ())


def test_an_engine_that_aliases_keeps_what_it_is_given_and_scales_it_in_place() -> None:
    rig = rig_of(transport="alias")
    rig.measure.begin(levels=False)
    buffer = rig.trainer.adapters["policy"].buffer
    before = buffer.clone()
    rig.engine.load_adapter("policy", rig.trainer.export_adapter("policy"), rig.trainer.peft_config())
    rig.measure.served_as["policy"] = "policy"
    assert rig.measure.compared("policy")["aliased"] == {"policy": "trainer"}
    assert not torch.equal(buffer, before)


def test_memory_that_somebody_else_keeps_is_seen_and_memory_that_was_let_go_is_not() -> None:
    rig = rig_of(transport="alias")
    rig.measure.begin(levels=False)
    kept = exported(rig)
    rig.engine.load_adapter("policy", kept, rig.trainer.peft_config())
    assert rig.measure.compared("policy")["aliased"] == {"policy": "transport"}
    kept.clear()
    gc.collect()
    assert rig.measure.compared("policy")["aliased"] == {}


def test_how_often_the_delta_is_in_the_weights_is_told() -> None:
    rig = rig_of()
    rig.measure.served_as["policy"] = "policy"
    told = [rig.measure.compared("policy")["delta"]]
    rig.engine.load_adapter("policy", exported(rig), rig.trainer.peft_config())
    told.append(rig.measure.compared("policy")["delta"])
    rig.engine.update_base(rig.trainer.export_merged("policy"))
    told.append(rig.measure.compared("policy")["delta"])
    rig.trainer.step("policy")
    told.append(rig.measure.compared("policy")["delta"])
    assert told == ["none", "once", "twice", "other"]


def test_reading_lost_memory_is_seen_and_taking_a_view_of_it_is_not() -> None:
    events: list[AnyEvent] = []
    rig = rig_of(events.append)
    rig.trainer.lose()
    buffer = rig.trainer.adapters["policy"].buffer
    with rig.watch():
        buffer[2:8].view(2, 3).detach()
    assert not [e for e in events if isinstance(e, Data)]
    with rig.watch():
        buffer[2:8].clone()
    assert [e.alloc for e in events if isinstance(e, Data)] == ["policy"]


# ---- files


def test_an_adapter_is_read_from_files_as_peft_writes_them(tmp_path: Path) -> None:
    rig = rig_of()
    tensors = exported(rig)
    write(tmp_path, tensors, rig.trainer.peft_config())
    read, config = read_adapter(tmp_path)
    assert config["lora_alpha"] == 6.0
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[n], tensors[n]) for n in tensors)


def test_safetensors_own_files_are_read_too(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    safetensors.save_file(tensors, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
    (tmp_path / "adapter_config.json").write_text("{}")
    read, _ = read_adapter(tmp_path)
    assert all(torch.equal(read[n], tensors[n]) for n in tensors)


@pytest.mark.parametrize("raw", [b"", b"\xff" * 20, b"\x05\0\0\0\0\0\0\0{}", None])
def test_a_torn_or_missing_file_is_one_clear_error(tmp_path: Path, raw: bytes | None) -> None:
    if raw is not None:
        (tmp_path / "adapter_model.safetensors").write_bytes(raw)
        (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(BadAdapterFile, match="must hold adapter_model"):
        read_adapter(tmp_path)


# ---- driving


class Made:
    """An implementation whose sync is this function."""

    name, version, claims = "made", "1", CLAIMS

    def __init__(self, sync: Any) -> None:
        self.sync = sync

    def payload_sync(self, rig: PayloadRig) -> Any:
        return self


def test_what_a_sync_raises_is_in_the_trace_and_the_next_step_is_taken() -> None:
    def sync() -> None:
        raise LookupError("nothing there")

    events = run(Made(sync), BY_ID["payload-adapter-three"])
    assert [e.error for e in events if isinstance(e, CallRaise)] == ["LookupError"] * 3


def test_an_exit_costs_the_scenario() -> None:
    with pytest.raises(ProcessGone, match="SystemExit"):
        run(Made(lambda: exit(1)), BY_ID["payload-adapter-three"])


def test_a_factory_that_returns_something_else_is_told_so() -> None:
    with pytest.raises(TrainerShapeError, match="must return an object with sync"):
        run(Made(None), BY_ID["payload-adapter-three"])


def test_without_torch_the_profile_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colocert.rig.payload_rig.has_torch", lambda: False)
    with pytest.raises(TrainerShapeError, match="needs torch: pip install"):
        run(Made(lambda: None), BY_ID["payload-adapter-three"])


def test_hooks_of_the_implementation_stand_in_for_the_rigs_own_steps() -> None:
    """A coroutine each; the engine's replacement is told after it happened."""
    calls: list[str] = []

    class Hooks(Made):
        async def train_step(self, adapter: str) -> None:
            calls.append(f"train {adapter}")

        async def release_engine(self) -> None:
            calls.append("release")

        async def resume_engine(self) -> None:
            calls.append("resume")

        async def engine_replaced(self) -> None:
            calls.append("replaced")

        async def close(self) -> None:
            calls.append("close")

    steps = ("train policy", "release", "resume", "replace")
    run(Hooks(lambda: None), Scenario("hooks", {"lora": True}, steps, profile="sync-payload"))
    assert calls == ["train policy", "release", "resume", "replaced", "close"]


def test_a_sync_moves_the_bytes_of_the_adapter_and_nothing_else() -> None:
    """After building, and after every step: the second seed's point, counted where it arrives."""
    from colocert_reference.colocert_impl import implementation

    loads = [e for e in run(implementation, BY_ID["payload-adapter-three"]) if isinstance(e, EngineLoad)]
    rig = rig_of()
    assert [(load.kind, load.nbytes) for load in loads] == [
        ("adapter", sum(t.nbytes for t in rig.trainer.export_adapter("policy").values()))
    ] * 3
    assert loads[0].nbytes * 3 < sum(t.nbytes for t in rig.trainer.base.values())


def test_break_takes_one_of_the_known_ways() -> None:
    with pytest.raises(ValueError, match="one of names, slot, transport"):
        payload._take(payload.PayloadSession(rig_of()), "break everything")

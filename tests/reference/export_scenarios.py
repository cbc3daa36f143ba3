"""Bodies of child processes for test_export.py: a trainer, and an engine in plain memory fed by its export."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from colocert.device import Stage

CYCLE = ("offload_grad_buffer", "sleep", "update_weights", "wake_up")
SIZES = {"vocabulary": 256, "hidden": 64, "heads": 8, "kv_heads": 2, "ffn": 96, "sequence": 16}
TOKENS = [1, 250, 17, 99, 3, 128, 64, 200, 7, 7, 31, 90]


class Plain:
    """Memory that nothing manages."""

    @contextlib.contextmanager
    def region(self, tag: str, *, backup: bool) -> Iterator[None]:
        yield

    def pause(self, tag: str) -> None: ...

    def resume(self, tag: str) -> None: ...


def built(tensor: int, size: int, rank: int, port: int, lora: bool = True, **settings: Any) -> Any:
    """One of `size` ranks, of which `tensor` share a model."""
    from colocert_reference.real.groups import World
    from colocert_reference.real.model import Shape
    from colocert_reference.real.trainer import RealTrainer

    parallel = {"tensor_model_parallel_size": tensor}
    world = World(rank=rank, size=size, address=("127.0.0.1", port), timeout_minutes=2, parallel=parallel)
    return RealTrainer(Shape(**SIZES, lora_rank=8 if lora else 0), world=world, **settings)


def digest(tensors: dict[str, Any]) -> str:
    """SHA-256 over names and bytes."""
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        found.update(name.encode())
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


class Both:
    """A trainer and an engine that holds what was exported last."""

    def __init__(self, trainer: Any) -> None:
        from colocert_reference.real.export import llama_sizes
        from colocert_reference.real.llama_engine import LlamaPorts, LlamaShape

        self.trainer, self.parts = trainer, trainer.parts
        self.ports: Any = LlamaPorts(Plain(), LlamaShape(**llama_sizes(self.parts.shape)), mirror=False, seed=77)
        self.adapter: Any = None

    def load_base(self) -> None:
        from colocert_reference.real.export import base_state

        asyncio.run(self.ports.write_base(base_state(self.parts.model, self.parts.shape)))

    def load_adapter(self) -> None:
        from colocert_reference.real.export import adapter_state

        self.adapter = asyncio.run(self.ports.copied(adapter_state(self.parts.model, self.parts.shape)))

    def apart(self) -> float:
        """The largest difference of a logit between trainer and engine, the adapter on where one is loaded."""
        return float((logits(self.trainer) - self.ports.logits(TOKENS, self.adapter)).abs().max())


def logits(trainer: Any) -> Any:
    """What megatron's forward gives for the tokens, over the whole vocabulary."""
    import torch

    length = len(TOKENS)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        return trainer.parts.model(
            torch.tensor([TOKENS]), torch.arange(length)[None], mask, runtime_gather_output=True
        )[0]


def agrees(stage: Stage, folder: str, tensor: int = 1, size: int = 1, rank: int = 0, port: int = 0) -> dict[str, Any]:
    """Base and adapter, awake and asleep; the live gradients after one optimizer step, by the adapter's names."""
    from safetensors.torch import save_file

    from colocert_reference.real.export import adapter_state, base_state

    sent: list[str] = []
    trainer = built(
        tensor, size, rank, port, accumulate=2, names="peft", deliver=lambda tensors: sent.append(digest(dict(tensors)))
    )
    model, shape = trainer.parts.model, trainer.parts.shape
    both = Both(trainer)
    both.load_base()
    apart = {"base": both.apart()}
    base = logits(trainer)
    for _ in range(3):
        trainer.train()
    live = {name: p.main_grad for name, p in model.named_parameters() if p.requires_grad}
    gradients = adapter_state(model, shape, tensors=live)
    save_file(gradients, Path(folder) / f"gradients-{tensor}-{rank}.safetensors")
    both.load_adapter()
    apart["adapter"] = both.apart()
    trainer.update_weights()
    for call in CYCLE:
        getattr(trainer, call)()
    for _ in range(5):
        trainer.train()
    facts = {
        "apart": apart,
        "base": digest(base_state(model, shape)),
        "delta": float((logits(trainer) - base).abs().max()),
        "sent": sent,
        "exported": digest(adapter_state(model, shape)),
        "losses": trainer.work.losses,
    }
    stage.tell("done")
    stage.listen()  # the store is rank 0's: nobody leaves before all are done
    return facts


def mistakes(stage: Stage) -> dict[str, float]:
    """How far trainer and engine are apart after each way of splitting a fused tensor."""
    import torch

    from colocert_reference.real import export

    trainer = built(1, 1, 0, 0)
    both = Both(trainer)
    for _ in range(2):
        trainer.train()
    qkv, gate_up = export.split_qkv, export.split_gate_up

    def not_interleaved(rows: Any, shape: Any) -> Any:
        keys = shape.hidden // shape.heads * shape.kv_heads
        return torch.split(rows, [shape.hidden, keys, keys])

    def key_for_value(rows: Any, shape: Any) -> Any:
        query, key, value = qkv(rows, shape)
        return query, value, key

    ways: dict[str, dict[str, Any]] = {
        "right": {},
        "not_interleaved": {"split_qkv": not_interleaved},
        "key_for_value": {"split_qkv": key_for_value},
        "gate_for_up": {"split_gate_up": lambda rows: gate_up(rows)[::-1]},
    }
    apart = {}
    for way, functions in ways.items():
        for part in ("base", "adapter"):
            both.load_base()
            both.load_adapter()
            for name, function in functions.items():
                setattr(export, name, function)
            both.load_base() if part == "base" else both.load_adapter()
            apart[f"{way}.{part}"] = both.apart()
            export.split_qkv, export.split_gate_up = qkv, gate_up
    return apart


def full(stage: Stage) -> dict[str, Any]:
    """Without LoRA a sync sends the whole model, awake and asleep; and what is refused of sizes that do not fit."""
    from colocert_reference.real import export
    from colocert_reference.real.model import Shape

    sent: list[dict[str, Any]] = []
    trainer = built(1, 1, 0, 0, lora=False, names="peft", deliver=lambda tensors: sent.append(dict(tensors)))
    both = Both(trainer)
    trainer.train()
    trainer.update_weights()
    trainer.sleep()
    trainer.update_weights()
    trainer.wake_up()
    asyncio.run(both.ports.write_base(sent[1]))
    refused = []
    for action in (
        lambda: export.adapter_state(trainer.parts.model, trainer.parts.shape),
        lambda: Shape(kv_heads=2).config(4),
    ):
        try:
            action()
        except ValueError as error:
            refused.append(str(error))
    return {"same": digest(sent[0]) == digest(sent[1]), "apart": both.apart(), "refused": refused}


def process_calls(stage: Stage, folder: str, wire: str) -> dict[str, Any]:
    """The trainer behind the calls of its process: what travels is what the engine loads."""
    from threading import Thread

    import torch

    from colocert_reference.real import adapter_wire
    from colocert_reference.real.export import llama_sizes
    from colocert_reference.real.llama_engine import LlamaPorts, LlamaShape
    from colocert_reference.real.model import Shape
    from colocert_reference.real.trainer_process import TrainerProcess

    process = TrainerProcess(stage, SIZES, 1 << 20, 1, wire, 60.0, names="peft", learning_rate=2e-2)
    early = ""
    try:
        process.answer("feed", groups=[])
    except RuntimeError as error:
        early = str(error)
    process.answer("init")
    base = process.answer("base", path=f"{folder}/base.safetensors")
    rollouts = [{"prompt": [1, 2], "completion": [3, n], "reward": float(n)} for n in range(4)]
    facts = {"early": early, "base": base, "tokens": process.answer("feed", groups=[rollouts])}
    facts["loss"] = process.answer("train")
    facts["saved"] = process.answer("save", folder=f"{folder}/checkpoint", iteration=7)
    process.answer("offload_grad_buffer")
    process.answer("sleep")
    asleep = process.answer("base", path=f"{folder}/asleep.safetensors")
    facts["same_asleep"] = Path(asleep["path"]).read_bytes() == Path(base["path"]).read_bytes()
    server, received = adapter_wire.listen(wire, 60.0), []

    def receive() -> None:
        sender, _, tensors = adapter_wire.receive(server)
        received.append(tensors)
        adapter_wire.acknowledge(sender, tensors)

    thread = Thread(target=receive)
    thread.start()
    process.answer("update_weights")
    thread.join()
    process.answer("wake_up")
    shape = Shape(**SIZES)
    ports = LlamaPorts(Plain(), LlamaShape(**llama_sizes(shape)), mirror=False, seed=5)
    from safetensors.torch import load_file

    asyncio.run(ports.write_base(load_file(base["path"])))
    adapter = {
        name: torch.frombuffer(bytearray(data), dtype=torch.float32).view(ports.places[name])
        for name, data in received[0].items()
    }
    loaded = asyncio.run(ports.copied(adapter))
    facts["apart"] = float((logits(process.trainer) - ports.logits(TOKENS, loaded)).abs().max())
    facts["version"] = process.answer("facts")["version"]
    facts["loaded"] = process.answer("load", folder=f"{folder}/checkpoint")
    return facts

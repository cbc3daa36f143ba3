"""The engine that computes, under test: `--impl=colocert_reference.real.llama_impl --profile=engine`.

The rules of the engine profile judge what tokens were computed from. So what the suite sends lies in the Llama's own
tensors here, and what a token was computed from is read back out of them when it is computed: the adapter out of the
tensors that peft has active, a prefix out of the static cache that it was taken from. Memory is the rig's; a release
puts NaN where the tensors are, as the real one would lose them, and only a mirror brings the weights back.

Knows the kit's engine rig and `llama_engine`. Does not know scenarios or rules.

    the suite's bytes    a float a byte, exactly: an adapter's tensors have as many elements as bytes are sent; of a
                         base tensor they are the first row
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from colocert import Claims
from colocert.rig.engine_rig import EngineRig
from colocert.rig.engine_wire import BASE_TENSORS, NBYTES
from colocert_reference.colocert_impl import CLAIMS
from colocert_reference.engine import KV, WEIGHTS, Engine
from colocert_reference.engine_ports import from_file, settings_of
from colocert_reference.real.llama_engine import Entry, LlamaPorts, LlamaShape, Loaded, Slot

SHAPE = LlamaShape(
    layers=1, hidden=NBYTES, heads=4, kv_heads=2, ffn=NBYTES, lora_rank=1, targets=("down_proj",), slots=16, length=96
)
"""Of its one adapted linear, A is [1, bytes] and B [bytes, 1]."""
SCALE = 1024.0
"""A byte is a weight of at most a quarter, so that the model stays finite."""


@dataclass(frozen=True)
class Step:
    """A token as the rig gives it, and what is cached by then: here, and by the rig's number."""

    token: str
    entry: Numbered


@dataclass(frozen=True)
class Numbered:
    """A cache entry and the number under which the rig knows it."""

    entry: Entry
    number: int


class LossyMemory:
    """The rig's saver over tensors of torch: what is released is lost, but for a mirror of the weights."""

    def __init__(self, rig: EngineRig) -> None:
        self.rig = rig
        self.tensors: dict[str, list[torch.Tensor]] = {}
        self.mirror: dict[str, list[torch.Tensor]] = {}

    @contextlib.contextmanager
    def region(self, tag: str, *, backup: bool) -> Iterator[None]:
        """The rig has made its allocations already; which tensors lie there is told later."""
        yield

    def pause(self, tag: str) -> None:
        self.rig.saver.pause(tag)
        held = self.tensors.get(tag, [])
        if tag == WEIGHTS and self.rig.config.engine_mirror:
            self.mirror[tag] = [t.detach().clone() for t in held]
        for tensor in held:
            tensor.detach().fill_(float("nan") if tensor.is_floating_point() else -1)

    def resume(self, tag: str) -> None:
        self.rig.saver.resume(tag)
        for tensor, copy in zip(self.tensors.get(tag, []), self.mirror.pop(tag, []), strict=False):
            tensor.detach().copy_(copy)


class LlamaOnRig:
    """The engine's ports: the Llama's, with the rig told what each was done with."""

    def __init__(self, rig: EngineRig) -> None:
        self.rig, self.memory = rig, LossyMemory(rig)
        self.llama = LlamaPorts(self.memory, SHAPE, mirror=rig.config.engine_mirror, captured=lambda: None)
        llama = self.llama
        self.memory.tensors = {
            WEIGHTS: [*llama.parameters.values(), *(buffer for buffer, _ in llama.buffers.values())],
            KV: [t for slot in llama.slots for t in _tensors(slot)],
        }
        self.base = {name: p.detach().clone() for name, p in llama.parameters.items()}

    def pause(self, tag: str) -> None:
        self.llama.pause(tag)

    def resume(self, tag: str) -> None:
        self.llama.resume(tag)

    async def write_base(self, source: Mapping[str, Any]) -> None:
        """Each tensor of the source into its parameter; the parameters that it has none for, as they were."""
        for name in source:
            _first_row(self.llama.parameters[name]).copy_(_floats(source[name]))
            self.rig.write(name, _bytes(_first_row(self.llama.parameters[name])))
            await self.rig.pace()
        whole = dict(self.base)
        for name in BASE_TENSORS:
            whole[name] = whole[name].clone()
            _first_row(whole[name]).copy_(_first_row(self.llama.parameters[name]).detach())
        await self.llama.write_base(whole)

    async def copied(self, source: Mapping[str, Any] | Path) -> Loaded:
        given: Mapping[str, Any] = from_file(source) if isinstance(source, Path) else source
        tensors = {}
        for name in given:
            tensors[name] = _floats(given[name]).reshape(self.llama.places[name])
            await self.rig.pace()
        return await self.llama.copied(tensors)

    async def compute(self, request: Any, adapter: Mapping[str, torch.Tensor] | None, cached: Numbered | None) -> Step:
        """The time that a token takes, then the token: by the Llama, and as the rig is told."""
        await self.rig.pace()
        hit = cached is not None and cached.entry.valid()
        computed = await self.llama.compute(request, adapter, cached.entry if cached is not None else None)
        read = {name: _bytes(tensor) for name, tensor in adapter.items()} if adapter is not None else None
        step = self.rig.forward(request, adapter=read, cached=cached.number if hit and cached is not None else None)
        return Step(step.token, Numbered(computed.entry, step.entry))

    def done(self, request: Any) -> None:
        self.llama.done(request)


def _tensors(slot: Slot) -> list[torch.Tensor]:
    return [t for layer in slot.cache.layers for t in (layer.keys, layer.values)]


def _first_row(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach()[0]


def _floats(data: Any) -> torch.Tensor:
    return torch.tensor(list(bytes(data)), dtype=torch.float32) / SCALE


def _bytes(tensor: torch.Tensor) -> bytes:
    """What was sent, out of the tensor that it lies in; nothing that was sent where it holds something else."""
    values = (tensor.detach().flatten() * SCALE).nan_to_num(0.0).round().clamp(0, 255)
    return bytes(values.to(torch.uint8).tolist())


class LlamaUnderTest:
    """The implementation: an engine, and no other factory."""

    name = "colocert-reference-llama"
    version = "0.1.0"
    claims: Claims = CLAIMS

    async def engine(self, rig: EngineRig) -> Engine:
        await asyncio.sleep(0)
        return Engine(LlamaOnRig(rig), settings_of(rig))


implementation = LlamaUnderTest()

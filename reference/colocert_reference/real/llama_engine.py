"""An engine that computes: a transformers Llama with static KV caches, and peft adapters by name and version.

The same logic as on the rig (`colocert_reference.engine`) behind whose ports there are tensors here. What lies where:

    weights      the base parameters, and buffers such as the rotary frequencies, which no checkpoint holds
    kv_cache     a fixed number of static caches, one a request under way; finished ones are kept as cached prefixes
    cuda_graph   nothing: no graph is captured, the tag is taken and moves no memory
    (outside)    adapters: they survive a release, and requests under way keep the version that they began with

Knows transformers, peft and torch. Does not know which saver is behind `memory`, drivers or processes. One request is
computed at a time; several are under way. Tokens are bytes, chosen greedily.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from colocert_reference.engine import GRAPH, KV, WEIGHTS, Asking, Engine, EngineSettings

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BYTES = 256
_NONE = "none"


class WrongTensors(ValueError):
    """A source must hold exactly the tensors, of the shapes, that the engine has a place for."""


class TooManyRequests(RuntimeError):
    """Every static cache belongs to a request under way."""


class Memory(Protocol):
    """One device under the saver: what is used here of `memory.ManagedMemory`."""

    def region(self, tag: str, *, backup: bool) -> contextlib.AbstractContextManager[None]: ...
    def pause(self, tag: str) -> Any: ...
    def resume(self, tag: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """Sizes of the model, of its adapters, and of its caches: `slots` of `length` tokens each."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 128
    vocabulary: int = BYTES
    rope_theta: float = 10000.0
    rms_eps: float = 1e-6
    lora_rank: int = 4
    lora_alpha: float = 8.0
    slots: int = 4
    length: int = 64

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.length,
            rms_norm_eps=self.rms_eps,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            tie_word_embeddings=False,
        )

    def lora(self) -> LoraConfig:
        return LoraConfig(
            r=self.lora_rank, lora_alpha=self.lora_alpha, target_modules=list(TARGETS), task_type="CAUSAL_LM"
        )


class Slot:
    """One static cache. `serial` counts what was put into it, `used` says when; `busy` while a request is under way."""

    def __init__(self, cache: StaticCache) -> None:
        self.cache = cache
        self.serial = 0
        self.used = 0
        self.busy = False

    def begin(self, now: int) -> None:
        """A new user. Zeroed, since what is masked out is still multiplied: memory that came back may hold NaN."""
        self.serial += 1
        self.used, self.busy = now, True
        for layer in self.cache.layers:
            layer.keys.zero_()
            layer.values.zero_()
        self.at(0)

    def at(self, length: int) -> None:
        """The next token goes to this position."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(length)

    def take(self, other: Slot, length: int) -> None:
        """Copies the first positions of another cache."""
        for mine, theirs in zip(self.cache.layers, other.cache.layers, strict=True):
            mine.keys[:, :, :length].copy_(theirs.keys[:, :, :length])
            mine.values[:, :, :length].copy_(theirs.values[:, :, :length])
        self.at(length)


@dataclass(frozen=True)
class Entry:
    """Cached KV: the first `tokens` of a slot while it has that `serial`, and the token that came `then`."""

    slot: Slot
    serial: int
    tokens: tuple[int, ...]
    then: int

    def valid(self) -> bool:
        return self.slot.serial == self.serial


@dataclass(frozen=True)
class Token:
    """A token, the logits [vocabulary] it was chosen from, and what is cached up to it."""

    token: int
    entry: Entry
    logits: torch.Tensor | None


class Loaded(Mapping[str, torch.Tensor]):
    """One version of an adapter: the model's own tensors, under a key of their own there. Gone with its last user."""

    def __init__(self, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.key, self._tensors = key, dict(tensors)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class LlamaPorts:
    """The engine's ports over a model in `memory`."""

    def __init__(self, memory: Memory, shape: LlamaShape, *, mirror: bool, device: str = "cpu", seed: int = 0) -> None:
        self.memory, self.shape, self.device = memory, shape, device
        self.config = shape.config()
        with memory.region(WEIGHTS, backup=mirror):
            base = self._base(seed)
        with memory.region(KV, backup=False):
            self.slots = [Slot(self._cache()) for _ in range(shape.slots)]
        self.parameters = dict(base.named_parameters())
        self.buffers = {name: (buffer, buffer.detach().cpu().clone()) for name, buffer in base.named_buffers()}
        self.model: PeftModel = get_peft_model(base, shape.lora(), adapter_name=_NONE)
        self.model.eval()
        self.places = {n: t.shape for n, t in get_peft_model_state_dict(self.model, adapter_name=_NONE).items()}
        self.generations: dict[int, Slot] = {}
        self._requests = 0
        self._keys = 0

    def _base(self, seed: int) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        with torch.device(self.device):
            return LlamaForCausalLM(self.config).eval()

    def _cache(self) -> StaticCache:
        shape = self.shape
        cache = StaticCache(config=self.config, max_cache_len=shape.length)
        head = shape.hidden // shape.heads
        cache.early_initialization(1, shape.kv_heads, head, torch.float32, torch.device(self.device))
        return cache

    # ---- memory

    def pause(self, tag: str) -> None:
        if tag != GRAPH:
            self.memory.pause(tag)

    def resume(self, tag: str) -> None:
        if tag != GRAPH:
            self.memory.resume(tag)
        if tag == KV:
            for slot in self.slots:
                slot.serial += 1

    # ---- weights

    async def write_base(self, source: Mapping[str, torch.Tensor]) -> None:
        """Copies every parameter into place, and what a checkpoint does not hold from its host copy."""
        self._same(source, {n: p.shape for n, p in self.parameters.items()}, "the base")
        for name, parameter in self.parameters.items():
            parameter.data.copy_(source[name])
            await asyncio.sleep(0)
        for buffer, kept in self.buffers.values():
            buffer.copy_(kept)

    async def copied(self, source: Mapping[str, torch.Tensor] | Path) -> Loaded:
        """The tensors of a mapping, or of a safetensors file, copied into the model under a new key, at once."""
        given = load_file(source) if isinstance(source, Path) else source
        self._same(given, self.places, "an adapter")
        self._keys += 1
        key = f"adapter{self._keys}"
        self.model.add_adapter(key, self.shape.lora())
        try:
            set_peft_model_state_dict(self.model, dict(given), adapter_name=key)
        except BaseException:
            self._drop(key)
            raise
        loaded = Loaded(key, get_peft_model_state_dict(self.model, adapter_name=key))
        weakref.finalize(loaded, self._drop, loaded.key).atexit = False
        return loaded

    def _drop(self, key: str) -> None:
        """Nobody uses this version any more."""
        if self.model.active_adapter == key:
            self.model.set_adapter(_NONE)
        self.model.delete_adapter(key)

    def _same(self, given: Mapping[str, Any], places: Mapping[str, Any], what: str) -> None:
        missing, unknown = sorted(places.keys() - given.keys()), sorted(given.keys() - places.keys())
        shapes = [n for n in places if n in given and tuple(given[n].shape) != tuple(places[n])]
        if missing or unknown or shapes:
            raise WrongTensors(
                f"{what} must hold exactly its {len(places)} tensors (missing {missing[:3]}, unknown {unknown[:3]}, of "
                f"another shape {shapes[:3]})"
            )

    # ---- requests

    async def compute(self, request: Asking, adapter: Mapping[str, torch.Tensor] | None, cached: Entry | None) -> Token:
        """The next token of a request, from where it or the cached entry is."""
        await asyncio.sleep(0)
        if cached is not None and self.generations.get(id(request)) is cached.slot and cached.valid():
            return self._next(cached.slot, cached.tokens, [cached.then], adapter)
        slot = self._slot(request)
        prompt = tuple(request.prompt.encode())
        if cached is not None and cached.valid() and cached.tokens == prompt:
            slot.take(cached.slot, len(prompt))
            return Token(cached.then, Entry(slot, slot.serial, prompt, cached.then), None)
        return self._next(slot, (), list(prompt), adapter)

    def _slot(self, request: Asking) -> Slot:
        """A static cache for a new request: the one that was used longest ago."""
        free = [s for s in self.slots if not s.busy]
        if not free:
            raise TooManyRequests(f"at most {len(self.slots)} requests may be under way")
        slot = min(free, key=lambda s: s.used)
        self._requests += 1
        slot.begin(self._requests)
        self.generations[id(request)] = slot
        return slot

    def done(self, request: Asking) -> None:
        """The request's cache may be used again; until it is, it serves as a prefix."""
        slot = self.generations.pop(id(request), None)
        if slot is not None:
            slot.busy = False

    def _next(
        self, slot: Slot, before: tuple[int, ...], tokens: list[int], adapter: Mapping[str, torch.Tensor] | None
    ) -> Token:
        if len(before) + len(tokens) > self.shape.length:
            raise ValueError(f"a request must fit into {self.shape.length} tokens")
        logits = self.logits(tokens, adapter, slot)[-1]
        chosen = int(logits.argmax())
        return Token(chosen, Entry(slot, slot.serial, (*before, *tokens), chosen), logits)

    @torch.no_grad()
    def logits(
        self, tokens: list[int], adapter: Mapping[str, torch.Tensor] | None = None, slot: Slot | None = None
    ) -> torch.Tensor:
        """The logits [tokens, vocabulary] of the base, or of a loaded adapter on it; in a slot, after what it holds."""
        ids = torch.tensor([tokens], device=self.device)
        kept: dict[str, Any] = {"past_key_values": slot.cache, "use_cache": True} if slot else {"use_cache": False}
        with self._with(adapter):
            result: torch.Tensor = self.model(input_ids=ids, **kept).logits[0]
        return result

    @contextlib.contextmanager
    def _with(self, adapter: Mapping[str, torch.Tensor] | None) -> Iterator[None]:
        if adapter is None:
            with self.model.disable_adapter():
                yield
            return
        assert isinstance(adapter, Loaded)
        self.model.set_adapter(adapter.key)
        yield


def llama_engine(
    memory: Memory,
    shape: LlamaShape | None = None,
    *,
    mirror: bool = True,
    base_requests: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> Engine:
    """The engine over a model whose base is drawn from a seed."""
    ports = LlamaPorts(memory, shape or LlamaShape(), mirror=mirror, device=device, seed=seed)
    tags = frozenset({WEIGHTS, KV, GRAPH})
    return Engine(ports, EngineSettings(tags=tags, lora=True, mirror=mirror, base_requests=base_requests))

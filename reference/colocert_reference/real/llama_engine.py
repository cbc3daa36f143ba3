"""An engine that computes: a transformers Llama with static KV caches, and peft adapters by name and version.

The same logic as on the rig (`colocert_reference.engine`) behind whose ports there are tensors here. What lies where:

    weights      the base parameters, and buffers such as the rotary frequencies, which no checkpoint holds
    kv_cache     a fixed number of static caches, one a request under way; finished ones are kept as cached prefixes
    cuda_graph   nothing: no graph is captured; the tag moves memory where the caller has put some there (`captured`)
    (outside)    adapters: they survive a release, and requests under way keep the version that they began with

Knows transformers, peft and torch. Does not know which saver is behind `memory`, drivers or processes. One request is
computed at a time; several are under way. Tokens are bytes: chosen greedily, or drawn for all samples of a request at
once (`Sampling`), from a generator of the request's own, so that a seed gives the same tokens whatever else is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
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


class NotFinite(ArithmeticError):
    """The model gave no probabilities: its weights, its adapter or its cache hold something else than was sent."""


class TooManyRequests(RuntimeError):
    """Every static cache belongs to a request under way."""


class Memory(Protocol):
    """One device under the saver: what is used here of `memory.ManagedMemory`."""

    def region(self, tag: str, *, backup: bool) -> contextlib.AbstractContextManager[None]: ...
    def pause(self, tag: str) -> Any: ...
    def resume(self, tag: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """Sizes of the model, of its adapters, and of its caches: `slots` of `length` tokens for `samples` each."""

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
    targets: tuple[str, ...] = TARGETS
    slots: int = 4
    length: int = 64
    samples: int = 1

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
            r=self.lora_rank, lora_alpha=self.lora_alpha, target_modules=list(self.targets), task_type="CAUSAL_LM"
        )


@dataclass(frozen=True, eq=False)
class Greedy:
    """A request for the likeliest token, each time."""

    prompt: str
    adapter: str | None
    tokens: int


@dataclass(frozen=True, eq=False)
class Sampling:
    """A request for `samples` continuations of a prompt, drawn at a temperature above 0 from a seed."""

    prompt: str
    adapter: str | None
    tokens: int
    samples: int
    temperature: float
    seed: int

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0 (got {self.temperature}): ask without sampling for greedy")


@dataclass(frozen=True)
class Drawn:
    """The next token of each sample of a request, and its logarithmic probability under what it was drawn from."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class Slot:
    """One static cache. `serial` counts what was put into it, `used` says when; `busy` while a request is under way.

    Its rows are the samples of one request. A prompt is the same in all of them.
    """

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
    """Cached KV: the first `length` tokens of a slot while it has that `serial`, `logits` after them, what came `then`.

    `logits` are [rows, vocabulary]; `then` is a token for each row.
    """

    slot: Slot
    serial: int
    length: int
    logits: torch.Tensor
    then: tuple[int, ...]

    def valid(self) -> bool:
        return self.slot.serial == self.serial


@dataclass(frozen=True)
class Token:
    """A token, or one for each sample, and what is cached up to it."""

    token: int | Drawn
    entry: Entry


@dataclass
class Running:
    """A request under way: its cache, and what it draws from."""

    slot: Slot
    generator: torch.Generator | None


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
    """The engine's ports over a model in `memory`.

    `captured` is for a caller that has memory of its own under the tag of graphs: it is called after each resume.
    """

    def __init__(
        self,
        memory: Memory,
        shape: LlamaShape,
        *,
        mirror: bool,
        device: str = "cpu",
        seed: int = 0,
        captured: Callable[[], None] | None = None,
    ) -> None:
        self.memory, self.shape, self.device, self.captured = memory, shape, device, captured
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
        self.running: dict[int, Running] = {}
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
        cache.early_initialization(shape.samples, shape.kv_heads, head, torch.float32, torch.device(self.device))
        return cache

    # ---- memory

    def pause(self, tag: str) -> None:
        if tag != GRAPH or self.captured is not None:
            self.memory.pause(tag)

    def resume(self, tag: str) -> None:
        if tag != GRAPH or self.captured is not None:
            self.memory.resume(tag)
        if tag == GRAPH and self.captured is not None:
            self.captured()
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
        running = self.running.get(id(request))
        if running is not None and cached is not None and cached.slot is running.slot and cached.valid():
            return self._next(request, running, cached.length, torch.tensor(cached.then)[:, None], adapter)
        running = running or self._begun(request)
        prompt = list(request.prompt.encode())
        if cached is not None and cached.valid() and cached.length == len(prompt):
            running.slot.take(cached.slot, len(prompt))
            return self._chosen(request, running, len(prompt), cached.logits)
        return self._next(request, running, 0, torch.tensor([prompt]).expand(self.shape.samples, -1), adapter)

    def _begun(self, request: Asking) -> Running:
        """A static cache for a new request: the one that was used longest ago."""
        free = [s for s in self.slots if not s.busy]
        if not free:
            raise TooManyRequests(f"at most {len(self.slots)} requests may be under way")
        slot = min(free, key=lambda s: s.used)
        if isinstance(request, Sampling) and not 1 <= request.samples <= self.shape.samples:
            raise ValueError(f"samples must be from 1 to {self.shape.samples} (got {request.samples})")
        self._requests += 1
        slot.begin(self._requests)
        drawing = torch.Generator().manual_seed(request.seed) if isinstance(request, Sampling) else None
        self.running[id(request)] = Running(slot, drawing)
        return self.running[id(request)]

    def done(self, request: Asking) -> None:
        """The request's cache may be used again; until it is, it serves as a prefix."""
        running = self.running.pop(id(request), None)
        if running is not None:
            running.slot.busy = False

    def _next(
        self,
        request: Asking,
        running: Running,
        before: int,
        ids: torch.Tensor,
        adapter: Mapping[str, torch.Tensor] | None,
    ) -> Token:
        if before + ids.shape[1] > self.shape.length:
            raise ValueError(f"a request must fit into {self.shape.length} tokens")
        logits = self.forward(ids, adapter, running.slot)[:, -1]
        return self._chosen(request, running, before + ids.shape[1], logits)

    def _chosen(self, request: Asking, running: Running, length: int, logits: torch.Tensor) -> Token:
        """A token a row. Rows beyond the samples asked for go along with the first."""
        slot, drawing = running.slot, running.generator
        if drawing is None or not isinstance(request, Sampling):
            then = (int(logits[0].argmax()),) * self.shape.samples
            return Token(then[0], Entry(slot, slot.serial, length, logits, then))
        if not bool(torch.isfinite(logits).all()):
            raise NotFinite(f"every logit must be finite to draw from (got others for adapter {request.adapter})")
        asked = torch.log_softmax(logits[: request.samples].float().cpu() / request.temperature, dim=-1)
        drawn = torch.multinomial(asked.exp(), 1, generator=drawing)
        tokens = tuple(drawn[:, 0].tolist())
        then = tokens + tokens[:1] * (self.shape.samples - len(tokens))
        said = Drawn(tokens, tuple(asked.gather(1, drawn)[:, 0].tolist()))
        return Token(said, Entry(slot, slot.serial, length, logits, then))

    def logits(self, tokens: list[int], adapter: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """The logits [tokens, vocabulary] of the base, or of a loaded adapter on it, without a cache."""
        return self.forward(torch.tensor([tokens]), adapter)[0]

    @torch.no_grad()
    def forward(
        self, ids: torch.Tensor, adapter: Mapping[str, torch.Tensor] | None = None, slot: Slot | None = None
    ) -> torch.Tensor:
        """The logits [rows, tokens, vocabulary] of ids [rows, tokens]; in a slot, after what it holds."""
        kept: dict[str, Any] = {"past_key_values": slot.cache, "use_cache": True} if slot else {"use_cache": False}
        with self._with(adapter):
            result: torch.Tensor = self.model(input_ids=ids.to(self.device), **kept).logits
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
    captured: Callable[[], None] | None = None,
) -> Engine:
    """The engine over a model whose base is drawn from a seed."""
    ports = LlamaPorts(memory, shape or LlamaShape(), mirror=mirror, device=device, seed=seed, captured=captured)
    tags = frozenset({WEIGHTS, KV, GRAPH})
    return Engine(ports, EngineSettings(tags=tags, lora=True, mirror=mirror, base_requests=base_requests))

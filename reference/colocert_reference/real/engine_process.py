"""The engine that computes, in its process: a Llama under the real saver, behind the calls of a driver's engine port.

    weights      the base; with a `mirror` it comes back from a host copy, bit-identical, which is verified; without,
                 its contents are lost at a release and a base has to be sent before anything is served
    kv_cache     static caches, no backup; prefixes that were cached go with them
    cuda_graph   one plain block, no backup: captured again at each resume
    (outside)    adapters, by name and version

What comes over the wire lies in transport memory that is this process's only until it acknowledges: it is copied into
the model first and wiped after, as a sender that uses its memory again would do.

Knows calls, the wire and what this process holds. Does not know the order of calls, nor how an engine decides
(`colocert_reference.engine`) or computes (`llama_engine`). The saver ends a process whose resume does not fit: nothing
here catches that, the other end of the link reports it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from colocert_reference.engine import GRAPH, KV, WEIGHTS, Engine, EngineNotReady
from colocert_reference.real import adapter_wire
from colocert_reference.real.engine_memory import CAPTURED, ContentsLost, held

if TYPE_CHECKING:
    from colocert_reference.real.llama_engine import LlamaPorts

POLICY = "policy"
"""The adapter that a pair trains."""
CALLS = ("start", "release", "resume", "drain", "admit", "flush", "generate", "load_base", "facts")
WIPED = 0xDB
_FOREVER = 7 * 86400.0
_T = TypeVar("_T")


class EngineProcess:
    """The calls. `shape` are the arguments of `llama_engine.LlamaShape`; `graphs` the bytes under the graphs' tag.

    start() | drain() release(tags) ... resume(tags) receive base, adapter; flush() resume(tags) admit() generate() ...
    """

    def __init__(self, stage: Any, shape: Mapping[str, Any], *, mirror: bool, graphs: int, seed: int) -> None:
        self.stage, self.shape, self.mirror, self.graphs, self.seed = stage, dict(shape), mirror, graphs, seed
        self.loop = asyncio.new_event_loop()
        self.engine: Engine | None = None
        self.ports: LlamaPorts
        self.sizes: dict[str, int] = {}
        self.drained = False
        self.base = ""
        self.acknowledged: dict[str, str] = {}

    # ---- memory

    def start(self) -> dict[str, int]:
        """Everything resident, no valid base. What each tag takes of the device, in bytes."""
        from colocert_reference.real.llama_engine import LlamaPorts, LlamaShape, llama_engine

        device = self.stage.device
        memory = _memory(device.name)
        block = device.alloc(GRAPH, False, self.graphs, fill=CAPTURED)
        before = device.own_bytes() or 0
        engine = llama_engine(
            memory,
            LlamaShape(**self.shape),
            mirror=self.mirror,
            device=memory.device,
            seed=self.seed,
            captured=lambda: device.fill(block, CAPTURED),
        )
        assert isinstance(engine.ports, LlamaPorts)
        self.engine, self.ports = engine, engine.ports
        engine.base_valid = False
        self.sizes = {GRAPH: before, **self._measured((device.own_bytes() or 0) - before)}
        return self.sizes

    def _measured(self, both: int) -> dict[str, int]:
        """The bytes of weights and caches, of which the caches' are found by giving them back once."""
        device = self.stage.device
        full = device.own_bytes() or 0
        self.ports.pause(KV)
        cache = full - (device.own_bytes() or 0)
        self.ports.resume(KV)
        return {WEIGHTS: both - cache, KV: cache}

    def release(self, tags: Sequence[str]) -> None:
        """What of these tags is resident."""
        self._run(self._there.release(tags))

    def resume(self, tags: Sequence[str]) -> None:
        """What of these tags is released. Weights that come back from their mirror are verified."""
        self._run(self._there.resume(tags))
        if WEIGHTS in tags and self.mirror and self.base:
            self.verify()

    # ---- requests

    def drain(self) -> None:
        self.drained = True

    def admit(self) -> None:
        """From here on requests are served. Refused while the engine is not ready."""
        engine = self._there
        if not engine.ready():
            raise EngineNotReady(
                f"an engine must be ready to admit (released: {sorted(engine.released)}, base valid: "
                f"{engine.base_valid}, failed updates: {sorted(engine.failed)})"
            )
        self.drained = False

    def flush(self) -> None:
        self._run(self._there.flush())

    def generate(
        self,
        prompts: Sequence[str],
        tokens: int,
        samples: int = 1,
        seed: int = 0,
        temperature: float = 1.0,
        adapter: str | None = POLICY,
    ) -> list[dict[str, Any]]:
        """For each prompt `samples` continuations: `tokens` and their `logprobs`, [samples][tokens] each.

        Prompt n draws from a seed of its own, made of `seed` and n. Temperature 0 takes the likeliest token, without
        logprobs. `version` is the adapter's that the answer was computed with.
        """
        engine = self._there
        if self.drained:
            raise EngineNotReady("a drained engine serves nobody (got a request)")
        if self.base and WEIGHTS not in engine.released and engine.base_valid:
            self.verify()
        if adapter in self.acknowledged:
            self.verify_adapter(adapter)
        return self._run(self._answers(prompts, tokens, samples, seed, temperature, adapter))

    async def _answers(self, prompts: Sequence[str], tokens: int, *how: Any) -> list[dict[str, Any]]:
        """As many prompts at a time as there are caches."""
        answers: list[dict[str, Any]] = []
        slots = len(self.ports.slots)
        for first in range(0, len(prompts), slots):
            some = enumerate(prompts[first : first + slots], first)
            answers += await asyncio.gather(*(self._answer(n, prompt, tokens, *how) for n, prompt in some))
        return answers

    async def _answer(
        self, n: int, prompt: str, tokens: int, samples: int, seed: int, temperature: float, adapter: str | None
    ) -> dict[str, Any]:
        from colocert_reference.real.llama_engine import Greedy, Sampling

        engine = self._there
        version = engine.adapters[adapter].version if adapter in engine.adapters else 0
        if temperature == 0:
            greedy = await engine.generate(Greedy(prompt, adapter, tokens))
            return {"prompt": prompt, "version": version, "tokens": [greedy] * samples, "logprobs": None}
        asked = Sampling(prompt, adapter, tokens, samples, temperature, seed * 1_000_003 + n)
        drawn = await engine.generate(asked)
        return {
            "prompt": prompt,
            "version": version,
            "tokens": [list(row) for row in zip(*(step.tokens for step in drawn), strict=True)],
            "logprobs": [list(row) for row in zip(*(step.logprobs for step in drawn), strict=True)],
        }

    # ---- weights

    def load_base(self, path: str, version: int = 1) -> str:
        """A base out of a safetensors file, by Hugging Face's names. Its checksum."""
        from safetensors.torch import load_file

        return self._take_base(version, load_file(path))

    def _take_base(self, version: int, tensors: Mapping[str, Any]) -> str:
        self.base = ""
        self._run(self._there.update_base(version, tensors))
        self.base = self.checksum()
        return self.base

    def receive(self, server: Any) -> dict[str, Any]:
        """One transfer, a base or an adapter as its header says: copied into the model, then acknowledged."""
        sender, said, transport = adapter_wire.receive(server)
        try:
            told = self._loaded(said, transport)
            adapter_wire.acknowledge(sender, transport, base=self.base, **told)
        finally:
            sender.close()
            for memory in transport.values():
                memory[:] = bytes([WIPED]) * len(memory)
        return {**told, "bytes": sum(map(len, transport.values()))}

    def _loaded(self, said: Mapping[str, Any], transport: Mapping[str, bytearray]) -> dict[str, Any]:
        kind, version = said.get("kind"), int(said.get("version", 0))
        if kind == "base":
            self._take_base(version, self._views(transport, {n: p.shape for n, p in self.ports.parameters.items()}))
        elif kind == "adapter":
            views = self._views(transport, self.ports.places)
            name = str(said["adapter"])
            self._run(self._there.load_adapter(name, version, views))
            self.acknowledged[name] = self.adapter_checksum(name)
        else:
            raise ValueError(f"a transfer must be a base or an adapter (got {kind!r})")
        return {"kind": kind, "version": version}

    def _views(self, transport: Mapping[str, bytearray], places: Mapping[str, Any]) -> dict[str, Any]:
        """The transport's bytes as FP32 tensors of the shapes that the engine has places for, where they fit."""
        import torch

        views = {}
        for name, memory in transport.items():
            flat = torch.frombuffer(memory, dtype=torch.float32)
            shape = places.get(name)
            views[name] = flat.view(shape) if shape is not None and shape.numel() == flat.numel() else flat
        return views

    def verify(self) -> None:
        """Raises `ContentsLost` unless the weights are those of the base that was loaded last, bit for bit."""
        if (now := self.checksum()) != self.base:
            raise ContentsLost(
                f"the weights must have the checksum of the base that was loaded, {self.base} (got {now})"
            )

    def checksum(self) -> str:
        """SHA-256 over the base's parameters, by name."""
        digest = hashlib.sha256()
        for name in sorted(self.ports.parameters):
            digest.update(self.ports.parameters[name].detach().cpu().contiguous().numpy())
        return digest.hexdigest()

    def verify_adapter(self, name: str) -> None:
        """Raises `ContentsLost` unless an adapter still holds what was acknowledged."""
        if (now := self.adapter_checksum(name)) != self.acknowledged[name]:
            raise ContentsLost(
                f"adapter {name} must hold the tensors that were acknowledged, {self.acknowledged[name]} (got {now}): "
                "it was not copied out of the transport before the acknowledgement, or was written over since"
            )

    def adapter_checksum(self, name: str) -> str:
        """SHA-256 over the tensors that the model computes with for an adapter, by name."""
        key = self._there.adapters[name].tensors.key  # type: ignore[attr-defined]
        named = self.ports.model.named_parameters()
        return _digest({place.replace(f".{key}.", "."): t for place, t in named if f".{key}." in place})

    def facts(self) -> dict[str, Any]:
        """The state, for whoever asks."""
        engine = self._there
        return {
            "sizes": self.sizes,
            "released": sorted(engine.released),
            "base_valid": engine.base_valid,
            "base": self.base,
            "adapters": {name: adapter.version for name, adapter in engine.adapters.items()},
            "adapter_sha256": {name: self.adapter_checksum(name) for name in engine.adapters},
        }

    def status(self) -> dict[str, Any]:
        """What goes with every answer."""
        engine = self.engine
        released = sorted(engine.released) if engine is not None else []
        on_device = {tag: nbytes for tag, nbytes in self.sizes.items() if tag not in released}
        holds = held(self.stage.device)
        mirror = {WEIGHTS: holds["host"]} if holds["host"] else {}
        return {
            "held": {**holds, "tags": on_device, "host_tags": mirror},
            "released": released,
            "base_valid": engine is not None and engine.base_valid,
        }

    @property
    def _there(self) -> Engine:
        if self.engine is None:
            raise EngineNotReady("an engine is started before it is asked for anything: start() first")
        return self.engine

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self.loop.run_until_complete(work)


def main(stage: Any, *, shape: dict[str, Any], mirror: bool, graphs: int, seed: int, wire: str, timeout: float) -> None:
    """The process: answers calls until it is told to leave or whoever asked is gone."""
    serve(stage, EngineProcess(stage, shape, mirror=mirror, graphs=graphs, seed=seed), wire, timeout)


def serve(stage: Any, process: EngineProcess, wire: str, timeout: float) -> None:
    """Answers calls; the imports are done before it says that it is there."""
    import colocert_reference.real.llama_engine

    assert colocert_reference.real.llama_engine
    server = adapter_wire.listen(wire, timeout)
    stage.tell({"ok": "here"})
    while (message := stage.listen(_FOREVER)) is not None:
        try:
            call, arguments = message.pop("call"), message
            if call not in (*CALLS, "receive"):
                raise ValueError(f"call must be receive or one of {', '.join(CALLS)} (got {call!r})")
            value = process.receive(server) if call == "receive" else getattr(process, call)(**arguments)
            answer = {"ok": value}
        except Exception as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        stage.tell({**answer, **process.status()})


def _memory(device: str) -> Any:
    """The saver's memory in a process without megatron-core, whose import would switch the saver's mode."""
    if device == "cuda":
        from colocert_reference.real.memory import CudaMemory

        return CudaMemory()
    from colocert_reference.real.host_memory import HostMemory

    return HostMemory()


def _digest(tensors: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].detach().cpu().contiguous().numpy())
    return digest.hexdigest()


def base_file(path: Path, tensors: Mapping[str, Any]) -> Path:
    """Writes a base where `load_base` reads it."""
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path

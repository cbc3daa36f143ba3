"""The memory of an inference engine, in a process of its own under the real saver. It serves no tokens.

What a hand-off asks of an engine is here: three regions, a host copy of its weights while they are released, contents
that are checked after they came back, an adapter that is copied before it is acknowledged. The engine that computes
(transformers with peft adapters) is `engine_process`, behind the same calls.

    weights      host backup (the mirror): bit-identical after a resume, which is verified
    kv_cache     no backup: what was cached is gone, so it must be flushed before the next generation
    cuda_graph   no backup: captured again at the resume

Knows tags, bytes and the calls of a driver's engine port. Does not import torch. The saver ends a process whose resume
does not fit: nothing here catches that, the other end of the link reports it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from colocert_reference.real import adapter_wire

WEIGHTS, KV, GRAPH = "weights", "kv_cache", "cuda_graph"
BACKED_UP = {WEIGHTS: True, KV: False, GRAPH: False}
CAPTURED, CACHED = 0xC6, 0x4B
_FOREVER = 7 * 86400.0


class EngineStateError(RuntimeError):
    """A call that does not fit the state; nothing was moved."""


class ContentsLost(RuntimeError):
    """Memory that came back, or never left, does not hold what it must."""


class EngineMemory:
    """Three regions of blocks on one device, and at most one adapter.

    start() | drain() release(tags) ... resume(tags) load_adapter() flush() resume(tags) admit() generate() | ...
    """

    def __init__(self, device: Any, blocks: Mapping[str, Sequence[int]]) -> None:
        self.device, self.sizes = device, blocks
        self.blocks: dict[str, list[Any]] = {}
        self.released: set[str] = set()
        self.admitting, self.cached, self.cache_lost = True, False, False
        self.adapter: dict[str, bytes] = {}
        self.version = 0
        self.base = ""

    def start(self) -> None:
        """Everything resident. Each block of weights holds bytes of its own, so that none passes for another."""
        for tag, sizes in self.sizes.items():
            self.blocks[tag] = [self.device.alloc(tag, BACKED_UP[tag], n, fill=CAPTURED) for n in sizes]
        for n, block in enumerate(self.blocks[WEIGHTS]):
            self.device.fill(block, 1 + n % 200)
        self.base = self.checksum()

    def release(self, tags: Sequence[str]) -> None:
        """Exactly these tags; refused where one is released already, which the saver would answer by `exit(1)`."""
        self._require(tags, released=False)
        for tag in tags:
            self.device.pause(tag)
            self.released.add(tag)
            self.cache_lost = self.cache_lost or tag == KV

    def resume(self, tags: Sequence[str]) -> None:
        """Exactly these tags; weights are verified, graphs captured again. What does not fit ends the process."""
        self._require(tags, released=True)
        for tag in tags:
            self.device.resume(tag)
            self.released.discard(tag)
            if tag == WEIGHTS:
                self.verify()
            elif tag == GRAPH:
                self._fill(GRAPH, CAPTURED)

    def load_adapter(self, tensors: dict[str, bytes]) -> int:
        """Its version. The base must be resident: the sync window begins with the resume of the weights."""
        if WEIGHTS in self.released:
            raise EngineStateError("an adapter is loaded onto resident weights (got released ones)")
        self.adapter = tensors
        self.version += 1
        return self.version

    def drain(self) -> None:
        self.admitting = False

    def flush(self) -> None:
        """Forgets what the cache is said to hold; its memory may be released."""
        self.cached = False

    def admit(self) -> None:
        self._require(self.sizes, released=False)
        self.admitting = True

    def generate(self) -> int:
        """One rollout: reads the weights, writes the cache, replays the graphs. The adapter's version."""
        if not self.admitting:
            raise EngineStateError("a drained engine serves nobody (got a request)")
        self._require(self.sizes, released=False)
        if self.cached and self.cache_lost:
            raise ContentsLost("the cache was released and not flushed: its entries point at lost contents")
        self.verify()
        self._fill(KV, CACHED)
        self.cached, self.cache_lost = True, False
        for block in self.blocks[GRAPH]:
            if self.device.checksum(block) != _sha256_of(CAPTURED, block.nbytes):
                raise ContentsLost("a graph must be captured again after its memory came back")
        return self.version

    def verify(self) -> None:
        """Raises `ContentsLost` unless the weights are those of the start, bit for bit."""
        if (now := self.checksum()) != self.base:
            raise ContentsLost(f"the weights must have the checksum of the start, {self.base} (got {now})")

    def checksum(self) -> str:
        """SHA-256 over the checksums of the weights' blocks."""
        digests = "".join(self.device.checksum(block) for block in self.blocks[WEIGHTS])
        return hashlib.sha256(digests.encode()).hexdigest()

    def facts(self) -> dict[str, Any]:
        """The state, for whoever asks."""
        return {
            "released": sorted(self.released),
            "version": self.version,
            "base": self.base,
            "adapter": {name: len(data) for name, data in self.adapter.items()},
            "adapter_sha256": adapter_wire.digest_of(self.adapter),
        }

    def _require(self, tags: Iterable[str], *, released: bool) -> None:
        for tag in tags:
            if tag not in self.blocks:
                raise EngineStateError(f"tag must be one of {', '.join(self.sizes)} of a started engine (got {tag!r})")
            if (tag in self.released) is not released:
                raise EngineStateError(f"{tag} must be {'released' if released else 'resident'}")

    def _fill(self, tag: str, value: int) -> None:
        for block in self.blocks[tag]:
            self.device.fill(block, value)


def main(stage: Any, *, blocks: dict[str, list[int]], wire: str, timeout: float) -> None:
    """The process: answers calls until it is told to leave or whoever asked is gone."""
    engine = EngineMemory(stage.device, blocks)
    server = adapter_wire.listen(wire, timeout)
    stage.tell({"ok": "here"})
    while (message := stage.listen(_FOREVER)) is not None:
        try:
            call, arguments = message.pop("call"), message
            value = _receive(engine, server) if call == "receive" else getattr(engine, call)(**arguments)
            answer = {"ok": value}
        except Exception as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        stage.tell({**answer, "held": held(stage.device), "released": sorted(engine.released)})


def held(device: Any) -> dict[str, int | None]:
    """What this process holds: device bytes, and pinned host bytes, which only the stand-in counts (else -1)."""
    pinned = device.hook.standin("pinned_bytes") if device.name == "host" else -1
    return {"device": device.own_bytes(), "host": pinned}


def _receive(engine: EngineMemory, server: Any) -> dict[str, Any]:
    sender, _, received = adapter_wire.receive(server)
    try:
        tensors = {name: bytes(data) for name, data in received.items()}
        version = engine.load_adapter(tensors)
        adapter_wire.acknowledge(sender, tensors, version=version, base=engine.base)
    finally:
        sender.close()
    return {"version": version, "bytes": sum(map(len, tensors.values()))}


def _sha256_of(value: int, nbytes: int) -> str:
    return hashlib.sha256(bytes([value]) * nbytes).hexdigest()

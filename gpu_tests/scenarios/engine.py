"""An engine's memory in its tags, and a decoder of bytes whose tokens depend on the weights that are really there.

Knows `weights`, with a host backup, and `kv_cache`, without. No torch; `g12` has a decoder on tensors.
"""

from __future__ import annotations

import hashlib

from gpu_tests.harness.port import Port

WEIGHTS, CACHE = "weights", "kv_cache"
HEAD = 64 << 10


class Engine:
    """`units` of weights and of cache, none where 0."""

    def __init__(self, port: Port, units: int, cache_units: int = 0) -> None:
        self.port = port
        self.head = port.alloc(WEIGHTS, HEAD, backup=True)
        port.device.write(self.head, b"".join(hashlib.sha256(n.to_bytes(4, "big")).digest() for n in range(HEAD // 32)))
        self.body = port.alloc(WEIGHTS, units * port.unit, backup=True, fill=5)
        self.cache = port.alloc(CACHE, cache_units * port.unit, fill=6) if cache_units else None

    @property
    def tags(self) -> list[str]:
        return [WEIGHTS, *([CACHE] if self.cache else [])]

    @property
    def nbytes(self) -> int:
        """What a sleep gives back."""
        return self.port.device.footprint(self.head, self.body, *([self.cache] if self.cache else []))

    def sleep(self) -> None:
        for tag in reversed(self.tags):
            self.port.pause(tag)

    def wake(self) -> None:
        for tag in self.tags:
            self.port.resume(tag)

    def tokens(self, count: int = 32) -> list[int]:
        """A greedy walk over the head; every token decides where the next is read."""
        self.port.device.touch(self.body)
        weights, token = self.port.device.read(self.head), 1
        out = []
        for position in range(count):
            token = weights[(token * 257 + position * 4099) % HEAD]
            out.append(token)
        return out

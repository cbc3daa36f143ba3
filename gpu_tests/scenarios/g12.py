"""G12: a decoder of one attention layer, weights and KV cache in tags of their own; greedy tokens and logits."""

from __future__ import annotations

import hashlib
from typing import Any

from gpu_tests.harness.port import Port
from gpu_tests.scenarios.engine import CACHE, WEIGHTS

WORDS, WIDTH, LENGTH = 96, 64, 40
PROMPT = [5, 17, 3, 88, 41, 2, 60, 7]
NEW = 16


class Decoder:
    """`torch` on the device's memory. The cache has no backup: what it held is computed again after a wake."""

    def __init__(self, port: Port) -> None:
        import torch

        from colocert.device import tensors

        torch.manual_seed(1)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        self.torch = torch
        self.where = "cuda" if port.device.name == "cuda" else "cpu"
        saver = tensors.start(port.device.name)
        with torch.no_grad():
            with tensors.region(saver, WEIGHTS, backup=True):
                self.words = torch.randn(WORDS, WIDTH, device=self.where)
                self.places = torch.randn(LENGTH, WIDTH, device=self.where)
                self.head = torch.randn(WORDS, WIDTH, device=self.where)
                self.q, self.k, self.v, self.out = torch.randn(4, WIDTH, WIDTH, device=self.where).clone()
            with tensors.region(saver, CACHE, backup=False):
                self.keys = torch.zeros(LENGTH, WIDTH, device=self.where)
                self.values = torch.zeros(LENGTH, WIDTH, device=self.where)

    @property
    def nbytes(self) -> int:
        held = (self.words, self.places, self.head, self.q, self.k, self.v, self.out, self.keys, self.values)
        return sum(tensor.nbytes for tensor in held)

    def step(self, token: int, place: int) -> Any:
        """Logits after one token, whose key and value go into the cache."""
        x = self.words[token] + self.places[place]
        self.keys[place] = x @ self.k / WIDTH
        self.values[place] = x @ self.v / WIDTH
        weights = self.torch.softmax(self.keys[: place + 1] @ (x @ self.q / WIDTH), dim=0)
        return self.head @ (x + weights @ self.values[: place + 1] @ self.out / WIDTH)

    def prefill(self) -> None:
        """Keys and values of the prompt, from its tokens."""
        for place, token in enumerate(PROMPT[:-1]):
            self.step(token, place)

    def decode(self) -> dict[str, Any]:
        """Greedy tokens after the prompt, and a hash of all their logits."""
        tokens, token, digest = [], PROMPT[-1], hashlib.sha256()
        for place in range(len(PROMPT) - 1, len(PROMPT) - 1 + NEW):
            logits = self.step(token, place)
            digest.update(logits.cpu().numpy().tobytes())
            token = int(logits.argmax())
            tokens.append(token)
        return {"tokens": tokens, "logits": digest.hexdigest()}


def serve(port: Port, fault: str | None, sleeps: bool) -> dict[str, Any]:
    """Two answers to one prompt, with a sleep and a wake between them or not."""
    decoder = Decoder(port)
    decoder.prefill()
    first = decoder.decode()
    released, nbytes = 0, decoder.nbytes
    if sleeps:
        free = port.device.free_bytes()
        for tag in (CACHE, WEIGHTS):
            port.device.pause(tag)
        released = port.device.free_bytes() - free
        if fault == "weights-last":
            port.device.resume(CACHE)
            decoder.prefill()
            port.device.resume(WEIGHTS)
        else:
            for tag in (WEIGHTS, CACHE):
                port.device.resume(tag)
    if not (sleeps and fault == "stale-cache"):
        decoder.prefill()
    return {"first": first, "second": decoder.decode(), "released": released, "held": nbytes}

"""The first sync after building: the adapter alone from its host copy, beside bringing the whole base back for it.

The reference's `PayloadSync` over real tensors of the sizes below, everything of the trainer offloaded. The peer is
what SkyRL's main did before its fix (SkyRL#2157): backload the frozen base, sync, and put it away again. Both alternate
in one process on one thread, into memory that is mapped already; bytes are counted, not estimated.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterable
from typing import Any

from _rows import LIMIT, Bench

from colocert.rig.payload_model import Shape, base_shapes, buffer_length, slots
from colocert_reference.sync import Adapter, Layout, PayloadSync

SIZES = {
    "small": Shape(layers=2, hidden=1024, heads=16, groups=4, head=64, ffn=2816, vocabulary=4096, rank=16, alpha=32.0),
    "large": Shape(layers=4, hidden=2048, heads=16, groups=4, head=128, ffn=5632, vocabulary=8192, rank=16, alpha=32.0),
}
ROUNDS = 7


class Offloaded:
    """A trainer just after building: base and adapter have host copies; the device's memory is mapped and unused."""

    def __init__(self, shape: Shape) -> None:
        import torch

        self.shape = shape
        self.host = {name: torch.randn(*dims) for name, dims in base_shapes(shape).items()}
        self.device = {name: torch.zeros_like(tensor) for name, tensor in self.host.items()}
        self.buffer = torch.randn(buffer_length(shape))
        self.moved = 0

    def base(self) -> dict[str, Any]:
        raise AssertionError("an adapter-only sync reads no base")

    def adapter(self, name: str) -> Adapter:
        return Adapter(self.buffer, slots(self.shape), self.shape.rank, self.shape.alpha)

    def outside(self) -> tuple[str, ...]:
        return ()

    def backload(self) -> None:
        for name, tensor in self.host.items():
            self.device[name].copy_(tensor)
            self.moved += nbytes(tensor)

    def offload(self) -> None:
        """The host copies are still good: the device's memory is given back and nothing is copied."""


class Engine:
    """Takes an adapter into memory of its own, which is there from the first load on."""

    def __init__(self) -> None:
        self.received = 0
        self.held: dict[str, Any] = {}

    def base_valid(self) -> bool:
        return True

    def load_base(self, tensors: Iterable[tuple[str, Any]]) -> Iterable[str]:
        raise AssertionError("the base is valid and is not sent")

    def load_adapter(self, name: str, tensors: dict[str, Any], adapter: Adapter, version: int) -> Iterable[str]:
        for key, tensor in tensors.items():
            if key in self.held:
                self.held[key].copy_(tensor)
            else:
                self.held[key] = tensor.clone()
        self.received += sum(map(nbytes, tensors.values()))
        return self.held

    def withdraw(self, name: str) -> None:
        raise AssertionError("nothing is lost")


def nbytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def seconds(trainer: Offloaded, engine: Engine, sync: PayloadSync, *, whole: bool) -> float:
    start = time.perf_counter()
    if whole:
        trainer.backload()
    sync.sync_adapter("policy")
    if whole:
        trainer.offload()
    return time.perf_counter() - start


def measure(bench: Bench, name: str, shape: Shape) -> None:
    trainer, engine = Offloaded(shape), Engine()
    sync = PayloadSync(trainer, engine, Layout(groups=shape.groups, head=shape.head, copies=False))
    times: dict[bool, list[float]] = {False: [], True: []}
    moved: dict[bool, int] = {}
    for _ in range(bench.rounds(ROUNDS)):
        for whole in (False, True):
            before = trainer.moved + engine.received
            times[whole].append(seconds(trainer, engine, sync, whole=whole))
            moved[whole] = trainer.moved + engine.received - before
    adapter, base = nbytes(trainer.buffer), sum(map(nbytes, trainer.host.values()))
    what = f"{name}: base {base / 2**20:.0f} MiB, adapter {adapter / 2**20:.2f} MiB"
    bytes_ratio = base / adapter
    peer = "with the whole base backloaded"
    bench.beside(what, "ms", times[False], peer, times[True], scale=1e3, inverse=True, at_least=bytes_ratio / 2)
    # Modules of one fused linear share an A, which PEFT names apart.
    bench.beside(f"{name}: bytes moved", "MiB", [moved[False]], "the fused buffer", [adapter], kind=LIMIT, scale=2**-20)


def main() -> None:
    bench = Bench.started(__file__, __doc__)
    if importlib.util.find_spec("torch") is None:
        sys.exit("bench/adapter_sync.py needs torch: install the extra `reference`")
    import torch

    torch.set_num_threads(1)
    for name, shape in SIZES.items():
        measure(bench, name, shape)
    bench.finish()


if __name__ == "__main__":
    main()

"""G23: a CUDA graph captured under a tag, released and taken again. Needs a GPU; it has not run on one."""

from __future__ import annotations

from typing import Any

from gpu_tests.harness.port import Port

SIDE = 1 << 12
TAG = "cuda_graph"


def graph(port: Port, fault: str | None) -> dict[str, Any]:
    """Captures integer work with intermediates in the graph's pool; replays before the release and after the wake."""
    import torch

    from colocert.device import tensors

    saver = tensors.start("cuda")
    port.settle()
    given = torch.arange(SIDE * SIDE, device="cuda", dtype=torch.int64).reshape(SIDE, SIDE) % 1_000
    found = torch.zeros((), device="cuda", dtype=torch.int64)

    def work() -> None:
        doubled = given * 2
        found.copy_((doubled + 1).sum())

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()  # what a first use allocates lies outside of the pool
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with saver.cuda_graph(captured, tag=TAG):
        work()
    pool = sum(
        -(-segment["total_size"] // port.device.granule) * port.device.granule
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment.get("segment_pool_id", ())) == tuple(captured.pool())
    )

    def replayed() -> int:
        found.zero_()
        captured.replay()
        torch.cuda.synchronize()
        return int(found.item())

    wanted = int((given * 2 + 1).sum().item())
    before = replayed()
    held = port.device.free_bytes()
    port.device.pause(TAG)
    freed = port.device.free_bytes() - held
    port.device.resume(TAG)
    taken = port.device.free_bytes() - held - freed
    return {
        "wanted": wanted,
        "before": before,
        "after": replayed(),
        "pool": pool,
        "released": _moved(port, freed, pool),
        "taken": _moved(port, taken, -pool),
    }


def _moved(port: Port, free: int, ledger: int) -> dict[str, Any]:
    """As the port measures, for memory that it did not make: the device's bytes beside the snapshot's."""
    tolerance = port.tolerance([]) + port.device.granule
    agreed = free if abs(free - ledger) <= tolerance else None
    return {"free": free, "own": None, "ledger": ledger, "bytes": agreed, "tolerance": tolerance}

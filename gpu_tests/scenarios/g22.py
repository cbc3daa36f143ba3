"""G22: memory from a `disable()` block inside a region. The `cuda` half has not run on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from gpu_tests.harness.port import Port

NOTHING: dict[str, Any] = {
    "expected": 0,
    "released": {"bytes": None, "free": 0, "own": 0, "ledger": 0, "tolerance": 0},
    "readable": None,
    "left": 1 << 40,
}
"""What a child that ended otherwise has shown."""


def disabled(port: Port, fault: str | None) -> dict[str, Any]:
    """A block in a region, another from a disabled block within it; the region is released meanwhile."""
    port.settle()
    inside = port.alloc("default", 4 * port.unit, backup=True, fill=1)
    before = port.device.free_bytes()
    with _disabled(port, fault):
        ordinary = port.alloc(None, 8 * port.unit, fill=2)
        whole = port.device.checksum(ordinary)
        released = port.moved(lambda: port.pause("default"))
        readable = port.device.checksum(ordinary) == whole
        port.resume("default")
        if fault != "kept-after-the-block":
            port.free(ordinary)
    return {
        "expected": port.device.footprint(inside),
        "released": released,
        "readable": readable,
        "left": before - port.device.free_bytes(),
    }


@contextlib.contextmanager
def _disabled(port: Port, fault: str | None) -> Iterator[None]:
    if port.device.name == "cuda":
        from colocert.device import tensors

        saver = tensors.start("cuda")
        with tensors.region(saver, "default", backup=True), saver.disable():
            yield
        return
    hook = port.device.hook
    with hook.region("default", True):
        hook.saver.tms_set_interesting_region(fault == "still-in-the-region")
        yield
        hook.saver.tms_set_interesting_region(True)

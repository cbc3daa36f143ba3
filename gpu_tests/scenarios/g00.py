"""G00: one pause of 64 MiB, in a child that the launcher let through."""

from __future__ import annotations

from gpu_tests.harness.port import Port

PROBE = 64 << 20


def pauses(port: Port, fault: str | None) -> dict[str, int]:
    """What the pause freed on the device."""
    port.settle()
    port.alloc("default", PROBE)
    return {"freed": port.moved(lambda: port.pause("default"))["free"]}

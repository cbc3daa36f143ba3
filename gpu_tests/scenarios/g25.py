"""G25: what a wake with a host backup needs on the device while it runs."""

from __future__ import annotations

from typing import Any

from gpu_tests.harness.peak import Peak
from gpu_tests.harness.port import Port
from gpu_tests.scenarios.engine import WEIGHTS, Engine


def wake(port: Port, fault: str | None) -> dict[str, Any]:
    """The peak during the wake, what was taken in the end, and the largest single block."""
    port.settle()
    engine = Engine(port, units=24, cache_units=8)
    before = engine.tokens()
    port.moved(engine.sleep)
    with Peak(port) as peak:
        taken = port.moved(lambda: _wake(engine, fault))
    return {
        "nbytes": engine.nbytes,
        "taken": taken,
        "peak": peak.above,
        "largest": max(port.device.footprint(block) for block in port.blocks),
        "same": before == engine.tokens(),
    }


def _wake(engine: Engine, fault: str | None) -> None:
    engine.wake()
    if fault == "second-copy":  # loads the checkpoint beside the weights and copies it over
        port, body = engine.port, engine.body
        loaded = port.alloc_raw(WEIGHTS, body.nbytes)
        port.device.write(body, port.device.read(body))
        port.free(loaded)

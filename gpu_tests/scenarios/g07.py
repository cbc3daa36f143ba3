"""G07 and G08: a trainer, an engine that needs more than is free, and the order that makes room."""

from __future__ import annotations

from typing import Any

from gpu_tests.harness.port import Port
from gpu_tests.scenarios.engine import Engine
from gpu_tests.scenarios.trainer import Trainer

GRADS = {"host": 32, "cuda": 128}
"""Units of gradients, and of weights and optimizer state each; the engine needs twice that. On a GPU 4 GiB: half of it
is more than contexts differ by."""


def trainer(port: Port, fault: str | None) -> bool:
    """Obeys: releases its gradients when told; says in the end whether what it keeps is whole."""
    held = Trainer(port, units=GRADS[port.device.name])
    before = held.samples()
    port.tell({"gradients": port.device.footprint(*held.gradients)})
    while port.listen() == "release gradients":
        held.release_gradients()
        port.tell("released")
    return before == held.samples()


def engine(port: Port, fault: str | None) -> dict[str, Any]:
    """Sleeps, wakes when told, and says what is free then and what it answers."""
    held = Engine(port, units=2 * GRADS[port.device.name])
    before, nbytes = held.tokens(), held.nbytes
    held.sleep()
    port.tell({"needs": nbytes})
    port.listen()
    held.wake()
    return {"free": port.device.free_bytes(), "before": before, "after": held.tokens()}

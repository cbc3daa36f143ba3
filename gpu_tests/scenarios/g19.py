"""G19: a trainer and an engine that take turns on one device, and a third process that watches it."""

from __future__ import annotations

import time
from typing import Any

from gpu_tests.harness.port import Port
from gpu_tests.scenarios.engine import Engine
from gpu_tests.scenarios.trainer import Trainer

TICK = 0.02
TRAINER, ENGINE, ADAPTER = 8, 20, 2
"""Units: a third of the trainer's, the engine's weights, the adapter that stays resident in the engine."""


def side(port: Port, fault: str | None, role: str) -> dict[str, Any]:
    """Obeys `wake` and `sleep`, each with an answer; returns when it was resident, by the machine's clock."""
    held: Trainer | Engine
    if role == "trainer":
        held = Trainer(port, units=TRAINER)
        nbytes = port.device.footprint(*held.kept, *held.gradients)
    else:
        port.alloc(None, ADAPTER * port.unit)
        held = Engine(port, units=ENGINE)
        nbytes = held.nbytes
    _sleep(held)
    port.tell({"nbytes": nbytes})
    resident: list[tuple[float, float]] = []
    since = 0.0
    while call := port.listen():
        if call == "wake":
            since = time.monotonic()
            held.wake()
        else:
            _sleep(held)
            resident.append((since, time.monotonic()))
        port.tell({"own": port.device.own_bytes()})
    return {"resident": resident}


def watch(port: Port, fault: str | None) -> dict[str, Any]:
    """By how much more than now was in use until it is told to stop: samples, and the stand-in's high-water mark."""
    host = port.device.name == "host"
    if host:
        port.device.hook.runtime.colocert_standin_reset_device_peak()
    start = port.device.hook.standin("device_peak") if host else 0
    least = first = port.device.free_bytes()
    port.tell("watching")
    samples = 1
    while True:
        try:
            port.listen(timeout=TICK)
        except TimeoutError:
            least = min(least, port.device.free_bytes())
            samples += 1
        else:
            exact = port.device.hook.standin("device_peak") - start if host else 0
            return {"above": max(first - least, exact), "samples": samples}


def _sleep(held: Trainer | Engine) -> None:
    if isinstance(held, Trainer):
        held.release_gradients()
        held.release_rest()
    else:
        held.sleep()

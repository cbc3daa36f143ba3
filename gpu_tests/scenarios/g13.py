"""G13: a weight sync in adapter mode, between a trainer whose base is released and an engine whose base stays."""

from __future__ import annotations

import hashlib
from typing import Any

from gpu_tests.harness.port import Port
from gpu_tests.scenarios.engine import Engine
from gpu_tests.scenarios.trainer import WEIGHTS, Trainer
from gpu_tests.scenarios.wire import Wire, framing

ADAPTER = {
    f"layers.{n}.{kind}": 4_096 * (n + 1) + odd for n in range(3) for kind, odd in (("lora_a", 0), ("lora_b", 6))
}


def engine(port: Port, fault: str | None) -> dict[str, Any]:
    """Serves; takes what comes over the wire into its adapter, or into its base where it is called so."""
    held = Engine(port, units=8)
    slots = {name: port.alloc("adapter", nbytes, backup=True, fill=0) for name, nbytes in ADAPTER.items()}
    base = [port.device.checksum(block) for block in (held.head, held.body)]
    server, name = Wire.listening()
    port.tell(name)
    wire = Wire.accepted(server)
    while message := wire.receive():
        port.device.write(slots.get(message[0], held.body), message[1])
    wire.close()
    return {
        "total": wire.total,
        "payload": wire.payload,
        "base": base,
        "base after": [port.device.checksum(block) for block in (held.head, held.body)],
        "adapter": {name: port.device.checksum(block) for name, block in slots.items()},
    }


def trainer(port: Port, fault: str | None) -> dict[str, Any]:
    """Releases its base, sends its adapter, which stays resident, and says what moved meanwhile."""
    held = Trainer(port, units=8)
    adapter = {name: port.alloc(None, nbytes) for name, nbytes in ADAPTER.items()}
    for name, block in adapter.items():
        port.device.write(block, (hashlib.sha256(name.encode()).digest() * (block.nbytes // 32 + 1))[: block.nbytes])
    full_state = [port.device.read(block) for block in held.weights] if fault == "full-state" else []
    released = port.moved(held.release_rest)
    wire = Wire.connected(port.listen())

    def sync() -> None:
        if fault == "merged":
            port.resume(WEIGHTS)
            for number, block in enumerate(held.weights):
                merged = bytearray(port.device.read(block))
                merged[0] ^= 1
                wire.send(f"base.{number}", bytes(merged))
            return
        for number, data in enumerate(full_state):
            wire.send(f"base.{number}", data)
        for name, block in adapter.items():
            wire.send(name, port.device.read(block))

    moved = port.moved(sync)
    wire.close()
    return {
        "expected": port.device.footprint(*held.kept),
        "released": released,
        "during the sync": moved,
        "sent": wire.total,
        "adapter": {name: port.device.checksum(block) for name, block in adapter.items()},
    }


PAYLOAD = sum(ADAPTER.values())
FRAMING = sum(framing(name) for name in ADAPTER)

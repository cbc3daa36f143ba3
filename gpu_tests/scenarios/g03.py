"""G03 and G04: gradients released alone; addresses over cycles."""

from __future__ import annotations

from typing import Any

from gpu_tests.harness.port import Port
from gpu_tests.scenarios.trainer import GRADS, WEIGHTS, Trainer


def gradients_alone(port: Port, fault: str | None) -> dict[str, Any]:
    """What a release of the gradients moves, and what can be read meanwhile."""
    port.settle()
    trainer = Trainer(port, grads_tag=WEIGHTS if fault == "grads-under-default" else GRADS)
    before = trainer.checksums()
    released = port.moved(trainer.release_gradients)
    during = trainer.checksums()
    taken = port.moved(lambda: port.resume(GRADS))
    return {
        "expected": port.device.footprint(*trainer.gradients),
        "released": released,
        "taken": taken,
        "before": before,
        "during": during,
        "after": trainer.checksums(),
    }


def addresses(port: Port, fault: str | None, cycles: int) -> dict[str, Any]:
    """Where every block lies before and after each hand-off, and that its bytes are there."""
    trainer = Trainer(port)
    tables, contents = [_table(trainer)], [trainer.checksums()]
    for _ in range(cycles):
        trainer.release_gradients()
        trainer.release_rest()
        if fault == "reallocates-on-wake":
            _wake_elsewhere(trainer)
        else:
            trainer.wake()
        tables.append(_table(trainer))
        contents.append(trainer.checksums())
    return {"tables": tables, "contents": contents}


def _table(trainer: Trainer) -> list[int]:
    """By the tensor where there is one: a framework may have given it other storage."""
    blocks = [*trainer.kept, *trainer.gradients]
    return [block.tensor.data_ptr() if block.tensor is not None else block.address for block in blocks]


def _wake_elsewhere(trainer: Trainer) -> None:
    """Wakes, and then moves the optimizer's state into memory of its own."""
    trainer.wake()
    old = trainer.optimizer[0]
    new = trainer.port.alloc(WEIGHTS, old.nbytes, trainer.backup)
    trainer.port.device.write(new, trainer.port.device.read(old))
    trainer.port.free(old)
    trainer.optimizer = [new]

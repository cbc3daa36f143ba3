"""A trainer's memory in its tags: weights and optimizer state under `default`, gradients under `grad_buffer`.

Knows which calls a hand-off makes of the saver, in which order. Does not compute anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from colocert.device.hook import Backup
from colocert.device.ports import Block
from gpu_tests.harness.port import Port

WEIGHTS, GRADS = "default", "grad_buffer"


@dataclass
class Trainer:
    """`units` of each: two blocks of weights, one of optimizer state, one of gradients."""

    port: Port
    units: int = 8
    backup: Backup = "pinned"
    grads_tag: str = GRADS

    def __post_init__(self) -> None:
        half = self.units * self.port.unit // 2
        self.weights = [self.port.alloc(WEIGHTS, half, self.backup, fill=n) for n in (1, 2)]
        self.optimizer = [self.port.alloc(WEIGHTS, 2 * half, self.backup, fill=3)]
        self.gradients = [self.port.alloc(self.grads_tag, 2 * half, fill=4)]

    @property
    def kept(self) -> list[Block]:
        """What a hand-off must not lose."""
        return [*self.weights, *self.optimizer]

    def checksums(self) -> list[str]:
        return [self.port.device.checksum(block) for block in self.kept]

    def samples(self) -> list[bytes]:
        """The first bytes of each block: quick where blocks are large."""
        hook = self.port.device.hook
        return [hook.read(block.address, min(block.nbytes, 1 << 20)) for block in self.kept]

    def release_gradients(self) -> None:
        self.port.pause(GRADS)

    def release_rest(self) -> None:
        self.port.pause(WEIGHTS)

    def wake(self) -> None:
        """Takes everything again; gradients have no backup and start from zero."""
        self.port.resume(WEIGHTS)
        self.port.resume(GRADS)
        for block in self.gradients:
            self.port.device.fill(block, 0)

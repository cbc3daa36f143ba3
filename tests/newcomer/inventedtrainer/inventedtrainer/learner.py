"""The learner: epochs of training, and whose turn it is on the device.

learn(batches) -> free_gradients() -> [the engine takes its weights] -> switch(Side.GENERATE) -> publish()
-> [the engine generates] -> switch(Side.LEARN) -> learn(batches) ...
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any, Protocol

from inventedtrainer import pools
from inventedtrainer.pools import Pool


class Side(Enum):
    """Who has the device."""

    LEARN = "learn"
    GENERATE = "generate"


class Engine(Protocol):
    """What the learner needs of an inference engine's client."""

    def take_adapter(self, adapter: Any, version: int) -> None: ...


# --8<-- [start:learner]
class Learner:
    def __init__(self, policy: Any, engine: Engine) -> None:
        self.policy, self.engine = policy, engine
        self.side = Side.LEARN
        self.version = 0

    def learn(self, batches: Iterable[tuple[Any, Any]]) -> list[float]:
        """One optimizer step a batch. Takes the device first, if it is lent."""
        self.switch(Side.LEARN)
        losses = []
        for inputs, targets in batches:
            losses.append(self.policy.backward(inputs, targets))
            self.policy.step()
            self.policy.clear_gradients()
        return losses

    def free_gradients(self) -> None:
        """Makes room for the engine's weights before the turn is given away."""
        pools.evict(Pool.GRADIENTS)

    def switch(self, side: Side) -> None:
        """Lends the device to the engine, or takes it back."""
        if side is self.side:
            return
        self.side = side
        for pool in (Pool.GRADIENTS, Pool.MODEL) if side is Side.GENERATE else (Pool.MODEL, Pool.GRADIENTS):
            if side is Side.GENERATE:
                pools.evict(pool)
            else:
                pools.fetch(pool)

    def publish(self) -> None:
        """Gives the engine the adapter as it is now."""
        adapter = self.policy.export(away=self.side is Side.GENERATE)
        self.engine.take_adapter(adapter, self.version + 1)
        self.version += 1


# --8<-- [end:learner]

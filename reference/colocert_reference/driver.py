"""The driver of a colocated run: who has the device when, in both peak modes, and how it recovers from an error.

Knows the order of a hand-off. Does not know ranks, remote calls or memory: `Trainers` and `Engines` are ports whose
calls return once every rank and every engine has acknowledged, and raise what any of them raised.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

WEIGHTS, KV, GRAPH = "weights", "kv_cache", "cuda_graph"


class ImpossibleConfiguration(ValueError):
    """The settings cannot be run; raised before anything was allocated, moved or asked of an engine."""


class Critics(Protocol):
    """All critic ranks. Each call may be repeated; it does nothing where its state already holds."""

    def init(self) -> None: ...
    def sleep(self) -> None: ...
    def wake_up(self) -> None: ...
    def train(self) -> None: ...


class Trainers(Critics, Protocol):
    """All trainer ranks: they also send what they trained."""

    def offload_grad_buffer(self) -> None: ...
    def clear_memory(self) -> None: ...
    def update_weights(self) -> None: ...


class Engines(Protocol):
    """All engines. `released` is what they have given back; `release` and `resume` take exactly the tags to move."""

    def released(self) -> Collection[str]: ...
    def release(self, tags: Collection[str]) -> None: ...
    def resume(self, tags: Collection[str]) -> None: ...
    def drain(self) -> None: ...
    def flush(self) -> None: ...
    def admit(self) -> None: ...
    def generate(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class DriverSettings:
    """`peak_device` says which side takes the overlap; `releasable` are the tags that the engines give back."""

    peak_device: str
    lora: bool
    releasable: frozenset[str]
    offload_train: bool = True
    offload_rollout: bool = True
    use_critic: bool = False
    rollouts: int = 1

    def check(self) -> None:
        """Raises `ImpossibleConfiguration` for what gpu-peak cannot do. LoRA it can."""
        if self.peak_device not in ("cpu", "gpu"):
            raise ImpossibleConfiguration(f"peak_device must be cpu or gpu (got {self.peak_device!r})")
        if self.peak_device == "cpu":
            return
        if not self.offload_train or not self.offload_rollout:
            raise ImpossibleConfiguration(
                "gpu-peak needs train offload and rollout offload (got "
                f"offload_train={self.offload_train}, offload_rollout={self.offload_rollout}): use peak_device='cpu'"
            )
        if self.use_critic:
            raise ImpossibleConfiguration(
                "gpu-peak has no place for a critic (got use_critic=True): use peak_device='cpu'"
            )


class Driver:
    """The loop of a colocated run.

    gpu-peak, train→rollout: gradients released | engine weights resumed | trainer asleep | sync | KV and graphs resumed
    gpu-peak, rollout→train: KV and graphs released | trainer awake | engine weights released | training
    cpu-peak: each side gives everything back before the other takes anything; a critic's turn is before the trainer's.

    What is still to be done is asked of the sides, never remembered: so both hand-offs start from any state, and a run
    after an error is an ordinary run. `unsent` only spares `close()` a sync that nobody waits for.
    """

    def __init__(
        self, trainers: Trainers, engines: Engines, settings: DriverSettings, critics: Critics | None = None
    ) -> None:
        settings.check()
        self.trainers, self.engines, self.settings, self.critics = trainers, engines, settings, critics
        self.started = False
        self.unsent = True

    def run(self, iterations: int) -> None:
        """That many iterations of rollout, training and hand-offs; ends ready for the next rollout."""
        if not self.started:
            self._start()
        self._to_rollout()
        for _ in range(iterations):
            for _ in range(self.settings.rollouts):
                self.engines.generate()
            self._to_train()
            self.trainers.train()
            self._to_rollout()

    def close(self) -> None:
        """Leaves nothing half released, whatever happened before: parameters that wait for a sync go with it."""
        self.engines.drain()
        if self.started and self.settings.offload_train:
            self._critics_sleep()
            self.trainers.sleep()
        self._resume(WEIGHTS)
        if self.started and self.unsent:
            self.trainers.update_weights()
        self._resume(KV, GRAPH)

    def _start(self) -> None:
        """The engine was there first: it makes room for the trainer's start as the mode has it."""
        self.engines.drain()
        self._release(KV, GRAPH)
        if self.settings.peak_device == "cpu":
            self._release(WEIGHTS)
        if self.critics is not None:
            self.critics.init()
        self._critics_sleep()
        self.trainers.init()
        self.started = True

    def _to_rollout(self) -> None:
        self._critics_sleep()
        if self.settings.offload_train and self.settings.peak_device == "cpu":
            self.trainers.sleep()
        elif self.settings.lora and self.settings.offload_train:
            self.trainers.clear_memory()
            self.trainers.offload_grad_buffer()
        self._resume(WEIGHTS)
        if self.settings.offload_train:
            self.trainers.sleep()
        self.trainers.update_weights()
        self.unsent = False
        self.engines.flush()
        self._resume(KV, GRAPH)
        self.engines.admit()

    def _to_train(self) -> None:
        self.unsent = True
        self.engines.drain()
        self._release(KV, GRAPH)
        if self.settings.peak_device == "cpu":
            self._release(WEIGHTS)
        self._train_critics()
        if self.settings.offload_train:
            self.trainers.wake_up()
        self._release(WEIGHTS)

    def _train_critics(self) -> None:
        if self.critics is not None:
            if self.settings.offload_train:
                self.critics.wake_up()
            self.critics.train()
        self._critics_sleep()

    def _critics_sleep(self) -> None:
        if self.critics is not None and self.settings.offload_train:
            self.critics.sleep()

    def _release(self, *tags: str) -> None:
        due = [t for t in tags if t in self.settings.releasable and t not in self.engines.released()]
        if due and self.settings.offload_rollout:
            self.engines.release(due)

    def _resume(self, *tags: str) -> None:
        due = [t for t in tags if t in self.engines.released()]
        if due:
            self.engines.resume(due)

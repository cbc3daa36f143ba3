"""The learning pair as the live profile drives it: a step, a hand-off or a request at a time, on a rig's device.

Knows how the profile's calls are those of the pair and of its two processes. Does not know scenarios or rules, nor the
order of a hand-off (`colocert_reference.driver`). The engine keeps no mirror of its weights: after each release the
base is sent again, then the adapters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from colocert_reference.driver import WEIGHTS, Driver
from colocert_reference.ports import DEFAULT, GRADS
from colocert_reference.real.loop import LLAMA, LearningPair, LoopSettings
from colocert_reference.real.pair import ENGINE, TRAINER
from colocert_reference.real.processes import ANSWER_WITHIN, THREADS, AnySide, SharedDevice, Side

LIVE_TRAINER = "colocert_reference.real.live_trainer:main"
MEDIUM = LoopSettings(samples=2, tokens=12, mirror=False, learning_rate=2e-2)
SMALL = LoopSettings(
    samples=1,
    prompts=1,
    tokens=4,
    mirror=False,
    model={
        "layers": 1,
        "hidden": 64,
        "heads": 2,
        "kv_heads": 1,
        "ffn": 128,
        "vocabulary": 256,
        "rope_theta": 10000,
        "rms_eps": 1e-5,
        "lora_rank": 8,
        "lora_alpha": 8.0,
    },
)
"""For many cycles. Every tensor takes a granule, so that few tensors count for more than small ones."""


class RigDevice(SharedDevice):
    """The device of a rig: its processes are started there, so that the suite knows and measures them."""

    def __init__(self, rig: Any) -> None:
        machine = rig.machine
        super().__init__(machine.device, machine.capacity, machine.ledger.parent)
        self.rig = rig

    def start(self, side: str, body: str, *, answer_within: float = ANSWER_WITHIN, **arguments: Any) -> AnySide:
        env = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", THREADS)}
        begun = Side(side, self.rig.process(side, body, env=env, **arguments), answer_within)
        begun.answer("start")
        return begun

    def close(self) -> None:
        """Nothing: the device is the rig's."""


class RigPair(LearningPair):
    """The learning pair over the processes of a rig, with several adapters."""

    def __init__(self, rig: Any, settings: LoopSettings, **bodies: Any) -> None:
        self.rig, self.adapters = rig, list(rig.config.adapters)
        super().__init__(settings, peak_device=rig.config.peak_device, device=rig.config.device, **bodies)

    def _shared(self, processes: str, device: str) -> SharedDevice:
        return RigDevice(self.rig)

    def _process(self, name: str, body: str, **arguments: Any) -> AnySide:
        more = {"adapters": self.adapters} if name == TRAINER else {}
        return super()._process(name, body, **arguments, **more)

    def sync(self) -> None:
        """The base where the engine's is not valid, then every adapter."""
        self.version += 1
        if not self.engine.told.get("base_valid"):
            self.transfer("send_base", version=self.version)
        for name in self.adapters:
            self.transfer("send_adapter", name=name, version=self.version)


class LivePair:
    """What `live(rig)` of the reference returns; it is in training then."""

    def __init__(
        self, rig: Any, learner: str = LIVE_TRAINER, engine: str = LLAMA, driver: Callable[..., Driver] = Driver
    ) -> None:
        settings = SMALL if rig.config.size == "small" else MEDIUM
        rig.limit(settings.capacity)
        self.pair = RigPair(rig, settings, learner=learner, engine=engine, driver=driver)
        self.pair.driver._start()
        self.pair.driver._release(WEIGHTS)

    def train_step(self, batch: int, adapter: str | None = None, step: bool = True) -> float:
        named = adapter or self.pair.adapters[0]
        return float(self.pair.trainer.call("train_step", batch=batch, adapter=named, step=step))

    def to_rollout(self) -> None:
        self.pair.to_rollout()

    def to_training(self) -> None:
        self.pair.to_training()

    def generate(self, prompt: Sequence[int], seed: int, adapter: str | None) -> list[int]:
        """All samples of one prompt, one after the other."""
        asked = "".join(chr(ord("a") + token % 26) for token in prompt)
        [answer] = self.pair.tokens([asked], seed, adapter=adapter or self.pair.adapters[0])
        return [int(token) for sample in answer["tokens"] for token in sample]

    def regions(self) -> Mapping[str, Mapping[str, Sequence[int]]]:
        """The engine has measured its tags by what they took; the trainer says what its tensors have."""
        sizes = self.pair.engine.call("facts")["sizes"]
        return {TRAINER: self.pair.trainer.call("regions"), ENGINE: {tag: [nbytes] for tag, nbytes in sizes.items()}}

    def release(self, owner: str, tags: Sequence[str]) -> None:
        if owner == ENGINE:
            self.pair.engine.call("release", tags=list(tags))
            return
        if GRADS in tags:
            self.pair.trainer.call("offload_grad_buffer")
        if DEFAULT in tags:
            self.pair.trainer.call("sleep")

    def resume(self, owner: str, tags: Sequence[str]) -> None:
        """The trainer's tags come back together, as its `wake_up` has it."""
        if owner == ENGINE:
            self.pair.engine.call("resume", tags=list(tags))
        else:
            self.pair.trainer.call("wake_up")

    def fingerprint(self) -> Mapping[str, str]:
        return dict(self.pair.trainer.call("fingerprint"))

    def adapter_state(self, name: str) -> Mapping[str, str]:
        return dict(self.pair.trainer.call("adapter_state", name=name))

    def renew_adapter(self, name: str) -> None:
        self.pair.trainer.call("renew_adapter", name=name)

    def close(self) -> None:
        self.pair.end()

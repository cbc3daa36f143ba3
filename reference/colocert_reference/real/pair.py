"""A colocated pair on real memory: one trainer process and one engine process on one device, under the driver.

Knows how the driver's ports reach two processes, and records after each call what both hold. Does not know the order of
a hand-off (`colocert_reference.driver`), nor how either process does what it is asked. This process imports neither
torch nor the saver, and holds nothing on the device.

    with Pair(Sizes(), peak_device="gpu") as pair:
        pair.run(3)
        pair.peaks()

A sample is taken after each call. Within a call one side alone moves memory, and of one kind of bytes it only takes or
only gives, so the samples hold the peaks; the stand-in's own high-water mark (`device_peak`) confirms the device's.
The engine of `Pair` is memory alone (`engine_memory`); the pair whose engine computes and whose trainer learns from
what it generated is `loop.LearningPair`. A step at a time, without the driver's order:

    pair.step(pair.engine, "release", tags=["kv_cache"])   one call of one side, and a sample after it
    pair.engine.call("facts"); pair.device.held_by(pair.engine, pair.trainer); pair.engine.held
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from colocert_reference.driver import GRAPH, KV, WEIGHTS, Driver, DriverSettings
from colocert_reference.real.processes import (
    ANSWER_WITHIN,
    AnySide,
    CallFailed,
    DoesNotFit,
    PairError,
    ProcessDied,
    SharedDevice,
)

MIB = 1 << 20
GRANULE = 2 * MIB
ENGINE, TRAINER = "engine", "trainer"
PLAIN, RAY = "plain", "ray"
_Pair = TypeVar("_Pair", bound="Pair")


def granules(nbytes: int) -> int:
    """What an allocation takes of the device: whole granules."""
    return -(-nbytes // GRANULE) * GRANULE


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How big both sides are. `capacity` lies in the middle of the wall, half a gradient buffer from either side.

    With the gradients gone early every hand-off of gpu-peak fits; without, the engine's weights do not come back. The
    LoRA rank is far larger than a real one's, so that gradient buffers of a tiny model are many granules.
    """

    capacity: int = 248 * MIB
    shape: Mapping[str, Any] = field(
        default_factory=lambda: {"hidden": 512, "heads": 8, "kv_heads": 4, "ffn": 1024, "lora_rank": 512}
    )
    weights: tuple[int, ...] = (24 * MIB, 24 * MIB, 16 * MIB + 4096)
    kv_cache: tuple[int, ...] = (48 * MIB, 48 * MIB)
    cuda_graph: tuple[int, ...] = (6 * MIB,)
    communicators: int = 26 * MIB

    def blocks(self) -> dict[str, tuple[int, ...]]:
        """The engine's regions, a size a block."""
        return {WEIGHTS: self.weights, KV: self.kv_cache, GRAPH: self.cuda_graph}


@dataclass(frozen=True)
class Sample:
    """What both sides held after a step, in bytes. `free` is the whole device's; -1 for what the platform hides.

    `tags` is what of `device` lies under which tag, by side, and `host_tags` of `host`, where the sides say so. `begun`
    is on the clock of the pair, `failed` whether the step raised.
    """

    phase: str
    step: str
    seconds: float
    device: Mapping[str, int]
    host: Mapping[str, int]
    free: int
    tags: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    host_tags: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    begun: float = 0.0
    failed: bool = False
    facts: Mapping[str, int] = field(default_factory=dict)

    @property
    def on_device(self) -> int:
        return sum(self.device.values())

    @property
    def on_host(self) -> int:
        return sum(self.host.values())


class PairTrainers:
    """The driver's trainers: one."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def init(self) -> None:
        self.pair.init()

    def offload_grad_buffer(self) -> None:
        self.pair.step(self.pair.trainer, "offload_grad_buffer")

    def clear_memory(self) -> None:
        self.pair.step(self.pair.trainer, "clear_memory")

    def sleep(self) -> None:
        self.pair.step(self.pair.trainer, "sleep")

    def update_weights(self) -> None:
        """Returns once the engine has acknowledged copies of all tensors and both processes have answered."""
        self.pair.recorded("trainer.update_weights", self.pair.sync)

    def wake_up(self) -> None:
        self.pair.step(self.pair.trainer, "wake_up")

    def train(self) -> None:
        self.pair.train()


class PairEngines:
    """The driver's engines: one. A tag at a time, so that the failure of one says which."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def released(self) -> Collection[str]:
        return self.pair.engine.released

    def release(self, tags: Collection[str]) -> None:
        for tag in tags:
            self.pair.step(self.pair.engine, "release", tags=[tag])

    def resume(self, tags: Collection[str]) -> None:
        for tag in tags:
            free = self.pair.device.free()
            try:
                self.pair.step(self.pair.engine, "resume", tags=[tag])
            except DoesNotFit as error:
                error.needed, error.free = self.pair.engine_needs(tag), free
                raise

    def drain(self) -> None:
        self.pair.step(self.pair.engine, "drain")

    def flush(self) -> None:
        self.pair.step(self.pair.engine, "flush")

    def admit(self) -> None:
        self.pair.step(self.pair.engine, "admit")

    def generate(self) -> None:
        self.pair.generate()


class Pair:
    """Both processes, the driver over them, and the samples. `observe` is called with each sample as it is taken.

    Both processes are there from the start, holding nothing: their start-up checks need room on the device. The engine
    takes its memory first, the trainer in the driver's `init`. After the death of one, every call of it raises the same
    error; the other is as it was, and its calls go on.
    """

    def __init__(
        self,
        sizes: Sizes | None = None,
        *,
        peak_device: str,
        device: str = "host",
        driver: Callable[..., Driver] = Driver,
        observe: Callable[[Sample], None] = lambda sample: None,
        answer_within: float = ANSWER_WITHIN,
        processes: str = PLAIN,
    ) -> None:
        self.sizes = sizes or Sizes()
        settings = DriverSettings(peak_device=peak_device, lora=True, releasable=frozenset({WEIGHTS, KV, GRAPH}))
        self.driver = driver(PairTrainers(self), PairEngines(self), settings)  # checks before any process exists
        self.observe, self.answer_within = observe, answer_within
        self.samples: list[Sample] = []
        self.adapter_bytes: list[int] = []
        self.device = self._shared(processes, device)
        self._phase = "start"
        self._sides: list[AnySide] = []
        self._began = time.monotonic()
        self.facts: dict[str, int] = {}
        try:
            self._start()
        except BaseException:
            self.end()
            raise

    def _shared(self, processes: str, device: str) -> SharedDevice:
        return shared(processes, device, self.sizes.capacity)

    def _start(self) -> None:
        common = self._wire()
        blocks = {tag: list(sizes) for tag, sizes in self.sizes.blocks().items()}
        self.engine = self._process(ENGINE, "colocert_reference.real.engine_memory:main", blocks=blocks, **common)
        self.trainer = self._process(
            TRAINER,
            "colocert_reference.real.trainer_process:main",
            shape=dict(self.sizes.shape),
            communicators=self.sizes.communicators if self.device.name == "host" else 0,
            accumulate=1,
            **common,
        )
        self.step(self.engine, "start")

    def _wire(self) -> dict[str, Any]:
        """How the two processes reach each other."""
        return {"wire": f"colocert-pair-{os.getpid()}-{uuid.uuid4().hex}", "timeout": self.answer_within}

    def _process(self, name: str, body: str, **arguments: Any) -> AnySide:
        side = self.device.start(name, body, answer_within=self.answer_within, **arguments)
        self._sides.append(side)
        return side

    def run(self, iterations: int) -> None:
        """That many iterations of the driver, and its close."""
        self.driver.run(iterations)
        self._phase = "close"
        self.driver.close()

    def init(self) -> None:
        self.step(self.trainer, "init")

    def train(self) -> None:
        self.step(self.trainer, "train")

    def generate(self) -> None:
        self.step(self.engine, "generate")

    def engine_needs(self, tag: str) -> int:
        """The device bytes that a tag of the engine takes."""
        return sum(map(granules, self.sizes.blocks()[tag]))

    def step(self, side: AnySide, call: str, **arguments: Any) -> Any:
        """What one call of one side returned; a sample is taken after it."""
        name = ".".join((side.name, " ".join((call, *arguments.get("tags", ())))))
        return self.recorded(name, lambda: side.call(call, **arguments))

    def recorded(self, step: str, act: Callable[[], Any]) -> Any:
        """Carries out a step and samples after it, also after one that failed."""
        phase = self._enter(step)
        begun, failed = time.monotonic(), True
        self.facts = {}
        try:
            value = act()
            failed = False
        finally:
            sample = Sample(
                phase,
                step,
                time.monotonic() - begun,
                self.device.held_by(*self._sides),
                {side.name: side.held["host"] for side in self._sides},
                self.device.free(),
                {side.name: side.held.get("tags", {}) for side in self._sides},
                {side.name: side.held.get("host_tags", {}) for side in self._sides},
                begun - self._began,
                failed,
                self.facts,
            )
            self.samples.append(sample)
        self.observe(sample)
        return value

    def sync(self) -> None:
        """The adapter out of one process into the other."""
        if (nbytes := self.transfer("update_weights")) is not None:
            self.adapter_bytes.append(nbytes)
            self.facts["adapter"] = nbytes

    def transfer(self, call: str, **arguments: Any) -> int | None:
        """A call of the trainer that sends to the engine; the bytes, or None where it sent nothing.

        Both answer, whatever happens; a death is what is reported.
        """
        self.trainer.begin(call, **arguments)
        try:
            told = self.trainer.answer(call)
        except CallFailed:
            self.engine.require_alive("receive")
            raise
        if not isinstance(told, dict) or "sending" not in told:
            return None
        errors: list[PairError] = []
        nbytes = 0
        try:
            self.engine.begin("receive")
            nbytes = self.engine.answer("receive")["bytes"]
        except PairError as error:
            errors.append(error)
        try:
            self.trainer.answer(call)
        except PairError as error:
            errors.append(error)
        if errors:
            raise next((e for e in errors if isinstance(e, ProcessDied)), errors[0])
        return nbytes

    def peaks(self) -> dict[str, Sample]:
        """The samples with the most bytes: `device` and `host` in total, and of each side alone."""
        total = {
            "device": max(self.samples, key=lambda s: s.on_device),
            "host": max(self.samples, key=lambda s: s.on_host),
        }
        for side in (TRAINER, ENGINE):
            total[f"{side} device"] = max(self.samples, key=lambda s: s.device.get(side, 0))
            total[f"{side} host"] = max(self.samples, key=lambda s: s.host.get(side, 0))
        return total

    def device_peak(self) -> int:
        """The stand-in's own high-water mark, whoever held it and whenever; -1 on `cuda`."""
        return self.device.peak()

    def end(self) -> None:
        """Ends both processes, kills what does not end, and removes the ledger."""
        for side in reversed(self._sides):
            side.end()
        self.device.close()

    def __enter__(self: _Pair) -> _Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _enter(self, step: str) -> str:
        """The phase that a step belongs to; some steps begin one."""
        now, after = _PHASES.get(step, (self._phase, self._phase))
        if self._phase == "close" or (self._phase == "start" and step != "trainer.init"):
            return self._phase
        self._phase = after
        return now


def shared(processes: str, device: str, capacity: int) -> SharedDevice:
    """The device whose processes are children of this one (`plain`), or kept by Ray actors (`ray`)."""
    if processes == RAY:
        from colocert_reference.real.ray_sides import RayDevice

        return RayDevice(device, capacity)
    if processes != PLAIN:
        raise ValueError(f"processes must be {PLAIN} or {RAY} (got {processes!r})")
    return SharedDevice(device, capacity)


_PHASES = {
    "trainer.init": ("start", "to rollout"),
    "engine.generate": ("rollout", "rollout"),
    "engine.drain": ("to training", "to training"),
    "trainer.train": ("training", "to rollout"),
}
"""Step to the phase it belongs to, and the one that the steps after it belong to."""

"""Plans: what a shape needs on the device and on the host, at each step of both hand-offs in both peak modes.

Knows the reference order of a run as a list of calls, makes them on the doubles with a shape's sizes, and folds what
happens with the byte ledger. Does not know how a plan is shown, and does no byte arithmetic of its own beyond sums.

One GPU's part of each side is driven; host bytes are that times the GPUs of a node. Every GPU is taken to hold the
same. What lies on the host beside the two sides is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from colocert.rig.contract import Claims, Config
from colocert.rig.rig import Rig
from colocert.rig.trainers import TrainerDouble
from colocert.rules.run import DEFAULT, ENGINE, GRAPH, KV, WEIGHTS
from colocert.shapes import Shape, engine_sizes_of, regions_of
from colocert.trace.events import AnyEvent, SaverAlloc, SaverFree, SaverPause, SaverResume
from colocert.trace.ledger import Ledger

MODES = ("gpu", "cpu")
TRAINER = "trainer"
OUTSIDE = "outside"
"""The tag of trainer memory that the saver does not manage: it comes and goes, and is never released."""


class Category(NamedTuple):
    """Whose bytes, under which tag, and what they hold."""

    owner: str
    tag: str
    kind: str


FROZEN = Category(TRAINER, DEFAULT, "base")
Bytes = Mapping[Category, int]


class Step(NamedTuple):
    """One call to one side. Without a label it moves no bytes and is not shown."""

    phase: str
    label: str
    side: str
    call: str
    tags: tuple[str, ...] = ()


def order(mode: str, *, early_grads: bool = True) -> tuple[Step, ...]:
    """A start and one iteration in the reference order, up to the rollout after it. A test holds it to the driver's."""
    gpu = mode == "gpu"
    start = [
        Step("start", "", ENGINE, "drain"),
        Step("start", "KV cache, graphs out", ENGINE, "release", (KV, GRAPH)),
        *([] if gpu else [Step("start", "weights out", ENGINE, "release", (WEIGHTS,))]),
        Step("start", "trainer built", TRAINER, "init"),
        *_to_rollout("start", gpu=gpu, early_grads=early_grads, weights_out=not gpu),
        Step("rollout", "generation", ENGINE, "generate"),
    ]
    away = "rollout→train"
    handoff = [
        Step(away, "", ENGINE, "drain"),
        Step(away, "KV cache, graphs out", ENGINE, "release", (KV, GRAPH)),
        *([] if gpu else [Step(away, "weights out", ENGINE, "release", (WEIGHTS,))]),
        Step(away, "trainer awake", TRAINER, "wake_up"),
        *([Step(away, "weights out", ENGINE, "release", (WEIGHTS,))] if gpu else []),
        Step("training", "training step", TRAINER, "train"),
    ]
    back = _to_rollout("train→rollout", gpu=gpu, early_grads=early_grads, weights_out=True)
    return (*start, *handoff, *back, Step("rollout", "generation", ENGINE, "generate"))


def _to_rollout(phase: str, *, gpu: bool, early_grads: bool, weights_out: bool) -> Iterator[Step]:
    if gpu:
        yield Step(phase, "", TRAINER, "clear_memory")
        if early_grads:
            yield Step(phase, "gradients out", TRAINER, "offload_grad_buffer")
    else:
        yield Step(phase, "trainer asleep", TRAINER, "sleep")
    if weights_out:
        yield Step(phase, "weights back", ENGINE, "resume", (WEIGHTS,))
    if gpu:
        yield Step(phase, "trainer asleep", TRAINER, "sleep")
    yield Step("sync", "adapter sent", TRAINER, "update_weights")
    yield Step("sync", "", ENGINE, "flush")
    yield Step(phase, "KV cache, graphs back", ENGINE, "resume", (KV, GRAPH))
    yield Step(phase, "", ENGINE, "admit")


# ---- what comes out


class Moment(NamedTuple):
    """What is held after one movement of bytes: on one GPU, and on the host of one node.

    `written` are the bytes of frozen base that a file-backed offload has on disk by now: clean page cache, which the
    system may drop. They take the place of the anonymous copy of the frozen base and are counted apart.
    """

    step: Step
    device: Bytes
    host: Bytes
    written: int

    @property
    def on_device(self) -> int:
        return sum(self.device.values())

    def on_host(self, *, file_backed: bool = False) -> int:
        """Host bytes that cannot be dropped, of both sides; with file-backed frozen weights, without their copy."""
        return sum(n for c, n in self.host.items() if not (file_backed and c == FROZEN))

    def host_of(self, owner: str) -> int:
        """Host bytes of one side's copies: the trainer's backup, or the engine's mirror."""
        return sum(n for c, n in self.host.items() if c.owner == owner)


class ModePlan(NamedTuple):
    """One peak mode: what is held from the start to the rollout after the first iteration."""

    mode: str
    moments: tuple[Moment, ...]

    def phases(self) -> list[str]:
        """The phases in the order they come."""
        return list(dict.fromkeys(m.step.phase for m in self.moments))

    def device_peak(self, phase: str | None = None) -> Moment:
        """The moment with most on the device, of a phase or of all; the first of equals."""
        return max(self._of(phase), key=lambda m: m.on_device)

    def host_peak(self, phase: str | None = None, *, file_backed: bool = False) -> Moment:
        """The moment with most on the host, of a phase or of all; the first of equals."""
        return max(self._of(phase), key=lambda m: m.on_host(file_backed=file_backed))

    def _of(self, phase: str | None) -> list[Moment]:
        return [m for m in self.moments if phase in (None, m.step.phase)]


class Room(NamedTuple):
    """What a peak leaves of a capacity. Negative: by how much it does not fit, and `peak` is where."""

    left: int
    peak: Moment

    @property
    def fits(self) -> bool:
        return self.left >= 0


class Plan(NamedTuple):
    """A shape's plan. `grads_kept` is gpu-peak without the early release of the gradient buffers."""

    shape: Shape
    modes: Mapping[str, ModePlan]
    grads_kept: ModePlan

    @property
    def device_capacity(self) -> int:
        """Bytes of one GPU that the two sides share."""
        return self.shape.machine.gpu_bytes.nbytes - self.shape.machine.gpu_reserved.nbytes

    @property
    def host_capacity(self) -> int:
        """Bytes of one node's memory."""
        return self.shape.machine.host_bytes.nbytes

    def device_room(self, mode: ModePlan) -> Room:
        """What remains of a GPU at the mode's device peak."""
        peak = mode.device_peak()
        return Room(self.device_capacity - peak.on_device, peak)

    def host_room(self, mode: ModePlan, *, file_backed: bool = False) -> Room:
        """What remains of a node's memory at the mode's host peak."""
        peak = mode.host_peak(file_backed=file_backed)
        return Room(self.host_capacity - peak.on_host(file_backed=file_backed), peak)

    def too_much(self, mode: ModePlan) -> Moment | None:
        """The first moment that does not fit on the device."""
        return next((m for m in mode.moments if m.on_device > self.device_capacity), None)


def plan(shape: Shape) -> Plan:
    """Runs the shape in both modes and returns what is held when."""
    return Plan(
        shape,
        {mode: ModePlan(mode, _moments(shape, mode, early_grads=True)) for mode in MODES},
        ModePlan("gpu", _moments(shape, "gpu", early_grads=False)),
    )


# ---- the run


class Books:
    """A ledger for each category, fed with the events of its own allocations."""

    def __init__(self) -> None:
        self.ledgers: dict[Category, Ledger] = {}
        self._category: dict[tuple[str, int, str], Category] = {}

    def apply(self, event: AnyEvent) -> bool:
        """Takes an event in and returns whether it moved bytes."""
        if not isinstance(event, (SaverAlloc, SaverPause, SaverResume, SaverFree)):
            return False
        place = (event.owner, event.rank, event.alloc)
        if isinstance(event, SaverAlloc):
            self._category[place] = Category(event.owner or TRAINER, event.tag, event.kind)
        category = self._category[place]
        self.ledgers.setdefault(category, Ledger()).apply(event)
        return True

    def device(self) -> Bytes:
        return {c: ledger.device_bytes for c, ledger in self.ledgers.items() if ledger.device_bytes}

    def host(self, times: int) -> Bytes:
        return {c: ledger.host_bytes * times for c, ledger in self.ledgers.items() if ledger.host_bytes}

    def written(self, times: int) -> int:
        """Bytes of frozen base that have been offloaded at some time: a file is written once and stays."""
        return self.ledgers[FROZEN].peak_host_bytes * times if FROZEN in self.ledgers else 0


class PlannedTrainer(TrainerDouble):
    """The trainer double, with what a training step takes outside the saver.

    Activations live for the step. Communicators come with the first collective after a sleep and go with the next
    one: they are what gradient buffers share the device with when the engine's weights come back.
    """

    def __init__(self, rank: Any, engines: Any, shape: Shape) -> None:
        super().__init__(rank, engines)
        self._shape = shape
        self._held: dict[str, Any] = {}

    def train(self) -> None:
        self._take("communicators", self._shape.trainer.communicators.nbytes)
        self._take("activations", self._shape.trainer.activations.nbytes)
        super().train()
        self._give("activations")

    def sleep(self) -> None:
        self._give("communicators")
        super().sleep()

    def _take(self, name: str, nbytes: int) -> None:
        if nbytes and name not in self._held:
            self._held[name] = self.rank.alloc(OUTSIDE, nbytes, name=name, kind=name)

    def _give(self, name: str) -> None:
        if name in self._held:
            self.rank.saver.free(self._held.pop(name))


def config_of(shape: Shape, mode: str) -> Config:
    """A scenario's configuration with the sizes of a shape: one rank, one engine."""
    sizes = engine_sizes_of(shape)
    return Config(lora=True, peak_device=mode, regions=regions_of(shape), engine_sizes=sizes, groups="absent")


def _moments(shape: Shape, mode: str, *, early_grads: bool) -> tuple[Moment, ...]:
    books, gpus = Books(), round(shape.machine.gpus_per_node.number)
    moments: list[Moment] = []
    step: Step | None = None

    def take(event: AnyEvent) -> None:
        if books.apply(event) and step is not None:
            moments.append(Moment(step, books.device(), books.host(gpus), books.written(gpus)))

    rig = Rig(config_of(shape, mode), CLAIMS, take, started=False)
    try:
        rig.chain([PlannedTrainer(rank, rig.engines, shape) for rank in rig.ranks])
        for now in order(mode, early_grads=early_grads):
            step, before = now, len(moments)
            target = rig.engines[0] if now.side == ENGINE else rig.trainers[0]
            getattr(target, now.call)(*([now.tags] if now.tags else []))
            if now.label and len(moments) == before:
                moments.append(Moment(now, books.device(), books.host(gpus), books.written(gpus)))
    finally:
        rig.close()
    return tuple(moments)


CLAIMS = Claims(
    lora=True,
    multi_lora=False,
    full_parameter=False,
    early_grad_release=True,
    offload_train_optional=False,
    rematerialize=False,
    group_teardown=True,
    peak_device=frozenset(MODES),
    gpu_peak_with_critic=False,
    engine_releases=frozenset({WEIGHTS, KV, GRAPH}),
    resident_while_released=frozenset(),
    adapter_source="host",
    file_backed_frozen=True,
    versions=False,
    base_requests_in_lora_mode=False,
    sync_strategies=frozenset({"adapter"}),
    disaggregated=False,
    replacement=False,
    retained_backup=False,
    gradients_traced=False,
)
"""What the planned run would claim; the doubles do not ask."""


# ---- in words


def size(nbytes: int) -> str:
    """Bytes as people write them, in powers of ten: 1.34 TB, 162.5 GB, 1.03 GB, 83.9 MB."""
    for unit, each in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        value = nbytes / each
        if abs(value) >= 1:
            return f"{value:.1f} {unit}" if abs(value) >= 10 else f"{value:.2f} {unit}"
    return f"{nbytes} B"


def verdicts(found: Plan) -> list[str]:
    """What fits and what does not, and by how much: one plain sentence each."""
    said = []
    for mode in found.modes.values():
        said.append(f"{mode.mode}-peak, device: {_device_sentence(found, mode)}")
        said.append(f"{mode.mode}-peak, host: {_host_sentence(found, mode)}")
    said.insert(1, f"gpu-peak with the gradient buffers kept, device: {_device_sentence(found, found.grads_kept)}")
    return said


def _device_sentence(found: Plan, mode: ModePlan) -> str:
    room = found.device_room(mode)
    peak = f"{size(room.peak.on_device)} of {size(found.device_capacity)} a GPU, at {where(room.peak)}"
    first = found.too_much(mode)
    if first is None:
        return f"fits with {size(room.left)} to spare ({peak})."
    return (
        f"does not fit: {size(-room.left)} too much ({peak}); "
        f"the first step that fails is {where(first)}, by {size(first.on_device - found.device_capacity)}."
    )


def _host_sentence(found: Plan, mode: ModePlan) -> str:
    said = []
    for file_backed in (False, True):
        room = found.host_room(mode, file_backed=file_backed)
        copies = "with file-backed frozen weights" if file_backed else "with every copy in memory"
        verb = f"{size(room.left)} remain" if room.fits else f"does not fit: {size(-room.left)} too much"
        held = f"{size(room.peak.on_host(file_backed=file_backed))} of {size(found.host_capacity)} a node"
        evictable = f" and {size(room.peak.written)} of evictable file pages" if file_backed else ""
        said.append(f"{copies} {verb} ({held}{evictable}, at {where(room.peak)})")
    return "; ".join(said) + "."


def where(moment: Moment) -> str:
    """A moment's place for a sentence."""
    return f"{moment.step.phase}: {moment.step.label}"

"""The reference as an implementation under test: its ports over the doubles of a colocert rig.

The one module of the reference that knows colocert. Does not know scenarios or rules.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from colocert import Claims, Rig
from colocert.extras import has_torch
from colocert.rig.engine_rig import EngineRig
from colocert.rig.frozen_rig import FrozenRig
from colocert.rig.group_rank import RankDouble
from colocert.rig.group_rig import GroupRig
from colocert.rig.live_rig import LiveRig
from colocert.rig.payload_rig import PayloadRig
from colocert.rig.sync_rig import SyncRig
from colocert_reference.dispatch import Dispatch, SyncSettings
from colocert_reference.driver import Driver
from colocert_reference.driver_ports import driver as reference_driver
from colocert_reference.engine import Engine
from colocert_reference.engine_ports import engine as reference_engine
from colocert_reference.group import Group, Ranks
from colocert_reference.lifecycle import Lifecycle
from colocert_reference.offload import FrozenOffload
from colocert_reference.payload_ports import RigPayload
from colocert_reference.ports import DEFAULT, GRADS, PARAMS, Ports, Settings
from colocert_reference.rank_processes import Build, ProcessRanks

CLAIMS = Claims(
    lora=True,
    multi_lora=True,
    full_parameter=True,
    early_grad_release=True,
    offload_train_optional=True,
    rematerialize=True,
    group_teardown=True,
    peak_device=frozenset({"cpu", "gpu"}),
    gpu_peak_with_critic=False,
    engine_releases=frozenset({"weights", "kv_cache", "cuda_graph"}),
    resident_while_released=frozenset(),
    adapter_source="host",
    file_backed_frozen=True,
    versions=True,
    base_requests_in_lora_mode=False,
    sync_strategies=frozenset({"adapter", "merged", "full", "fsdp"}),
    disaggregated=True,
    replacement=True,
    retained_backup=False,
    gradients_traced=True,
)


LIVE_PACKAGES = ("torch", "megatron", "torch_memory_saver", "transformers", "peft")
"""What the pair of the live profile is made of."""


class RigMemory:
    """The strict saver as the memory port."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig

    def pause(self, tag: str) -> None:
        self.rig.saver.pause(tag)

    def resume(self, tag: str) -> None:
        self.rig.saver.resume(tag)

    def fits(self, tags: Sequence[str]) -> bool:
        return sum(a.size for tag in tags for a in self.rig.saver.of(tag)) <= self.rig.free_bytes()


class RigGroups:
    """The process-group double as the groups port."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.original = rig.process_groups.arguments()

    def tear_down(self) -> None:
        for name in self.original:
            if name in self.rig.process_groups.alive:
                self.rig.process_groups.destroy(name)

    def rebuild(self) -> None:
        for name, args in self.original.items():
            if name not in self.rig.process_groups.alive:
                self.rig.process_groups.create(name, **args)


class RigWork:
    """Steps, gradients and syncs on the rig's memory: the gradients port and the work port.

    With several adapters `train()` takes them in turn, and each steps on every second turn of its own: the other's
    gradients are kept in between.
    """

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        buffers = [a.name for a in rig.saver.of(GRADS)]
        self.pending = dict.fromkeys(buffers, 0)
        self.rounds = 2 if rig.config.multi_lora else rig.config.accumulate
        self.turn = 0

    def live(self) -> bool:
        return any(self.pending.values())

    def keep(self) -> dict[str, str]:
        return self.rig.data(GRADS, "read")

    def restore(self, kept: dict[str, str]) -> None:
        self.rig.data(GRADS, "overwrite", content=kept)

    def zero(self) -> None:
        self.rig.data(GRADS, "zero")

    def step(self) -> None:
        rig = self.rig
        if "data" in rig.process_groups.alive:
            rig.process_groups.use("data")
        buffers = list(self.pending)
        buffer = buffers[self.turn % len(buffers)]
        with rig.point("train"):
            if not self.pending[buffer]:
                rig.data(GRADS, "zero", only=buffer)
            rig.data(PARAMS if rig.config.rematerialize else DEFAULT, "read")
            rig.data(GRADS, "accumulate", only=buffer)
            self.pending[buffer] += 1
            self.turn = (self.turn + 1) % len(buffers)
            if self.pending[buffer] == self.rounds:
                rig.data(GRADS, "consume", only=buffer)
                self.pending[buffer] = 0
                self._apply(buffer)

    def _apply(self, buffer: str) -> None:
        if self.rig.config.multi_lora:
            trained = [buffer.replace("grads", "adapter"), "optimizer"]
        elif self.rig.config.lora:
            trained = ["adapter", "optimizer"]
        else:
            trained = [a.name for a in self.rig.saver.of(DEFAULT)]
        for name in trained:
            self.rig.data(DEFAULT, "overwrite", only=name)
        if self.rig.config.rematerialize:
            self.rematerialize()

    def rematerialize(self) -> None:
        self.rig.data(DEFAULT, "read")
        self.rig.data(PARAMS, "overwrite")

    def send(self, tag: str, *, from_host: bool) -> None:
        kind = "adapter" if self.rig.config.lora else "base"
        read_from = "host" if from_host else "device"
        for allocation in self.rig.saver.of(tag):
            if allocation.kind == kind or tag == PARAMS:
                self.rig.send(kind, tag, only=allocation.name, read_from=read_from)

    def clear_memory(self) -> None:
        self.rig.clear_memory()


class ReferenceTrainer(Lifecycle):
    """The lifecycle on a rig, with the fingerprint that lets exploration merge sequences."""

    def __init__(self, rig: Rig) -> None:
        config, work = rig.config, RigWork(rig)
        super().__init__(
            Ports(memory=RigMemory(rig), groups=RigGroups(rig), gradients=work, work=work),
            Settings(
                tags=frozenset(config.regions),
                lora=config.lora,
                offload_train=config.offload_train,
                rematerialize=config.rematerialize,
                syncs=config.role == "actor",
            ),
        )

    def fingerprint(self) -> tuple[object, ...]:
        """Every attribute that a later call can depend on: this object's own, and the work's counters."""
        own = {k: v for k, v in vars(self).items() if k not in ("ports", "settings")}
        work = self.ports.work
        return (freeze(own), freeze({k: v for k, v in vars(work).items() if k != "rig"}))


def freeze(value: Any) -> object:
    """A plain value as a hashable one. Raises `TypeError` for anything that is not plain data."""
    if isinstance(value, dict):
        return tuple((k, freeze(v)) for k, v in sorted(value.items()))
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(value))
    if isinstance(value, (list, tuple)):
        return tuple(freeze(v) for v in value)
    if value is None or isinstance(value, (str, int, float, bytes)):
        return value
    raise TypeError(f"a fingerprint holds plain data only (got {type(value).__name__})")


def rank_doubles(rig: GroupRig) -> Build:
    """What a rank's process builds: the kit's double."""
    return lambda rank: (RankDouble, rig.rank_arguments(rank))


async def started(group: Group) -> Group:
    """The group with its ranks running."""
    await group.start()
    return group


async def train_group(rig: GroupRig) -> Group:
    """The reference group on Ray actors; on local processes where Ray is not installed, which the trace then says."""
    ranks: Ranks
    if importlib.util.find_spec("ray") is not None:
        from colocert_reference.real.ray_group import RayRanks

        ranks = RayRanks(rank_doubles(rig))
    else:
        rig.record("ranks", through="local processes")
        ranks = ProcessRanks(rank_doubles(rig))
    return await started(Group(ranks, rig.config.ranks, rig.deadline))


def weight_sync(rig: SyncRig) -> Dispatch:
    """The reference dispatch on a rig: its worker groups and its engine are the ports."""
    return Dispatch(rig.workers, rig.engine, sync_settings(rig))


def sync_settings(rig: SyncRig) -> SyncSettings:
    """What the scenario asks of a weight sync."""
    config = rig.config
    return SyncSettings(colocated=config.colocated, sends=config.sends, adapters=config.adapters if config.lora else ())


def frozen_offload(rig: FrozenRig, offload: type[FrozenOffload] = FrozenOffload) -> FrozenOffload:
    """The reference offload over the rig's module: frozen storages, and without LoRA those that training changes."""
    from colocert_reference.real.frozen_tensors import stores

    def of(frozen: bool) -> Any:
        named = [(n, p) for n, p in rig.module.named_parameters() if n not in rig.adapter_names]
        apart = [p for n, p in rig.module.named_parameters() if n in rig.adapter_names or p.requires_grad is frozen]
        return stores([(n, p) for n, p in named if p.requires_grad is not frozen], apart)

    return offload(
        lambda: of(frozen=True),
        lambda: () if rig.config.lora else of(frozen=False),
        directory=rig.directory if rig.config.file_backed else None,
        chunk=rig.config.chunk,
        report=lambda text: rig.record("fallback", text=text),
    )


def live(rig: LiveRig) -> Any:
    """The learning pair on the rig's device, in training."""
    if not rig.config.lora:
        raise NotImplementedError("the pair of the live profile trains adapters (got lora=False)")
    from colocert_reference.real.live_pair import LivePair

    return LivePair(rig)


class Reference:
    """The implementation that `--impl=reference` names."""

    name = "colocert-reference"
    version = "0.1.0"
    claims = CLAIMS

    def __init__(
        self,
        trainer: Callable[[Rig], Lifecycle] = ReferenceTrainer,
        driver: Callable[[Rig], Driver] = reference_driver,
        group: Callable[[GroupRig], Awaitable[Group]] = train_group,
        sync: Callable[[SyncRig], Dispatch] = weight_sync,
        payload: Callable[[PayloadRig], Any] = RigPayload,
        offload: Callable[[FrozenRig], Any] = frozen_offload,
        engine: Callable[[EngineRig], Engine] = reference_engine,
        pair: Callable[[LiveRig], Any] = live,
    ) -> None:
        self.trainer = trainer
        self.driver = driver
        self.train_group = group
        self.weight_sync = sync
        if has_torch():
            self.payload_sync = payload
        if all(importlib.util.find_spec(package) for package in LIVE_PACKAGES):
            self.live = pair
        self.frozen_offload = offload
        self.engine = engine


implementation = Reference()

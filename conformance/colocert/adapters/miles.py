"""miles (github.com/radixark/miles): the real `MegatronTrainRayActor` and its process groups, on a rig.

Fits the wheel miles-rl 0.0.2, the public main and its gpu-peak branch, found in `COLOCERT_MILES_PATH` (a folder with
an unpacked wheel or a checkout), else as an installed package. Needs torch, megatron-core, torch_memory_saver, ray,
transformers and numpy; no GPU, no SGLang.

Real: `sleep wake_up train update_weights offload_grad_buffer clear_memory`, their flags and timers, and the reloadable
process groups. Replaced by the rig: the saver, cache clearing, `torch.distributed` below those groups, the numerical
work inside `train()` and the transfer inside `update_weights()`. Knows where miles allocates; does not know any rule.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from colocert.adapters.distributed import Distributed
from colocert.adapters.found import Framework
from colocert.rig import Claims, Rig

MILES = Framework("miles", distribution="miles-rl", variable="COLOCERT_MILES_PATH")
ACTOR = "miles.backends.megatron_utils.actor"
STAND_INS = ("polars", "httpx", "mooncake", "!sglang", "!megatron.training", "!miles.utils.fp8_kernel")
"""What the actor's imports need unguarded and the lifecycle never uses. A wheel bundles the two replaced packages."""

ASLEEP = ("_asleep", "_train_offloaded")
EARLY = ("_grad_buffer_paused", "_grad_buffer_offloaded")
"""The flags that the versions of the actor keep; 0.0.2 keeps none."""


def adapters_stay() -> bool:
    """Whether LoRA's parameter buffers are allocated without backup under a tag that `sleep()` leaves alone."""
    return 'kwargs["disable_param_buffers_cpu_backup"] = True' in MILES.source(
        "miles.backends.megatron_utils.lora_utils"
    )


def claims() -> Claims:
    """What the source at hand supports. Several adapters and replaced ranks are not driven, hence not claimed."""
    actor, stay = MILES.source(ACTOR), adapters_stay()
    gpu = {"gpu"} if "--colocate-memory-peak-device" in MILES.source("miles.utils.arguments") else set()
    return Claims(
        lora=True,
        multi_lora=False,
        full_parameter=True,
        early_grad_release="def offload_grad_buffer(" in actor,
        offload_train_optional=True,
        rematerialize="rematerialize_param_from_master_weight" in actor,
        group_teardown=True,
        peak_device=frozenset({"cpu"} | gpu),
        gpu_peak_with_critic=False,
        engine_releases=frozenset({"weights", "kv_cache", "cuda_graph"}),
        resident_while_released=frozenset({"adapters"} if stay else ()),
        adapter_source="resident" if stay else "host",
        file_backed_frozen=False,
        versions=True,
        base_requests_in_lora_mode=False,
        sync_strategies=frozenset({"adapter", "full"}),
        disaggregated=True,
        replacement=False,
        retained_backup=True,
        gradients_traced=False,
    )


class Args(SimpleNamespace):
    """Options that are not named are off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class MilesTrainer:
    """One rank's actor, built without its constructor and `init()`, which need a cluster."""

    def __init__(self, rig: Rig) -> None:
        rig.stubs(STAND_INS)
        self.rig, self.module = rig, MILES.load(ACTOR)
        self.flags = [flag for flag in (*ASLEEP, *EARLY) if flag in MILES.source(ACTOR)]
        self.allocate()
        self.patch()
        self.worker = self.build()
        if hasattr(self.worker, "offload_grad_buffer"):
            self.offload_grad_buffer = lambda: self.call("offload_grad_buffer")

    def allocate(self) -> None:
        """Moves the adapters to where this version of miles allocates them."""
        if self.rig.config.lora and self.rig.config.offload_train and adapters_stay():
            for moved in [a for a in self.rig.saver.of("default") if a.kind == "adapter"]:
                self.rig.saver.free(moved)
                self.rig.alloc("param_buffer", moved.nbytes, name=moved.name, kind="adapter")

    def patch(self) -> None:
        rig, actor = self.rig, self.module
        base = importlib.import_module("miles.ray.train_actor")
        groups = importlib.import_module("miles.utils.reloadable_process_group")
        self.distributed, self.reloadable = Distributed(rig.process_groups), groups.ReloadableProcessGroup
        pair = "store_get_result = get_rollout_data" in MILES.source(ACTOR)
        for module in (actor, base, groups):
            rig.patch((module, "print_memory"), lambda *a, **k: None)
        for module in (actor, base):
            rig.patch((module, "clear_memory"), lambda *a, **k: rig.clear_memory())
        for module in (actor, groups):
            rig.patch((module, "dist"), self.distributed)
        rig.patch((groups, "old_new_group_dict"), {})
        rig.patch((self.reloadable, "GROUPS"), {})
        rig.patch((actor, "torch_memory_saver"), rig.saver)
        rig.patch((actor, "ray"), SimpleNamespace(get=rig.get))
        rig.patch((actor, "get_rollout_data"), lambda *a, **k: ({}, nullcontext()) if pair else {})
        rig.patch((actor.torch.cuda, "ipc_collect"), lambda: None)
        if hasattr(actor, "is_first_replica_megatron_main_rank"):
            rig.patch((actor, "is_first_replica_megatron_main_rank"), lambda: False)
        groups.monkey_patch_torch_dist()
        self.distributed.adopt()

    def build(self) -> Any:
        config, worker = self.rig.config, object.__new__(self.module.MegatronTrainRayActor)
        worker.args = Args(
            offload_train=config.offload_train,
            colocate=config.colocated,
            lora_rank=8 if config.lora else 0,
            rematerialize_param_from_master_weight=config.rematerialize,
        )
        worker.role, worker._rank, worker.model = config.role, 0, []
        worker._is_main_rank = worker._is_first_replica_megatron_main_rank = False
        worker._heartbeat, worker.weight_updater = MagicMock(), MagicMock()
        worker.weight_updater.update_weights.side_effect = self.push
        engines: tuple[Any, ...] = ([], None, 0, [], [])
        worker.rollout_manager = self.rig.remote(
            SimpleNamespace(get_updatable_engines_and_lock=lambda: engines, set_weight_version=lambda version: None)
        )
        worker.train_actor = worker.train_critic = self.step
        for flag in self.flags:
            setattr(worker, flag, False)
        return worker

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The work inside `train()`. Like miles' step it zeroes gradients first and uses them up in the same call."""
        rig = self.rig
        if "data" in self.distributed.known:
            rig.process_groups.use("data")
        with rig.point("train"):
            rig.data("default", "read")
            rig.data("param_buffer", "overwrite" if rig.config.rematerialize else "read")
            for how in ("zero", "accumulate", "consume"):
                rig.data("grad_buffer", how)
            trained = ("adapter", "optimizer") if rig.config.lora else ("base", "params", "optimizer")
            for allocation in [a for a in rig.saver.allocations.values() if a.kind in trained]:
                rig.data(allocation.tag, "overwrite", only=allocation.name)
        outcomes = getattr(self.module, "TrainStepOutcome", None)
        return outcomes.NORMAL if outcomes else None

    def push(self, *args: Any, **kwargs: Any) -> None:
        """The transfer inside `update_weights()`: the host copy of what is released, else the device."""
        kind = "adapter" if self.rig.config.lora else "base"
        held = "params" if self.rig.config.rematerialize else kind
        for allocation in [a for a in self.rig.saver.allocations.values() if a.kind == held]:
            source = "host" if allocation.paused and allocation.backup else "device"
            self.rig.send(kind, allocation.tag, only=allocation.name, read_from=source)

    def call(self, method: str, *args: Any) -> Any:
        """A call of the actor, inside the region that miles opens for the whole process (`TMS_INIT_ENABLE=1`)."""
        bound = getattr(self.worker, method)
        rest = list(inspect.signature(bound).parameters.values())[len(args) :]
        required = [None for p in rest if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        with self.rig.saver.region("default", enable_cpu_backup=True):
            return bound(*args, *required)

    def sleep(self) -> Any:
        return self.call("sleep")

    def wake_up(self) -> Any:
        return self.call("wake_up")

    def train(self) -> Any:
        return self.call("train", 0)

    def update_weights(self) -> Any:
        """Only an actor has a weight updater; miles' driver never asks a critic."""
        if self.rig.config.role != "actor":
            return None
        engines = Args(rollout_engines=[], engine_gpu_counts=[], engine_gpu_offsets=[], has_new_engines=False)
        takes_engines = inspect.signature(self.worker.update_weights).parameters
        return self.call("update_weights", *([engines] if takes_engines else []))

    def clear_memory(self) -> Any:
        return self.call("clear_memory")

    def close(self) -> None:
        """A Ray actor has no end of its own: it is killed."""

    def believed(self) -> dict[str, bool]:
        """The actor's flags. Under LoRA they speak of `default`, and of gradients where there is a flag for these."""
        config, state = self.rig.config, {flag: getattr(self.worker, flag) for flag in self.flags}
        asleep = [state[flag] for flag in ASLEEP if flag in state]
        early = [state[flag] for flag in EARLY if flag in state]
        if not asleep:
            return {}
        if config.lora:
            return {"default": asleep[0]} | ({"grad_buffer": early[0]} if early else {})
        owed = config.rematerialize and config.role == "actor"
        return {tag: asleep[0] for tag in config.regions if not (owed and tag == "param_buffer")}

    def fingerprint(self) -> tuple[object, ...]:
        """The actor's flags and which of its groups are down: all that a later call depends on."""
        groups = self.reloadable.GROUPS.get(os.getpid(), [])
        return (tuple(getattr(self.worker, flag) for flag in self.flags), tuple(g.group is None for g in groups))


class Miles:
    """The implementation that `--impl=miles` names."""

    name = "miles"
    build_cost = "high"
    trainer = MilesTrainer

    @property
    def driver(self) -> Callable[[Rig], Any]:
        """The hand-off profile's factory; absent where the source at hand has no driver loop, as in a wheel."""
        from colocert.adapters import miles_driver

        if not miles_driver.has_loop():
            raise AttributeError("driver: there is no train.py beside the package")
        return miles_driver.driver

    @property
    def version(self) -> str:
        return MILES.version()

    @property
    def claims(self) -> Claims:
        return claims()


implementation = Miles()

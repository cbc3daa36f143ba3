"""miles (github.com/radixark/miles): the real `MegatronTrainRayActor` and its process groups, on a rig.

Fits the wheel miles-rl 0.0.2, the public main and its gpu-peak branch, found in `COLOCERT_MILES_PATH` (a folder with
an unpacked wheel or a checkout), else as an installed package. Needs torch, megatron-core, torch_memory_saver, ray,
transformers and numpy; no CUDA, no SGLang.

Real: `sleep wake_up train update_weights offload_grad_buffer clear_memory`, their flags and timers, and the reloadable
process groups. Replaced by the rig: the saver, cache clearing, `torch.distributed` below those groups, the numerical
work inside `train()` and the transfer inside `update_weights()`. Knows where miles allocates; does not know any rule.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import subprocess
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from colocert.rig import Claims, ProcessGroups, Rig

VARIABLE = "COLOCERT_MILES_PATH"
STAND_INS = ("polars", "httpx", "mooncake", "!sglang", "!megatron.training", "!miles.utils.fp8_kernel")
"""Imported unguarded by the actor's imports; a wheel bundles an `sglang` and a `megatron.training` of its own."""

ASLEEP = ("_asleep", "_train_offloaded")
EARLY = ("_grad_buffer_paused", "_grad_buffer_offloaded")
"""The flags that versions of the actor keep; 0.0.2 keeps none."""

WORLD = "world"
NCCL_TIMEOUT = 600
"""torch's default for a new NCCL group, in seconds."""


def find() -> Path | None:
    """The folder that holds the package `miles`, or None. Imports nothing of it."""
    if given := os.environ.get(VARIABLE):
        return Path(given) if Path(given, "miles", "__init__.py").is_file() else None
    spec = importlib.util.find_spec("miles")
    return Path(spec.origin).parents[1] if spec and spec.origin else None


def source(module: str) -> str:
    """The text of a module of miles, empty where there is none."""
    root = find()
    path = root / (module.replace(".", "/") + ".py") if root else None
    return path.read_text() if path and path.is_file() else ""


def version() -> str:
    """From the metadata beside the package, else the commit of the checkout."""
    root = find()
    if root is None:
        return "not found"
    for distribution in importlib.metadata.distributions(name="miles-rl", path=[str(root)]):
        return distribution.version
    described = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    )
    return "commit " + described.stdout.strip() if described.returncode == 0 else "unknown"


def adapters_stay() -> bool:
    """Whether LoRA's parameter buffers are allocated without backup under a tag that `sleep()` leaves alone."""
    return 'kwargs["disable_param_buffers_cpu_backup"] = True' in source("miles.backends.megatron_utils.lora_utils")


def claims() -> Claims:
    """What the source at hand supports. `multi_lora` is not driven, hence not claimed."""
    actor, options = source("miles.backends.megatron_utils.actor"), source("miles.utils.arguments")
    stay = adapters_stay()
    return Claims(
        lora=True,
        multi_lora=False,
        full_parameter=True,
        early_grad_release="def offload_grad_buffer(" in actor,
        offload_train_optional=True,
        rematerialize="rematerialize_param_from_master_weight" in actor,
        group_teardown=True,
        peak_device=frozenset({"cpu", "gpu"} if "--colocate-memory-peak-device" in options else {"cpu"}),
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


def load() -> ModuleType:
    """The actor module, imported once. Raises `ImportError` where there is no miles."""
    root = find()
    if root is None:
        raise ImportError(
            f"miles must be installed (miles-rl), or {VARIABLE} must name a folder with an unpacked wheel or a "
            f"checkout, which holds miles/__init__.py (got {os.environ.get(VARIABLE) or 'neither'})"
        )
    if str(root) not in sys.path:  # last: a wheel bundles a megatron and an sglang that must not hide installed ones
        sys.path.append(str(root))
    return importlib.import_module("miles.backends.megatron_utils.actor")


class Distributed:
    """What miles uses of `torch.distributed`, over the group double. A group that exists is adopted, not created."""

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups, self.known = groups, groups.arguments()
        self.P2POp = type("P2POp", (), {})

    def new_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,
        **other: Any,
    ) -> SimpleNamespace:
        named = (n for n, args in self.known.items() if args["ranks"] == ranks and n != WORLD)
        name = next(named, f"group{ranks}")
        if name not in self.groups.alive:
            seconds = int(timeout.total_seconds()) if timeout else NCCL_TIMEOUT
            self.groups.create(name, ranks=ranks, backend=backend or "nccl", timeout=seconds, options=pg_options)
        return SimpleNamespace(desc=name, ranks=ranks)

    def destroy_process_group(self, group: SimpleNamespace) -> None:
        if group.desc not in self.groups.alive:
            raise ValueError("Invalid process group specified or has been destroyed.")  # what torch raises
        self.groups.destroy(group.desc)

    def get_rank(self, group: Any = None) -> int:
        return 0

    def get_world_size(self, group: Any = None) -> int:
        return len(group.ranks) if group else 1

    def __getattr__(self, name: str) -> Any:
        if name == "old_new_group":  # miles' own mark
            raise AttributeError(name)
        return lambda *args, **kwargs: None


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
        self.rig, self.module = rig, load()
        self.allocate()
        self.patch()
        self.adopt_groups()
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
        rig.patch((actor, "torch_memory_saver"), rig.saver)
        for module in (actor, base):
            rig.patch((module, "clear_memory"), lambda *a, **k: rig.clear_memory())
        for module in (actor, base, groups):
            rig.patch((module, "print_memory"), lambda *a, **k: None)
        self.distributed = Distributed(rig.process_groups)
        for module in (actor, groups):
            rig.patch((module, "dist"), self.distributed)
        rig.patch((groups, "old_new_group_dict"), {})
        rig.patch((groups.ReloadableProcessGroup, "GROUPS"), {})
        rig.patch((actor, "ray"), SimpleNamespace(get=rig.get))
        rig.patch((actor.torch.cuda, "ipc_collect"), lambda: None)
        if hasattr(actor, "is_first_replica_megatron_main_rank"):
            rig.patch((actor, "is_first_replica_megatron_main_rank"), lambda: False)
        pair = "store_get_result = get_rollout_data" in inspect.getsource(actor)
        rig.patch((actor, "get_rollout_data"), lambda *a, **k: ({}, nullcontext()) if pair else {})
        self.reloadable = groups

    def adopt_groups(self) -> None:
        """Puts the groups that exist under miles' own management, which leaves the world group alone."""
        self.reloadable.monkey_patch_torch_dist()
        for name, args in self.distributed.known.items():
            if name != WORLD:
                self.distributed.new_group(
                    ranks=args["ranks"],
                    backend=args["backend"],
                    timeout=timedelta(seconds=args["timeout"]),
                    pg_options=args["options"],
                )

    def build(self) -> Any:
        config = self.rig.config
        worker = object.__new__(self.module.MegatronTrainRayActor)
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
        text = inspect.getsource(self.module)
        self.flags = [flag for flag in (*ASLEEP, *EARLY) if flag in text]
        for flag in self.flags:
            setattr(worker, flag, False)
        return worker

    # ---- what miles does not do itself here

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The work inside `train()`: gradients are zeroed first, as miles' step does, and used up in the same call."""
        rig = self.rig
        if "data" in self.distributed.known:
            rig.process_groups.use("data")
        with rig.point("train"):
            if rig.config.rematerialize:
                rig.data("default", "read")
                rig.data("param_buffer", "overwrite")
            for tag in ("default", "param_buffer"):
                rig.data(tag, "read")
            for how in ("zero", "accumulate", "consume"):
                rig.data("grad_buffer", how)
            trained = ("adapter", "optimizer") if rig.config.lora else ("base", "params", "optimizer")
            for allocation in [a for a in rig.saver.allocations.values() if a.kind in trained]:
                rig.data(allocation.tag, "overwrite", only=allocation.name)
        outcome = getattr(self.module, "TrainStepOutcome", None)
        return outcome.NORMAL if outcome else None

    def push(self, *args: Any, **kwargs: Any) -> None:
        """The transfer inside `update_weights()`: the saver's host copy where there is one, else the device."""
        sent = ("adapter",) if self.rig.config.lora else ("params",) if self.rig.config.rematerialize else ("base",)
        for allocation in [a for a in self.rig.saver.allocations.values() if a.kind in sent]:
            self.rig.send(
                "adapter" if self.rig.config.lora else "base",
                allocation.tag,
                only=allocation.name,
                read_from="host" if allocation.paused and allocation.backup else "device",
            )

    # ---- the contract

    def call(self, method: str, *args: Any) -> Any:
        """A call of the actor, inside the region that miles opens for the whole process (`TMS_INIT_ENABLE=1`)."""
        bound = getattr(self.worker, method)
        parameters = list(inspect.signature(bound).parameters.values())[len(args) :]
        missing = [None for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        with self.rig.saver.region("default", enable_cpu_backup=True):
            return bound(*args, *missing)

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
        takes_engines = inspect.signature(self.worker.update_weights).parameters
        none = Args(rollout_engines=[], engine_gpu_counts=[], engine_gpu_offsets=[], has_new_engines=False)
        return self.call("update_weights", *([none] if takes_engines else []))

    def clear_memory(self) -> Any:
        return self.call("clear_memory")

    def close(self) -> None:
        """A Ray actor has no end of its own: it is killed."""

    def believed(self) -> dict[str, bool]:
        """The actor's flags. Under LoRA they speak of `default`, and of gradients where there is a flag for these."""
        config = self.rig.config
        state = {name: getattr(self.worker, name) for name in self.flags}
        asleep = [state[name] for name in ASLEEP if name in state]
        early = [state[name] for name in EARLY if name in state]
        if not asleep:
            return {}
        if config.lora:
            return {"default": asleep[0]} | ({"grad_buffer": early[0]} if early else {})
        return {tag: asleep[0] for tag in config.regions if not (config.rematerialize and tag == "param_buffer")}

    def fingerprint(self) -> tuple[object, ...]:
        """The actor's flags and which of its groups are down: all that a later call depends on."""
        groups = self.reloadable.ReloadableProcessGroup.GROUPS.get(os.getpid(), [])
        return (tuple(getattr(self.worker, name) for name in self.flags), tuple(g.group is None for g in groups))


class Miles:
    """The implementation that `--impl=miles` names."""

    name = "miles"
    build_cost = "high"
    trainer = MilesTrainer

    @property
    def version(self) -> str:
        return version()

    @property
    def claims(self) -> Claims:
        return claims()


implementation = Miles()

"""AReaL (github.com/areal-project/AReaL): the real `MegatronEngine` on a rig.

Fits the wheel areal 1.0.4, found in `COLOCERT_AREAL_PATH` (a folder with an unpacked wheel or a checkout), else as an
installed package. Needs torch, megatron-core, torch_memory_saver, ray, transformers and numpy; no GPU, no SGLang.

Real: `offload onload update_weights train_batch`, with `_offload_aware_context`, `_ensure_ready` and the flag that they
ask. Replaced by the rig: the saver, cache clearing, `torch.distributed`, the computation below `train_batch`, the file
that a sync writes and the server that reads it. Knows where AReaL allocates; does not know any rule.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from colocert.adapters.distributed import Distributed
from colocert.adapters.found import Framework
from colocert.rig import Claims, Rig

AREAL = Framework("areal", distribution="areal", variable="COLOCERT_AREAL_PATH")
ENGINE = "areal.engine.megatron_engine"
STAND_INS = (
    *("aiofiles", "aiohttp", "datasets", "einops", "flask", "httpx", "hydra", "lark", "mbridge"),
    *("megatron.bridge", "numba", "omegaconf", "openai", "orjson", "PIL", "pybase64", "swanlab", "tenacity"),
    *("tensorboardX", "torchdata", "trackio", "uvloop", "wandb", "werkzeug"),
    *("!areal.engine.megatron_utils.fp8.kernels", "!areal.utils.logging"),
)
"""What the engine's imports need unguarded and its lifecycle never uses."""

CLAIMS = Claims(
    lora=True,
    multi_lora=False,
    full_parameter=True,
    early_grad_release=False,
    offload_train_optional=True,
    rematerialize=False,
    group_teardown=False,
    peak_device=frozenset({"cpu"}),
    gpu_peak_with_critic=False,
    engine_releases=frozenset({"weights", "kv_cache", "cuda_graph"}),
    resident_while_released=frozenset(),
    adapter_source="reloaded",
    file_backed_frozen=False,
    versions=True,
    base_requests_in_lora_mode=False,
    sync_strategies=frozenset({"adapter", "full"}),
    disaggregated=True,
    replacement=False,
    retained_backup=False,
    gradients_traced=False,
)
"""Several adapters and replaced ranks are not driven; gradients do not live beyond a `train_batch`."""


class NotPreloaded:
    """`torch_memory_saver` in a process that was started without its hook, as with `enable_offload` off."""

    def pause(self) -> None:
        raise AssertionError("LD_PRELOAD must name the hook of torch_memory_saver (got none)")

    resume = pause


class ArealTrainer:
    """One rank's engine, built without its constructor and `initialize()`, which need a cluster."""

    def __init__(self, rig: Rig) -> None:
        rig.stubs(STAND_INS)
        self.rig, self.module = rig, AREAL.load(ENGINE)
        if rig.config.offload_train:
            self.allocate()
        self.patch()
        self.engine = self.build()

    def allocate(self) -> None:
        """Moves everything to where AReaL has it: no region is opened, so all is `default`, with backup.

        The launchers set `TMS_INIT_ENABLE_CPU_BACKUP=1` for the whole process (`utils/offload.py`).
        """
        for moved in [a for a in self.rig.saver.allocations.values() if a.tag != "default" or not a.backup]:
            self.rig.saver.free(moved)
            self.rig.alloc("default", moved.nbytes, backup=True, name=moved.name, kind=moved.kind)

    def patch(self) -> None:
        rig, module = self.rig, self.module
        saver = rig.saver if rig.config.offload_train else NotPreloaded()
        rig.patch((module, "torch_memory_saver"), saver)
        rig.patch((module, "is_tms_enabled"), lambda: rig.config.offload_train)
        rig.patch((module, "dist"), Distributed(rig.process_groups))
        platform = SimpleNamespace(clear_memory=rig.clear_memory, synchronize=lambda: None)
        rig.patch((module, "current_platform"), platform)
        rig.patch((module, "name_resolve"), MagicMock())
        rig.patch((module, "compute_total_loss_weight"), lambda *args: 1.0)
        rig.patch((module, "get_forward_backward_func"), lambda: self.compute)
        parallel = {"get_data_parallel_group": lambda **_: None, "get_data_parallel_world_size": lambda: 1}
        rig.patch((module, "mpu"), SimpleNamespace(**parallel))

    def build(self) -> Any:
        engine = object.__new__(self.module.MegatronEngine)
        engine.config, engine.tokenizer, engine.processor = MagicMock(), None, None
        engine.is_offload, engine._offload_depth, engine._version = False, 0, 0
        engine.process_group_initialized, engine._cpu_group, engine.device = True, None, "cpu"
        engine.model = [SimpleNamespace(zero_grad_buffer=lambda: self.gradients("zero"))]
        scale = SimpleNamespace(item=lambda: 1.0)
        engine.optimizer = SimpleNamespace(
            zero_grad=lambda: None, step=self.step, get_loss_scale=lambda: scale, param_groups=[{"lr": 0.0}]
        )
        engine.rollout_engine = engine.rollout_coordinator = MagicMock()
        engine.get_device_stats = MagicMock()
        engine._normalize_batch_input = lambda batch: (batch, None)
        engine._prepare_mb_list = lambda batch: Batches()
        engine._save_model_to_hf = self.save
        return engine

    # ---- the work that is the rig's

    def gradients(self, *how: str) -> None:
        for allocation in [a for a in self.rig.saver.allocations.values() if a.kind == "grads"]:
            for work in how:
                self.rig.data(allocation.tag, work, only=allocation.name)

    def compute(self, **kwargs: Any) -> None:
        """Forward and backward: reads all but the gradients, and adds to those."""
        if "data" in self.rig.process_groups.arguments():
            self.rig.process_groups.use("data")
        with self.rig.point("train"):
            for allocation in [a for a in self.rig.saver.allocations.values() if a.kind != "grads"]:
                self.rig.data(allocation.tag, "read", only=allocation.name)
            self.gradients("accumulate")

    def step(self) -> tuple[bool, float, None]:
        """The optimizer's step uses the gradients up and writes what trains."""
        self.gradients("consume")
        trained = ("adapter", "optimizer") if self.rig.config.lora else ("base", "optimizer")
        for allocation in [a for a in self.rig.saver.allocations.values() if a.kind in trained]:
            self.rig.data(allocation.tag, "overwrite", only=allocation.name)
        return True, 0.0, None

    def save(self, *args: Any) -> None:
        """The file of a sync is written from the device: under LoRA the adapter, else the model."""
        kind = "adapter" if self.rig.config.lora else "base"
        for allocation in [a for a in self.rig.saver.allocations.values() if a.kind == kind]:
            self.rig.send(kind, allocation.tag, only=allocation.name)

    # ---- the calls

    def call(self, method: str, *args: Any) -> Any:
        """A call of the engine, inside the region that the hook opens for the whole process (`TMS_INIT_ENABLE=1`)."""
        with self.rig.saver.region("default", enable_cpu_backup=True):
            return getattr(self.engine, method)(*args)

    def sleep(self) -> Any:
        return self.call("offload")

    def wake_up(self) -> Any:
        return self.call("onload")

    def train(self) -> Any:
        return self.call("train_batch", {}, None, None)

    def update_weights(self) -> Any:
        """By way of the disk, the only mode of a colocated run; AReaL's loop syncs no critic."""
        if self.rig.config.role != "actor":
            return None
        return self.call("update_weights", SimpleNamespace(type="disk", path=str(self.rig.directory)))

    def close(self) -> None:
        """Nothing of the engine outlives its process."""

    def believed(self) -> dict[str, bool]:
        return {"default": self.engine.is_offload}

    def fingerprint(self) -> tuple[object, ...]:
        """The engine's flag and depth: all that a later call depends on."""
        return (self.engine.is_offload, self.engine._offload_depth)


class Batches:
    """A list of one micro-batch, as `train_batch` asks of it."""

    mbs = (None,)
    max_seqlen = 1

    def to(self, device: str) -> Batches:
        return self

    def __len__(self) -> int:
        return len(self.mbs)

    def __iter__(self) -> Any:
        return iter(self.mbs)


class Areal:
    """The implementation that `--impl=areal` names."""

    name = "areal"
    build_cost = "high"
    claims = CLAIMS
    trainer = ArealTrainer

    @property
    def version(self) -> str:
        return AREAL.version()


implementation = Areal()

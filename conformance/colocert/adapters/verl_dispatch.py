"""verl's weight sync as a dispatch: who is on the device, what is exported, and what the rollout then serves.

Fits the wheel verl 0.9.1, as `colocert.adapters.verl` finds it. No GPU, no vLLM, no tensors.

Real: `CheckpointEngineManager.update_weights`, `ActorRolloutRefWorker.update_weights`, both engines
(`get_per_tensor_param`, `to`, `train_mode`, `eval_mode`), megatron's offload and onload functions with what they decide
by, `collect_lora_params`, `ServerAdapter.resume` and `update_weights`, and `CheckpointEngineWorker.update_weights`.
Replaced by the rig: the tensors below these functions (`verl_memory`), FSDP's own moves, the bridge that exports, the
transports, and the server behind the rollout (`verl_actors`). Knows what verl calls; does not know any rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from colocert.adapters import verl
from colocert.adapters.verl_actors import Group, Handle, Server, Transport, Wire, get
from colocert.adapters.verl_memory import FlatModule, FlatOptimizer, Module, Optimizer, Pinned, Wrapped
from colocert.rig.sync_rig import POLICY, SyncRig
from colocert.rig.workers import DEVICE, GRADS, HOST, MODEL, OPTIMIZER, WorkerGroup

FSDP, MANAGER = "verl.workers.engine.fsdp.transformer_impl", "verl.checkpoint_engine.base"
MEMORY = "verl.utils.megatron_utils"


class VerlDispatch:
    """The hybrid worker with its roles' engines and its rollout, and the manager before them."""

    def __init__(self, rig: SyncRig) -> None:
        self.rig, self.steps = rig, 0
        rig.stubs(verl.STAND_INS)
        verl.presets()
        self.worker_module, self.manager_module = verl.VERL.load(verl.WORKER), verl.VERL.load(MANAGER)
        self.rollout_module = verl.VERL.load(f"{verl.ROLLOUT}.vllm_rollout")
        self.wire = Wire(rig.engine, rig.config.adapters[0], self.manager_module.ensure_async_iterator)
        fsdp = rig.config.strategy == "fsdp"
        self.engine_module = verl.VERL.load(FSDP if fsdp else verl.ENGINE)
        self._patches()
        (self._patch_fsdp if fsdp else self._patch_megatron)()
        made = self._fsdp if fsdp else self._megatron
        self.engines = {role: made(role, worker) for role, worker in rig.workers.items()}
        self.worker, self.manager = self._worker(), self._manager()

    # ---- what is replaced

    def _patches(self) -> None:
        rig, quiet = self.rig, SimpleNamespace(empty_cache=lambda: None, synchronize=lambda: None)
        for module in (self.worker_module, self.engine_module):
            rig.patch((module, "log_gpu_memory_usage"), lambda *args, **kwargs: None)
        rig.patch((self.worker_module, "get_torch_device"), lambda: quiet)
        rig.patch((self.worker_module, "set_expandable_segments"), lambda enable: None)
        rig.patch((self.worker_module, "asyncio"), SimpleNamespace(to_thread=verl.done))
        rig.patch((self.engine_module, "get_device_name"), lambda: "cuda")
        rig.patch("verl.workers.engine.base.get_device_name", lambda: "cuda")
        rig.patch((self.manager_module, "ray"), SimpleNamespace(get=get))
        rig.patch((self.manager_module, "RayClassWithInitArgs"), lambda cls: None)
        rig.patch((self.manager_module, "RayWorkerGroup"), self._receivers)
        rig.patch((self.rollout_module, "BucketedWeightSender"), lambda **kwargs: Transport(self.wire))

    def _patch_megatron(self) -> None:
        rig, memory = self.rig, verl.VERL.load(MEMORY)
        rig.patch((memory, "torch"), SimpleNamespace(empty=Pinned))
        rig.patch((memory, "DDP"), Wrapped)
        rig.patch((memory, "get_device_id"), lambda: "cuda")
        rig.patch((memory, "get_torch_device"), lambda: SimpleNamespace(empty_cache=lambda: None))
        rig.patch((memory, "get_global_memory_buffer"), lambda: SimpleNamespace(buffer={}))
        rig.patch((self.engine_module, "build_peft_config_for_vllm"), lambda lora: {"r": 8})

    def _patch_fsdp(self) -> None:
        """FSDP1: `flat_param_to` moves all that the module holds."""
        for name, kind, to in (
            ("load_fsdp_model_to_gpu", MODEL, DEVICE),
            ("offload_fsdp_model_to_cpu", MODEL, HOST),
            ("load_fsdp_optimizer", OPTIMIZER, DEVICE),
            ("offload_fsdp_optimizer", OPTIMIZER, HOST),
        ):
            self.rig.patch((self.engine_module, name), _moves(kind, to))
        for name in ("get_ulysses_sequence_parallel_group", "set_ulysses_sequence_parallel_group"):
            self.rig.patch((self.engine_module, name), lambda *args: None)

        shared, files = verl.VERL.load("verl.utils.fsdp_utils"), verl.VERL.load("peft.utils.save_and_load")
        self.rig.patch((shared, "FSDP"), SimpleNamespace(summon_full_params=lambda module, writeback: nullcontext()))
        self.rig.patch((shared, "fsdp_version"), lambda module: 1)
        self.rig.patch((shared, "get_device_name"), lambda: "cuda")
        self.rig.patch((shared, "get_torch_device"), lambda: SimpleNamespace(empty_cache=lambda: None))
        self.rig.patch((files, "get_peft_model_state_dict"), lambda model: model.adapters())
        self.rig.patch((self.engine_module, "replace_lora_wrapper"), lambda name, config: name)
        self.rig.patch((self.engine_module, "unfuse_moe_params"), lambda weights, model_type: weights)
        self.rig.patch((self.engine_module, "get_device_id"), lambda: "cuda")
        self.rig.patch((self.engine_module, "fsdp_version"), lambda module: 1)

    # ---- the framework's objects

    def _engine(self, name: str, role: str) -> Any:
        """With offload where the roles share the device, and none where they do not."""
        engine, config = object.__new__(getattr(self.engine_module, name)), self.rig.config
        engine._is_offload_param = engine._is_offload_optimizer = config.colocated
        lora = {"merge": config.merge_lora, "rank": 8} if self._lora(role) else {}
        engine.model_config = SimpleNamespace(lora=lora, hf_config=SimpleNamespace(model_type="model"))
        engine._qat_enabled, engine.mode = False, None
        return engine

    def _megatron(self, role: str, worker: WorkerGroup) -> Any:
        engine = self._engine("MegatronEngine", role)
        engine.module = [Wrapped(worker) if OPTIMIZER in worker.kinds else Module(worker)]
        engine.optimizer = Optimizer(worker) if OPTIMIZER in worker.kinds else None
        engine.peft_cls = object() if self._lora(role) else None
        engine.vanilla_bridge, engine._hf_export_tasks = False, []

        def adapter(module: Any) -> Iterator[tuple[str, str]]:
            yield from worker.send("adapter").items()

        def full(module: Any, conversion_tasks: Any, merge_adapter_weights: bool = True) -> Iterator[tuple[str, str]]:
            yield from worker.send("merged" if self._lora(role) and merge_adapter_weights else "base").items()

        engine.bridge = SimpleNamespace(export_adapter_weights=adapter, export_hf_weights=full)
        return engine

    def _fsdp(self, role: str, worker: WorkerGroup) -> Any:
        engine = self._engine("FSDPEngine", role)
        engine.module, engine.optimizer = FlatModule(worker, self._lora(role)), None
        if OPTIMIZER in worker.kinds:
            engine.optimizer = FlatOptimizer(worker)
        engine._uses_fsdp2_cpu_offload_policy, engine.ulysses_parallel_group = False, None
        engine.engine_config = SimpleNamespace(fsdp_size=1, forward_only=False)
        return engine

    def _lora(self, role: str) -> bool:
        return self.rig.config.lora and role == POLICY

    def _worker(self) -> Any:
        rig, config = self.rig, self.rig.config
        self.server = Server(self.wire)
        self.rollout = object.__new__(self.rollout_module.ServerAdapter)
        engine = verl.Options(backend="naive" if config.colocated else "nccl", update_weights_bucket_megabytes=1)
        self.rollout.config = verl.Options(name="vllm", free_cache_engine=True, checkpoint_engine=engine)
        self.rollout.server_handle, self.rollout._has_server = Handle(self.server), True
        self.rollout.use_shm, self.rollout.zmq_handle = False, ""
        self.rollout.replica_rank = self.rollout.rollout_rank = 0
        self.rollout.sleep_level = 2
        worker = object.__new__(self.worker_module.ActorRolloutRefWorker)
        worker.config = verl.Options(rollout=self.rollout.config)
        worker.actor, worker.rollout = SimpleNamespace(engine=self.engines[POLICY]), self.rollout
        worker.checkpoint_engine = Transport(self.wire)
        worker.layered_summon, worker.peft_merge = False, config.merge_lora
        worker.base_sync_done = rig.engine.base_valid  # "dummy" not in rollout.load_format
        return worker

    def _manager(self) -> Any:
        manager = object.__new__(self.manager_module.CheckpointEngineManager)
        manager.backend = self.rollout.config.checkpoint_engine.backend
        sends = self.worker_module.ActorRolloutRefWorker.update_weights
        manager.actor_wg = Group(lambda **kwargs: sends(self.worker, **kwargs))
        manager.replicas, manager.build_process_group = [self.server], lambda rollout: None
        return manager

    def _receivers(self, worker_handles: Any, ray_cls_with_init: Any) -> Group:
        """Beside each engine worker, one that receives and passes on."""
        worker = object.__new__(self.manager_module.CheckpointEngineWorker)
        worker.checkpoint_engine, worker.server_adapter = Transport(self.wire), self.rollout
        return Group(lambda **kwargs: self.manager_module.CheckpointEngineWorker.update_weights(worker, **kwargs))

    # ---- the calls

    def after_build(self) -> None:
        """What `initialize()` ends with (megatron/transformer_impl.py:605, 650-655)."""
        for engine in self.engines.values():
            offload, trains = engine.is_param_offload_enabled, engine.optimizer is not None
            optimizer = trains and engine.is_optimizer_offload_enabled
            engine.to(device="cpu", model=offload, optimizer=optimizer, grad=offload and trains)

    def train_step(self) -> None:
        """As `TrainingWorker.train_mini_batch` (engine_workers.py:282), whose step is the worker's."""
        worker = self.rig.workers[POLICY]
        with self.engines[POLICY].train_mode(disable_auto_offload=False):
            if self.rig.config.strategy == "fsdp":
                worker.move(GRADS, DEVICE)
            worker.train()
        self.steps += 1

    def forward(self, role: str) -> None:
        """As `TrainingWorker.infer_batch` (engine_workers.py:422)."""
        with self.engines[role].eval_mode(disable_auto_offload=False):
            self.rig.workers[role].forward()

    async def sync(self, adapter: str | None = None) -> None:
        """As the trainers (v1/trainer_colocate_async.py:36-48): a rollout on the trainer's device sleeps before it."""
        engine, shared = self.rig.engine, self.rig.config.colocated
        if shared and not engine.released:
            if self.rig.config.overlap:
                await self.manager.abort_replicas()
            await self.server.sleep()
        await self.manager.update_weights(self.steps)
        if not engine.admitting:
            await self.server.resume_generation()

    def believed(self) -> dict[tuple[str, str], bool]:
        """verl keeps no flag: its functions look at the storages."""
        return {}


def _moves(kind: str, to: str) -> Callable[..., None]:
    """A function of FSDP's, given a module or an optimizer."""

    def move(held: Any, *args: Any) -> None:
        held.worker.move(kind, to)

    return move

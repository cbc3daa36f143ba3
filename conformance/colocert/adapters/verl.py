"""verl (github.com/verl-project/verl): its colocated weight sync, from the worker to its extension of vLLM, on a rig.

Fits the wheel verl 0.9.1, found in `COLOCERT_VERL_PATH` (a folder with an unpacked wheel or a checkout), else as an
installed package. Needs torch, ray, peft and transformers; no GPU, no vLLM.

Real: `ActorRolloutRefWorker.update_weights` (mode naive), `MegatronEngine.get_per_tensor_param` and `to`, and in the
rollout's process `vLLMColocateWorkerExtension.update_weights_from_ipc`, with its copies and its naming. Replaced by the
rig: Megatron's memory, the bridge that exports, the ZeroMQ bucket between the processes (one small buffer here, used
again and again), vLLM's model and LoRA manager. Knows what verl calls; does not know any rule. Who is on the device
during a sync is driven by `colocert.adapters.verl_dispatch`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from colocert.adapters.found import Framework
from colocert.extras import has_torch
from colocert.rig import Claims
from colocert.rig.payload_rig import PayloadRig
from colocert.rig.sync_rig import SyncRig, WeightSync

VERL = Framework("verl", distribution="verl", variable="COLOCERT_VERL_PATH")
WORKER, ENGINE = "verl.workers.engine_workers", "verl.workers.engine.megatron.transformer_impl"
ROLLOUT = "verl.workers.rollout.vllm_rollout"
STAND_INS = (
    *("tensordict", "omegaconf", "hydra", "codetiming", "zmq", "datasets", "pandas", "PIL", "orjson", "uvicorn"),
    *("fastapi", "vllm", "!verl.third_party.vllm", "!verl.utils.vllm.vllm_quant_utils", "!verl.utils.vllm.patch"),
)
"""What the imports need unguarded and the sync never uses; the three replaced ones ask for a real vLLM."""

BUCKET = 16384
"""Bytes of the transport's buffer: a sync takes several."""

CLAIMS = Claims(
    lora=True,
    multi_lora=False,
    full_parameter=True,
    early_grad_release=False,
    offload_train_optional=False,
    rematerialize=False,
    group_teardown=False,
    peak_device=frozenset(),
    gpu_peak_with_critic=False,
    engine_releases=frozenset({"weights", "kv_cache"}),
    resident_while_released=frozenset(),  # adapters and gradients leave too (megatron_utils.py:721-773)
    adapter_source="host",  # pinned; it comes to the device without the base (megatron_utils.py:742-766, 827-837)
    file_backed_frozen=False,
    versions=True,  # global_steps (vllm_rollout.py:250, vllm_async_server.py:924-926)
    base_requests_in_lora_mode=False,
    sync_strategies=frozenset({"adapter", "merged", "full", "fsdp"}),  # of either engine (get_per_tensor_param)
    disaggregated=True,  # checkpoint_engine.backend (engine_workers.py:755-766)
    replacement=False,
    retained_backup=False,
    gradients_traced=False,
)


class Options(dict[str, Any]):
    """Options as attributes and by `get`, as OmegaConf has them."""

    __getattr__ = dict.__getitem__


class Model:
    """vLLM's model, as the extension sees it: names, and a loader. A load lies between `opened` and `closed`."""

    def __init__(self, rig: PayloadRig) -> None:
        self.engine = rig.engine

    def named_parameters(self, remove_duplicate: bool = True) -> Iterable[tuple[str, Any]]:
        return self.engine.base.items()

    def named_buffers(self) -> Iterable[tuple[str, Any]]:
        return ()

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        """As vLLM's loader: the names it loaded; one that it does not know is an error."""
        report = self.engine.load_base(weights)
        if report.unknown:
            raise ValueError(f"there is no module or parameter named {report.unknown[0]}")
        return set(report.loaded)

    def opened(self) -> None:
        self.engine.begin_base()

    def closed(self) -> None:
        self.engine.end_base()


class Bucket:
    """The transport: packs tensors into one buffer and hands the receiver views of it, each time it is full."""

    def __init__(self, weights: Iterable[tuple[str, Any]], buffer: Any) -> None:
        self.weights, self.buffer = weights, buffer

    def receive_weights(self, on_bucket_received: Callable[[list[tuple[str, Any]], bool], None]) -> None:
        packed: list[tuple[str, Any]] = []
        offset = 0
        for name, weight in self.weights:
            if offset + weight.nbytes > len(self.buffer) and packed:
                on_bucket_received(packed, False)
                packed, offset = [], 0
            if weight.nbytes > len(self.buffer):
                on_bucket_received([(name, weight)], False)
                continue
            view = self.buffer[offset : offset + weight.nbytes].view(weight.dtype).view(weight.shape)
            packed.append((name, view.copy_(weight)))
            offset += weight.nbytes
        on_bucket_received(packed, True)


def presets() -> None:
    """Real values where a stand-in will not do, and the rollout's package without its search for vLLM."""
    import msgspec

    from colocert.rig.stubs import preset

    class LoRARequest(msgspec.Struct):
        lora_name: str
        lora_int_id: int
        lora_path: str = ""

    preset("verl.third_party.vllm", VLLM_SLEEP_LEVEL=2, get_version=lambda package: "0.20.0")
    preset("verl.utils.vllm.vllm_quant_utils", is_quantized_model=lambda config: False)
    preset("verl.utils.vllm.patch", patch_vllm_moe_model_weight_loader=Model.opened)
    preset("vllm.lora.request", LoRARequest=LoRARequest)
    utils = "vllm.model_executor.model_loader.utils"
    preset(utils, process_weights_after_loading=lambda model, config, device: model.closed())
    root = VERL.root()
    if root is not None and ROLLOUT not in sys.modules:  # its __init__ asks for an installed vLLM
        package = ModuleType(ROLLOUT)
        package.__path__ = [str(root / ROLLOUT.replace(".", "/"))]
        sys.modules[ROLLOUT] = package


class VerlSync:
    """One worker with its engine and rollout. `release_engine` sleeps as deeply as verl does: lightly for adapters."""

    def __init__(self, rig: PayloadRig) -> None:
        if rig.config.outside:
            raise NotImplementedError(
                "Megatron's PEFT hook freezes everything but adapters: nothing trains beside them"
            )
        self.rig = rig
        rig.stubs(STAND_INS)
        presets()
        self.worker_module, self.engine_module = VERL.load(WORKER), VERL.load(ENGINE)
        self.utils = VERL.load(f"{ROLLOUT}.utils")
        self._patches()
        self.worker, self.extension = self._worker(), self._extension()

    def _patches(self) -> None:
        rig, trainer = self.rig, self.rig.trainer
        quiet = SimpleNamespace(empty_cache=lambda: None, synchronize=lambda: None)
        for module in (self.worker_module, self.engine_module):
            rig.patch((module, "log_gpu_memory_usage"), lambda *args, **kwargs: None)
        rig.patch((self.worker_module, "get_torch_device"), lambda: quiet)
        rig.patch((self.worker_module, "set_expandable_segments"), lambda enable: None)
        rig.patch((self.worker_module, "asyncio"), SimpleNamespace(to_thread=done))
        rig.patch((self.engine_module, "get_device_name"), lambda: "cuda")
        rig.patch((self.engine_module, "offload_megatron_model_to_cpu"), lambda module: trainer.offload())

        def load(module: Any, load_grad: bool = True, load_frozen_params: bool = True) -> None:
            trainer.backload(frozen=load_frozen_params)

        rig.patch((self.engine_module, "load_megatron_model_to_gpu"), load)
        transfer = VERL.load(f"{ROLLOUT}.bucketed_weight_transfer")
        rig.patch((transfer, "BucketedWeightReceiver"), lambda **kwargs: Bucket(self.sending, self.buffer))

    def _engine(self) -> Any:
        """The training engine: its configuration and its bridge."""
        config, trainer = self.rig.config, self.rig.trainer
        shape = trainer.shape
        engine = object.__new__(self.engine_module.MegatronEngine)
        lora = {"merge": config.merge_lora, "rank": shape.rank, "alpha": shape.alpha}
        engine.model_config = SimpleNamespace(lora=lora if config.lora else {})
        engine.module, engine.optimizer, engine.peft_cls = [], None, object() if config.lora else None
        engine.vanilla_bridge = engine._qat_enabled = False
        engine._is_offload_param, engine._hf_export_tasks = True, []

        def adapter(module: Any) -> Iterator[tuple[str, Any]]:
            yield from trainer.export_adapter(config.adapters[0]).items()

        def full(module: Any, conversion_tasks: Any, merge_adapter_weights: bool = True) -> Iterator[tuple[str, Any]]:
            merges = config.lora and merge_adapter_weights
            yield from (trainer.export_merged(config.adapters[0]) if merges else trainer.export_base()).items()

        engine.bridge = SimpleNamespace(export_adapter_weights=adapter, export_hf_weights=full)
        return engine

    def _worker(self) -> Any:
        config = self.rig.config
        worker = object.__new__(self.worker_module.ActorRolloutRefWorker)
        rollout = Options(name="vllm", free_cache_engine=True, checkpoint_engine=Options(backend="naive"))
        worker.config = Options(rollout=rollout)
        worker.actor = SimpleNamespace(engine=self._engine())
        worker.rollout = SimpleNamespace(resume=self._resume, update_weights=self._update, sleep_level=2)
        worker.layered_summon, worker.peft_merge = False, config.merge_lora
        worker.base_sync_done = config.engine_base == "loaded"  # "dummy" not in rollout.load_format
        return worker

    def _extension(self) -> Any:
        """The extension in vLLM's worker process, with what it finds there."""
        import torch

        engine, name = self.rig.engine, self.utils.VLLM_LORA_NAME

        def remove_lora(number: int) -> None:
            if name in engine.adapters:
                engine.unload_adapter(name)

        self.sending: Iterable[tuple[str, Any]] = ()
        self.buffer = torch.empty(BUCKET, dtype=torch.uint8)
        extension = object.__new__(self.utils.vLLMColocateWorkerExtension)
        extension._is_qat_model = extension._is_modelopt_qat = False
        extension.device, extension._get_zmq_handle = torch.device("cpu"), lambda: ""
        vllm_config = SimpleNamespace(speculative_config=None, model_config=None)
        extension.model_runner = SimpleNamespace(model=Model(self.rig), vllm_config=vllm_config)
        extension.add_lora = lambda r: engine.load_adapter(r.lora_name, r.lora_tensors, r.peft_config)
        extension.remove_lora = remove_lora
        return extension

    async def _resume(self, tags: list[str]) -> None:
        if "weights" in tags:
            self.rig.engine.resume()

    async def _update(self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None, **kwargs: Any) -> None:
        self.sending = weights
        try:
            self.extension.update_weights_from_ipc(**kwargs)
        finally:
            self.sending = ()
        self.rig.engine.flush()

    async def sync(self, adapter: str | None = None) -> None:
        await self.worker_module.ActorRolloutRefWorker.update_weights(self.worker)

    def release_engine(self) -> None:
        """Level 1 where LoRA is served as an adapter, else 2 (`vllm_async_server._resolve_sleep_level`)."""
        self.rig.engine.release(backup=self.rig.config.sync == "adapter")

    def resume_engine(self) -> None:
        """verl resumes weights in the sync."""


async def done(*args: Any) -> None:
    """What waits for other ranks: there is one."""


def weight_sync(rig: SyncRig) -> WeightSync:
    """The dispatch, from the hybrid worker's roles to the rollout."""
    from colocert.adapters.verl_dispatch import VerlDispatch

    return VerlDispatch(rig)


class Verl:
    """The implementation that `--impl=verl` names."""

    name = "verl"
    build_cost = "high"
    claims = CLAIMS

    def __init__(self) -> None:
        if has_torch():
            self.payload_sync, self.weight_sync = VerlSync, weight_sync

    @property
    def version(self) -> str:
        return VERL.version()


implementation = Verl()

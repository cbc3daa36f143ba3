"""SkyRL (github.com/NovaSky-AI/SkyRL): the real `WorkerDispatch` over the rig's workers and engine.

Fits the wheel skyrl 0.4.0, the public main before it and the head of PR 2062, found in `COLOCERT_SKYRL_PATH` (a folder
with an unpacked wheel or a checkout), else as an installed package. Needs neither torch nor Ray nor vLLM.
The offload of frozen weights is in `skyrl_offload`.

Real: `WorkerDispatch` with its residency flags, and `RemoteInferenceClient` with its sleep levels and weight version.
Replaced by the rig: the actor groups, which move, compute and send; and the servers behind the client. Knows what each
version's workers move together; does not know any rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from colocert.adapters.found import Framework
from colocert.rig import Claims
from colocert.rig.frozen_rig import FrozenRig
from colocert.rig.sync_rig import POLICY, SyncRig
from colocert.rig.workers import ADAPTERS, DEVICE, GRADS, HOST, MODEL, OPTIMIZER

SKYRL = Framework("skyrl", distribution="skyrl", variable="COLOCERT_SKYRL_PATH")
TRAIN = "skyrl.backends.skyrl_train"
DISPATCH, CLIENT = f"{TRAIN}.workers.worker_dispatch", f"{TRAIN}.inference_servers.remote_inference_client"
MEGATRON = f"{TRAIN}.distributed.megatron.megatron_utils"
STAND_INS = (
    *("aiohttp", "loguru", "numpy", "orjson", "ray"),
    *("!skyrl.backends.backend", "!skyrl.tinker", "!skyrl.train.config", f"!{TRAIN}.distributed.dispatch"),
    *(f"!{TRAIN}.{name}" for name in ("inference_servers.generate_wire", "training_batch", "utils", "workers.worker")),
)
"""What the two modules import and the sync never uses: absent packages, and modules that bring torch and vLLM."""


def adapters_stay() -> bool:
    """Whether this version leaves the fused buffers of a LoRA model on the device when it offloads the model."""
    source = SKYRL.source(MEGATRON)
    return "is_lora" in source or "_chunk_has_lora_adapters" in source


def claims() -> Claims:
    """What the source at hand supports. Level 1 sleep and the cuda graphs, which vLLM keeps, are the engine's."""
    dispatch, stay = SKYRL.source(DISPATCH), adapters_stay()
    return Claims(
        lora=True,
        multi_lora="def ensure_active_adapter(" in dispatch,
        full_parameter=True,
        early_grad_release=False,
        offload_train_optional=False,
        rematerialize=False,
        group_teardown=False,
        peak_device=frozenset(),
        gpu_peak_with_critic=False,
        engine_releases=frozenset({"weights", "kv_cache"}),
        resident_while_released=frozenset({"adapters"} if stay else ()),
        adapter_source="resident" if stay else "host",
        file_backed_frozen="_FROZEN_OFFLOAD_DIR" in SKYRL.source(MEGATRON),
        versions="increment_weight_version" in dispatch,
        base_requests_in_lora_mode=True,
        sync_strategies=frozenset({"adapter", "merged", "full", "fsdp"}),
        disaggregated=True,
        replacement=False,
        retained_backup=False,
        gradients_traced=False,
    )


class Group:
    """Stands where a role's `PPORayActorGroup` is: the calls that the dispatch makes, on the rig's workers."""

    actor_infos = ()

    def __init__(self, sync: SkyRLSync, role: str) -> None:
        self.sync, self.role, self.worker = sync, role, sync.rig.workers[role]

    def offload_to_cpu(
        self, nonblocking: bool = False, offload_optimizer: bool = True, offload_model: bool = True
    ) -> None:
        for kind in self.kinds(offload_model, offload_optimizer):
            self.worker.move(kind, HOST)

    def backload_to_gpu(
        self, nonblocking: bool = False, backload_optimizer: bool = True, backload_model: bool = True
    ) -> None:
        for kind in self.kinds(backload_model, backload_optimizer):
            self.worker.move(kind, DEVICE)

    def kinds(self, model: bool, optimizer: bool) -> Iterator[str]:
        """What moves with each of the two: gradient buffers go with the optimizer."""
        stay = self.role == POLICY and self.sync.rig.config.lora and adapters_stay()
        wanted = ((MODEL,) if model else ()) + ((ADAPTERS,) if model and not stay else ())
        wanted += (OPTIMIZER, GRADS) if optimizer else ()
        return (kind for kind in wanted if kind in self.worker.kinds)

    def async_run_ray_method(self, how: str, method: str, *args: Any, **kwargs: Any) -> list[None]:
        """The work of the actors; what a sync does not touch (snapshots) does nothing."""
        several = len(self.sync.rig.config.adapters) > 1
        if method in ("forward", "forward_backward"):
            self.worker.forward()
        elif method == "optim_step":
            self.worker.train(self.worker.active if several else None)
        elif method == "swap_to_adapter":
            self.worker.activate(args[0])
        elif method == "empty_cache":
            self.sync.rig.clear_memory()
        elif method == "broadcast_to_inference_engines":
            self.sync.broadcast(kwargs.get("model_id"))
        return [None]


class SkyRLSync:
    """The dispatch and the client, configured as the scenario says."""

    def __init__(self, rig: SyncRig) -> None:
        rig.stubs(STAND_INS)
        self.rig, self.name = rig, ""
        module, client = SKYRL.load(DISPATCH), SKYRL.load(CLIENT).RemoteInferenceClient
        rig.patch((module, "ray"), SimpleNamespace(get=lambda refs: refs))
        rig.patch((module, "WorkerOutput"), SimpleNamespace(cat=lambda infos, outputs: outputs))
        rig.patch((client, "_call_all_servers"), self.servers)
        rig.patch((client, "increment_weight_version"), self.raised(client.increment_weight_version))
        self.client = client.__new__(client)
        self.client._weight_version = 0
        self.client.uses_lora_weight_sync = rig.config.sends in ("adapter", "fsdp")
        self.groups = {role: Group(self, role) for role in rig.config.roles}
        named = {f"{role}_actor_group": group for role, group in self.groups.items()}
        self.dispatch = module.WorkerDispatch(self.settings(), **named, inference_engine_client=self.client)

    def settings(self) -> SimpleNamespace:
        """The part of SkyRL's configuration that a sync reads, at its defaults where the scenario does not say."""
        config, space = self.rig.config, SimpleNamespace
        lora = space(merge_lora=config.merge_lora)
        policy = space(
            model=space(lora=space(rank=8 if config.lora else 0)),
            optimizer_config=space(offload_after_step=True),
            megatron_config=space(lora_config=lora),
        )
        trainer = space(
            strategy=config.strategy,
            placement=space(colocate_all=config.colocated, colocate_policy_ref=False),
            policy=policy,
            fully_async=space(enabled=config.overlap, clear_kv_cache_on_weight_sync=False),
        )
        engine = space(weight_sync_backend="nccl", offload_kv_for_weight_sync=False, enable_prefix_caching=True)
        return space(trainer=trainer, generator=space(inference_engine=engine))

    async def servers(self, endpoint: str, json: Any = None, method: str = "POST", params: Any = None) -> Any:
        """What the servers do at each endpoint of the client."""
        engine, tags = self.rig.engine, (params or {}).get("tags")
        if endpoint == "/sleep":
            engine.release(tags)
        elif endpoint == "/wake_up":
            engine.resume(tags)
        elif endpoint == "/pause":
            engine.drain()
        elif endpoint == "/resume":
            engine.admit()
        elif endpoint == "/is_sleeping":
            return {"server": {"body": {"is_sleeping": bool(engine.released)}}}
        return {}

    def raised(self, increment: Any) -> Any:
        """The client's own count, which every request's cache salt carries from then on."""

        def counted(client: Any) -> None:
            increment(client)
            self.rig.engine.stamp(self.name, client.weight_version)

        return counted

    def broadcast(self, model_id: str | None) -> None:
        """The part of the workers: export what is live, load it, then reset the prefix cache, which they await last."""
        config, engine, policy = self.rig.config, self.rig.engine, self.rig.workers[POLICY]
        what = {"merged": "merged", "full": "base"}.get(config.sends, "adapter")
        self.name = (model_id or config.adapters[0]) if what == "adapter" else ""
        engine.load(what, policy.send(what), self.name, salt=True)
        if not config.overlap:
            engine.flush()

    # ---- the calls

    def after_build(self) -> None:
        """As `RayPPOTrainer.build_models` does."""
        if self.rig.config.colocated:
            for group in self.groups.values():
                group.offload_to_cpu()
            self.dispatch.mark_all_offloaded()

    def train_step(self) -> None:
        adapters = self.rig.config.adapters
        for model_id in adapters if len(adapters) > 1 else (None,):
            self.dispatch.forward_backward(POLICY, None, model_id=model_id)
            self.dispatch.optim_step(POLICY, model_id=model_id)

    def forward(self, role: str) -> None:
        self.dispatch.forward(role, None)

    def sync(self, adapter: str | None = None) -> Any:
        return self.dispatch.save_weights_for_sampler(adapter)

    def believed(self) -> dict[tuple[str, str], bool]:
        """The flags, which are kept where the roles share the device."""
        if not self.rig.config.colocated:
            return {}
        state = self.dispatch._gpu_state.items()
        return {(role, MODEL): not on.model_on_gpu for role, on in state} | {
            (role, OPTIMIZER): not on.optimizer_on_gpu for role, on in state if role != "ref"
        }


class SkyRL:
    """The implementation that `--impl=skyrl` names."""

    name = "skyrl"
    build_cost = "high"
    weight_sync = SkyRLSync

    @property
    def frozen_offload(self) -> Callable[[FrozenRig], Any]:
        """The frozen-offload profile's factory; absent where the source has no such functions, or torch is absent."""
        from colocert.adapters import skyrl_offload

        if not skyrl_offload.can_be_driven():
            raise AttributeError("frozen_offload: no Megatron offload at hand, or torch or numpy is not installed")
        return skyrl_offload.SkyRLOffload

    @property
    def version(self) -> str:
        return SKYRL.version()

    @property
    def claims(self) -> Claims:
        return claims()


implementation = SkyRL()

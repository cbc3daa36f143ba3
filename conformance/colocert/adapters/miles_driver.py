"""miles (github.com/radixark/miles): its driver loop `train.py` over the rig's engines and the real actors, one a rank.

Fits checkouts of the public main and of its gpu-peak branch, found as in `colocert.adapters.miles`; wheels hold no
driver loop. Needs what that adapter needs; no GPU, no cluster, no SGLang.

Real: `train()`, `create_rollout_manager`, `create_training_models`, `RayTrainGroup`, `RolloutManager` with its
`RolloutServer` and `ServerGroup`, the client side of `SGLangEngine`, and `MegatronTrainRayActor` (`MilesTrainer`).
Replaced by the rig: Ray's handles and `ray.get`, the HTTP server behind `SGLangEngine`, generation and evaluation, what
an actor's `init()` allocates, and the transfer of weights. Does not know any rule.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Coroutine
from types import ModuleType, SimpleNamespace
from typing import Any

from colocert.adapters.miles import MILES, STAND_INS, Args, MilesTrainer
from colocert.rig import Config, Rig, SaverFatal
from colocert.rig.engine import EngineDouble
from colocert.rig.rank import RankRig
from colocert.rig.stubs import preset
from colocert.rig.trainers import RankDied, TrainerHandle

LOOP = "train"
"""The module of the driver loop, beside the package in a checkout."""

DRIVER_STAND_INS = (
    "aiohttp",
    "fastapi",
    "pybase64",
    "pylatexenc",
    "setproctitle",
    "sglang_router",
    "starlette",
    "uvicorn",
)
"""What the imports of the loop and of the rollout manager need besides the actor's."""

TAGS = {
    "GPU_MEMORY_TYPE_WEIGHTS": "weights",
    "GPU_MEMORY_TYPE_KV_CACHE": "kv_cache",
    "GPU_MEMORY_TYPE_CUDA_GRAPH": "cuda_graph",
}
"""SGLang's tags, all of which a call without tags means."""

LEVELS = {"kv_cache": "kv_cache", "weights": "weight"}
"""Engine tags as `--offload-rollout-level` names them; CUDA graphs are released at every level."""

PHASES = {"release_memory_occupation": "release", "resume_memory_occupation": "resume"}
SETUP = (
    "configure_logger",
    "init_tracking",
    "maybe_start_mini_ft_controller",
    "maybe_start_periodic_pyspy_dump",
    "object_store",
    "remove_rollout_data_refs",
)
"""Names in the loop's module that reach for logging, trackers or the object store."""


def has_loop() -> bool:
    """Whether the source at hand has a driver loop: a checkout does, a wheel does not."""
    return "create_rollout_manager(" in MILES.source(LOOP)


def _arguments(config: Config) -> Args:
    """The options that this scenario stands for.

    Raises `ValueError` for what miles' options cannot express or this adapter does not drive.
    """
    level = [LEVELS[tag] for tag in sorted(LEVELS) if tag in config.engine_releases]
    if config.peak_device == "gpu" and config.offload_rollout and not level:
        raise ValueError("--offload-rollout-level takes kv_cache or weight (got neither): gpu-peak has nothing to move")
    if config.peak_device == "gpu" and "--colocate-memory-peak-device" not in MILES.source("miles.utils.arguments"):
        raise ValueError("peak_device must be cpu: this version has no --colocate-memory-peak-device (got gpu)")
    every = 1 if config.evaluate else None
    return Args(
        colocate=config.colocated,
        colocate_memory_peak_device=config.peak_device,
        offload_train=config.offload_train,
        offload_rollout=config.offload_rollout and bool(level),
        offload_rollout_level=level,
        use_critic=config.use_critic,
        lora_rank=8 if config.lora else 0,
        lora_base_cpu_backup=config.engine_mirror,
        actor_num_nodes=1,
        actor_num_gpus_per_node=config.ranks,
        critic_num_nodes=1,
        critic_num_gpus_per_node=config.ranks,
        num_critic_only_steps=0,
        num_gpus_per_node=max(8, config.ranks),
        kl_coef=0,
        ft_components=[],
        eval_interval=every,
        save_interval=every,
        pause_generation_mode="retract",
    )


class Seat:
    """One rank's rig, as `MilesTrainer` takes it.

    The ranks share miles' modules in this process; `enter` puts the patches of this rank in place before a call.
    """

    def __init__(self, rig: Rig, rank: RankRig) -> None:
        self.rig, self.rank = rig, rank
        self._patches: list[tuple[Any, str, Any]] = []
        self.stubs, self.get, self.remote = rig.stubs, rig.get, rig.remote

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rank, name)

    def patch(self, target: tuple[Any, str], value: Any) -> None:
        self.rig.patch(target, value)
        self._patches.append((*target, value))

    def enter(self) -> None:
        for owner, name, value in self._patches:
            setattr(owner, name, value)


class AtOnce:
    """A handle inside an actor's call: `handle.method.remote(...)` has its result when it returns."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args, **kwargs: None)


class RankTrainer:
    """The real actor of one rank, built by the driver's `init()`."""

    def __init__(self, seat: Seat, driver: MilesDriver) -> None:
        self.seat, self.driver = seat, driver
        self.actor: MilesTrainer | None = None
        self.version = 0

    def init(self) -> int:
        """Allocates, and ends as the actor's `init()` does: asleep. Returns the rollout to start from."""
        if self.actor is None:
            self.seat.rank.start()
            self.actor = MilesTrainer(self.seat)  # type: ignore[arg-type]
            self.actor.worker._rank = self.seat.rank.rank
            self.actor.worker.rollout_manager = AtOnce()
            self.actor.worker.weight_updater.update_weights.side_effect = self.push
        if self.seat.rank.config.offload_train:
            self.sleep()
        return self.driver.done

    def push(self, *, resume_generation: bool = True) -> None:
        """What `UpdateWeightFromTensor.update_weights` does to the engines, in its order; rank 0 sends."""
        self.version += 1
        if self.seat.rank.rank:
            return
        for engine in self.driver.engines:
            engine.client.pause_generation()
            engine.client.flush_cache()
        for kind in self.driver.kinds():
            self._send(kind)
            for engine in self.driver.engines:
                engine.double.update(kind, self.version)
        if resume_generation:
            for engine in self.driver.engines:
                engine.client.continue_generation()

    def _send(self, kind: str) -> None:
        """The host copy of what is released, else the device."""
        held = "params" if self.seat.rank.config.rematerialize else kind
        for allocation in [a for a in self.seat.rank.saver.allocations.values() if a.kind == held]:
            source = "host" if allocation.paused and allocation.backup else "device"
            self.seat.rank.send(kind, allocation.tag, only=allocation.name, read_from=source, version=self.version)

    def save_model(self) -> None:
        """A checkpoint reads the model."""
        self.seat.rank.data("default", "read")

    def _entered(self, method: str) -> Any:
        if self.actor is None:
            raise RuntimeError(f"init() must come before {method}()")
        self.seat.enter()
        return getattr(self.actor, method)()

    def sleep(self) -> Any:
        return self._entered("sleep")

    def wake_up(self) -> Any:
        return self._entered("wake_up")

    def train(self) -> Any:
        return self._entered("train")

    def update_weights(self) -> Any:
        return self._entered("update_weights")

    def offload_grad_buffer(self) -> Any:
        return self._entered("offload_grad_buffer")

    def clear_memory(self) -> Any:
        return self._entered("clear_memory")


class RankActor:
    """A rank as `RayTrainGroup` calls it: with arguments that the rig's handle has no use for."""

    def __init__(self, handle: TrainerHandle, trainer: RankTrainer) -> None:
        self.handle, self.trainer = handle, trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handle, name)

    def perform(self, method: str, call: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = method in ("connect_actor_critic", "save_model", "set_rollout_manager")
        return getattr(self, method)() if own else self.handle.perform(method, call, (), {})

    def set_rollout_manager(self) -> None:
        """The actor's calls of the manager are answered at once."""

    def connect_actor_critic(self) -> None:
        """A process group between the two, for what a critic computes; nothing of it is in the rig."""

    def save_model(self) -> None:
        try:
            self.trainer.save_model()
        except SaverFatal as error:
            raise RankDied(f"rank {self.handle.rank.rank} ended in save_model(): {error}") from error


class Server:
    """The HTTP server of an engine, as `requests` in `SGLangEngine` reaches it: `http://engine:INDEX/ENDPOINT`."""

    def __init__(self, engines: list[EngineDouble]) -> None:
        self.engines = engines

    def get(self, url: str) -> SimpleNamespace:
        return self.post(url)

    def post(self, url: str, json: dict[str, Any] | None = None) -> SimpleNamespace:
        place, _, endpoint = url.removeprefix("http://").partition("/")
        engine, payload = self.engines[int(place.partition(":")[2])], json or {}
        tags = payload.get("tags") or list(TAGS.values())  # none stands for all of them, as in SGLang
        if endpoint == "release_memory_occupation":
            engine.release(tags)
        elif endpoint == "resume_memory_occupation":
            engine.resume(tags)
        elif endpoint == "flush_cache":  # answers 200 once nothing is in flight; miles asks until then
            engine.drain()
            engine.flush()
        elif endpoint == "continue_generation":
            engine.admit()
        return SimpleNamespace(status_code=200, text="", raise_for_status=lambda: None, json=dict)


class Engine:
    """One engine as `ServerGroup` calls it: miles' client, whose calls are those of the double."""

    def __init__(self, double: EngineDouble, client: Any) -> None:
        self.double, self.client = double, client

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def issue(self, method: str) -> int:
        return self.double.issue(PHASES.get(method, method))

    def perform(self, method: str, call: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return getattr(self, method)(*args, **kwargs)

    def acknowledge(self, call: int) -> None:
        self.double.acknowledge(call)

    def generate(self) -> int:
        return self.double.generate()


class MilesDriver:
    """miles' `train()`; each `run` is one call of it, which is one job.

    `train()` launches engines and actors, and Ray ends them with the job, whether it returned or raised: the next `run`
    finds engines as launched and ranks without memory. Within a job nothing is launched or ended.
    """

    def __init__(self, rig: Rig) -> None:
        self.rig, self.args = rig, _arguments(rig.config)
        self.done = 0
        rig.stubs((*STAND_INS, *DRIVER_STAND_INS))
        preset("sglang.srt.constants", **TAGS)
        self.loop = self._load_loop()
        self.engines = self._make_engines()
        self.engine_handles = [rig.remote(engine) for engine in self.engines]
        self.trainers = trainers = [RankTrainer(Seat(rig, rank), self) for rank in rig.ranks]
        self.critics = critics = [RankTrainer(Seat(rig, handle.rank), self) for handle in rig.critics]
        self.launched = False
        self.actors = {
            "actor": [rig.remote(RankActor(h, t)) for h, t in zip(rig.chain(trainers), trainers, strict=True)],
            "critic": [rig.remote(RankActor(h, t)) for h, t in zip(rig.chain_critics(critics), critics, strict=True)],
        }
        self.manager = rig.remote(self._make_manager())
        self._patch()

    @staticmethod
    def _load_loop() -> ModuleType:
        """`train.py` under a name of its own: `train` is anybody's."""
        MILES.load("miles")
        name, root = "colocert_miles_train", MILES.root()
        if name in sys.modules:
            return sys.modules[name]
        assert root is not None
        spec = importlib.util.spec_from_file_location(name, root / f"{LOOP}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
        return module

    def _make_engines(self) -> list[Engine]:
        module = MILES.load("miles.backends.sglang_utils.sglang_engine")
        self.rig.patch((module, "requests"), Server(self.rig.engines))
        self.rig.patch((module, "time"), SimpleNamespace(sleep=lambda seconds: None))
        made = []
        for double in self.rig.engines:
            client = object.__new__(module.SGLangEngine)
            client.args, client.node_rank = self.args, 0
            client.server_host, client.server_port = "engine", double.index
            made.append(Engine(double, client))
        return made

    def _make_manager(self) -> Any:
        """miles' rollout manager over its own server and group objects, without the constructor that starts engines."""
        servers = MILES.load("miles.ray.rollout.rollout_server")
        module = MILES.load("miles.ray.rollout.rollout_manager")
        alive = {"is_allocated": True, "is_alive": True}
        group = servers.ServerGroup(
            args=self.args,
            pg=None,
            all_engines=[SimpleNamespace(actor_handle=h, **alive) for h in self.engine_handles],
            num_gpus_per_engine=1,
            has_new_engines=False,
            needs_offload=self.args.offload_rollout,
        )
        manager = object.__new__(module.RolloutManager.__ray_metadata__.modified_class)
        manager.args, manager.rollout_engine_lock, manager._health_monitors = self.args, None, []
        manager.servers = {"default": servers.RolloutServer(server_groups=[group])}
        manager.generate, manager.eval = self.generate, self.evaluate
        manager.save = manager.load = manager.dispose = lambda *args: None
        return manager

    def _patch(self) -> None:
        """Ray, and what needs a cluster, a tracker or a network."""
        rig = self.rig
        placement = MILES.load("miles.ray.placement_group")
        group = MILES.load("miles.ray.actor_group")
        remote = SimpleNamespace(remote=lambda args, pg: self.manager)
        rig.patch((placement, "RolloutManager"), SimpleNamespace(options=lambda **_: remote))
        rig.patch((placement, "ray"), SimpleNamespace(get=rig.get))
        rig.patch((placement, "_select_train_group_class"), lambda: group.RayTrainGroup)
        rig.patch((group.RayTrainGroup, "_allocate_gpus_for_actor"), lambda group, *args: self.actors[group.role])
        rig.patch((self.loop, "create_placement_groups"), lambda args: dict.fromkeys(("actor", "critic", "rollout")))
        for module in (self.loop, placement):
            if hasattr(module, "eager_create_task"):
                rig.patch((module, "eager_create_task"), self._eager)
        for name in SETUP:
            if hasattr(self.loop, name):
                rig.patch((self.loop, name), _Nothing())

    def kinds(self) -> tuple[str, ...]:
        """What a sync sends. Under LoRA the base goes along unless the engine keeps it while released, or for good."""
        if not self.rig.config.lora:
            return ("base",)
        args = self.args
        kept = not args.offload_rollout or (
            "weight" not in args.offload_rollout_level
            and "lora_rollout_base_retained" in MILES.source("miles.backends.megatron_utils.lora_utils")
        )
        return ("adapter",) if args.lora_base_cpu_backup or kept else ("base", "adapter")

    async def generate(self, rollout_id: int) -> dict[str, Any]:
        """A rollout; where it is resampled, miles asks the engines again within the same call."""
        for _ in range(1 + self.rig.config.resample):
            await self.evaluate(rollout_id)
        return {"data_ref": None, "sample_indices": None}

    async def evaluate(self, rollout_id: int) -> None:
        await asyncio.gather(*[handle.generate.remote() for handle in self.engine_handles])

    def run(self, iterations: int) -> None:
        """`train()` from the rollout after the last, for that many iterations."""
        self._end_job()
        self.launched = True
        args = self.args
        args.start_rollout_id, args.num_rollout = self.done, self.done + iterations
        self._drive(self.loop.train(args))
        self.done += iterations

    def _end_job(self) -> None:
        """What the last job launched ends with it, calls under way included."""
        if not self.launched:
            return
        self.launched = False
        self.rig.run(_cancel_the_rest())
        for trainer in (*self.trainers, *self.critics):
            trainer.actor = None
            trainer.seat.rank.end_process()
        for engine in self.engines:
            engine.double.relaunch()

    async def _eager(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """miles' `eager_create_task` for a driver that is not in the loop: its first calls are made on return."""
        task = self.rig.clock.task(coroutine)
        self.rig.run(asyncio.sleep(0))
        return task

    def _drive(self, loop: Coroutine[Any, Any, Any]) -> None:
        """Runs the driver's coroutine outside the rig's event loop, so that `ray.get` blocks it as Ray's does."""
        try:
            while True:
                waited = loop.send(None)
                self.rig.run(asyncio.wait([waited]))
        except StopIteration:
            return
        finally:
            loop.close()

    def close(self) -> None:
        """The end of the job: miles has no other."""
        self._end_job()


async def _cancel_the_rest() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


class _Nothing:
    """Answers any call and any attribute with itself."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


def driver(rig: Rig) -> MilesDriver:
    """The factory of the hand-off profile."""
    return MilesDriver(rig)

"""The rig of a weight sync, dispatch level: worker groups by role and one engine. No tensors.

Knows what each role holds in each configuration. Does not know rules or which scenario is running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from colocert.rig.contract import MIB, Claims, Config
from colocert.rig.rig import Rig
from colocert.rig.sync_engine import SyncEngine
from colocert.rig.workers import ADAPTERS, GRADS, MODEL, OPTIMIZER, Storage, WorkerGroup
from colocert.trace.events import AnyEvent

POLICY = "policy"
BASE_BYTES, ADAPTER_BYTES = 64 * MIB, 4 * MIB


class WeightSync(Protocol):
    """What `weight_sync(rig)` returns. Any method may be a coroutine.

    Timeline: `after_build()` once, then any order of the others; a sync finds the engine asleep or serving and leaves
    it serving. `sync` raises if it did not deliver; called again it does. `believed()` is (role, kind) to released,
    from the framework's own flags; what it does not name is not judged.
    """

    def after_build(self) -> Any: ...
    def train_step(self) -> Any: ...
    def forward(self, role: str) -> Any: ...
    def sync(self, adapter: str | None = None) -> Any: ...
    def believed(self) -> Any: ...


SYNC_METHODS = ("after_build", "train_step", "forward", "sync", "believed")


@dataclass(frozen=True, kw_only=True)
class SyncConfig(Config):
    """What a scenario of the profile is.

    `colocated`, `lora`, `strategy` (megatron or fsdp) and `merge_lora` say which sync it is; the policy's adapters are
    `adapters`, of which `sync(adapter)` names one where there are several. `overlap`: the engine serves requests while
    the sync runs; else it may be asleep when `sync()` is called, and serves when it returns.
    """

    roles: tuple[str, ...] = ("policy", "critic", "ref")
    adapters: tuple[str, ...] = ("adapter",)
    overlap: bool = False

    @property
    def sends(self) -> str:
        """The kind of sync: adapter, merged, full or fsdp."""
        if self.strategy == "fsdp":
            return "fsdp"
        if not self.lora:
            return "full"
        return "merged" if self.merge_lora else "adapter"


class SyncRig(Rig):
    """What `weight_sync` gets. `workers`: role to its worker group. `engine`: the engine double.

    Everything is on the device when the factory is called, as after building. Any effect can fail: a fault is armed on
    the n-th effect of a call.
    """

    config: SyncConfig

    def __init__(self, config: SyncConfig, claims: Claims, sink: Callable[[AnyEvent], None], *, seed: int = 0) -> None:
        super().__init__(config, claims, sink, seed=seed)

    def start(self) -> None:
        """Builds the worker groups and the engine, whose base is the model that the policy was built from."""
        config = self.config
        first = config.adapters[0] if config.lora else ""
        self.workers = {
            role: WorkerGroup(role, self._storages(role), self._stamp, self.faults, first if role == POLICY else "")
            for role in config.roles
        }
        base = self.workers[POLICY].contents(MODEL)["base"]
        self.engine = SyncEngine(
            config, self._stamp, self.faults, base, adapters=config.adapters, overlap=config.overlap
        )
        self.engines = [self.engine]
        self.faults.passed.clear()

    def _storages(self, role: str) -> Iterator[Storage]:
        config = self.config
        adapters = config.adapters if config.lora and role == POLICY else ()
        size = ADAPTER_BYTES if adapters else BASE_BYTES
        yield Storage("base", MODEL, BASE_BYTES, f"#{role}.base")
        for name in adapters:
            yield Storage(name, MODEL if config.strategy == "fsdp" else ADAPTERS, size, f"#{role}.{name}", adapter=True)
        if role != "ref":
            yield Storage("optimizer", OPTIMIZER, 2 * size, f"#{role}.optimizer")
            yield Storage("grads", GRADS, size, f"#{role}.grads")

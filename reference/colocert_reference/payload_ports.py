"""The reference's payload sync on a colocert rig: the trainer double as its source, the engine double as its engine.

Knows colocert's doubles. Does not know rules or scenarios.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from colocert.rig.payload_rig import PayloadRig
from colocert_reference.sync import Adapter, Layout, Named, NoSource, PayloadSync, Tensor


class RigSource:
    """The trainer double as a source."""

    def __init__(self, rig: PayloadRig) -> None:
        self.trainer, self.sync = rig.trainer, rig.config.sync

    def base(self) -> Named:
        held = self.trainer.host_copy("base")
        return self.trainer.base if held is None else held

    def adapter(self, name: str) -> Adapter:
        held, one = self.trainer.host_copy(name), self.trainer.adapters[name]
        if held is None and self.trainer.where(name) != "device":
            raise NoSource(f"adapter {name} has neither memory nor a host copy")
        buffer = one.buffer if held is None else held["buffer"]
        return Adapter(buffer, one.slots, self.trainer.shape.rank, self.trainer.shape.alpha)

    def outside(self) -> tuple[str, ...]:
        return self.trainer.trainable_outside


class RigEngine:
    """The engine double as an engine."""

    def __init__(self, rig: PayloadRig) -> None:
        self.engine, self.modules = rig.engine, rig.trainer.peft_config()["target_modules"]

    def base_valid(self) -> bool:
        return self.engine.base_valid

    def load_base(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterable[str]:
        return self.engine.update_base(tensors).loaded

    def load_adapter(self, name: str, tensors: dict[str, Tensor], adapter: Adapter, version: int) -> Iterable[str]:
        config = {"r": adapter.rank, "lora_alpha": adapter.alpha, "target_modules": self.modules}
        return self.engine.load_adapter(name, tensors, config, version).loaded

    def withdraw(self, name: str) -> None:
        self.engine.unload_adapter(name)


class RigPayload:
    """What `payload_sync(rig)` returns: the strategy that the scenario asks for."""

    def __init__(
        self,
        rig: PayloadRig,
        sync: type[PayloadSync] = PayloadSync,
        *,
        source: type[RigSource] = RigSource,
        engine: type[RigEngine] = RigEngine,
        layout: type[Layout] = Layout,
    ) -> None:
        self.rig, shape = rig, rig.trainer.shape
        self.payload = sync(source(rig), engine(rig), layout(groups=shape.groups, head=shape.head))

    def sync(self, adapter: str | None = None) -> Any:
        """Sends an adapter, or the only one, or everything where nothing is one."""
        config = self.rig.config
        if config.sync == "full":
            return self.payload.sync_full()
        name = adapter or config.adapters[0]
        return self.payload.sync_merged(name) if config.sync == "merged" else self.payload.sync_adapter(name)

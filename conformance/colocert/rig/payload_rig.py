"""The rig of the sync-payload profile: a small real trainer, an engine double with real tensors, and what was seen.

Knows the doubles and their configuration. Does not know rules or scenarios.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from colocert.extras import has_torch
from colocert.rig import payload_measure as measure
from colocert.rig.contract import Claims, Config
from colocert.rig.payload_engine import PayloadEngine
from colocert.rig.payload_trainer import PayloadTrainer
from colocert.rig.rig import Rig
from colocert.trace.events import POISON, AnyEvent, Data, Measured


class TorchMissing(ImportError):
    """The profile works on tensors, and torch is not installed."""


def require_torch() -> None:
    """Raises `TorchMissing` where torch is not installed."""
    if not has_torch():
        raise TorchMissing("sync-payload works on tensors and needs torch: pip install 'colocert[reference]'")


@dataclass(frozen=True, kw_only=True)
class PayloadConfig(Config):
    """What a scenario of this profile is, beyond `Config`: `lora`, `merge_lora` and `engine_mirror` are meant there.

    `adapters`: their names, none without LoRA. `transport`: how tensors in memory reach the engine, `copy` or `alias`.
    `engine_base`: what the engine starts with, the trainer's base as `loaded` from the checkpoint, or a `dummy`.
    `outside`: one tensor outside the adapters trains as well, `decoder.final_layernorm.weight`.
    """

    adapters: tuple[str, ...] = ("policy",)
    transport: str = "copy"
    engine_base: str = "loaded"
    outside: bool = False

    @property
    def sync(self) -> str:
        """What is sent: `adapter`, `merged` or `full`."""
        return "full" if not self.lora else "merged" if self.merge_lora else "adapter"

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "adapters": list(self.adapters), "sync": self.sync}


class PayloadRig(Rig):
    """The rig that `payload_sync` gets. `config`: a `PayloadConfig`. `trainer`: see `PayloadTrainer`. `engine`: see
    `PayloadEngine`; a framework that keeps what the engine knows asks it for `base_valid` and `incarnation`.

    `directory` is where files of a sync belong.
    """

    config: PayloadConfig

    def __init__(self, config: PayloadConfig, claims: Claims, sink: Callable[[AnyEvent], None]) -> None:
        require_torch()
        super().__init__(config, claims, sink)
        self.trainer = PayloadTrainer(
            config.adapters,
            emit=self.emit,
            faults=self.faults,
            resident=claims.adapter_source == "resident",
            outside=config.outside,
        )
        self.engine = PayloadEngine(
            self.trainer.export_base(),
            loaded=config.engine_base == "loaded",
            mirror=config.engine_mirror,
            transport=config.transport,
            emit=self.emit,
            faults=self.faults,
        )
        self.measure = measure.Measure(self.trainer, self.engine)

    def start(self) -> None:
        """Nothing: the memory is the trainer's and the engine's tensors."""

    def look(self, asked: str | None, *, after: bool) -> None:
        """Writes the state of the tensors, and after a sync how engine and trainer compare."""
        facts = self.measure.compared(asked) if after else self.measure.state(asked)
        self.emit(Measured("after" if after else "before", facts))

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Writes which lost memory is touched in the block: any operation on it but taking a view."""
        watched = measure.lost(self.trainer)
        if not watched:
            yield
            return
        touched: set[str] = set()
        try:
            with _watcher(watched, touched):
                yield
        finally:
            for name in sorted(touched):
                self.emit(Data("adapter", name, "read", "adapter", POISON))


def _watcher(watched: dict[int, str], touched: set[str]) -> Any:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Watcher(TorchDispatchMode):  # type: ignore[misc, unused-ignore]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:  # or torch imports its compiler at the first operation, for a second
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            takes_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
            for leaf in () if takes_view else tree_leaves((args, kwargs or {})):
                if isinstance(leaf, torch.Tensor):
                    name = watched.get(leaf.untyped_storage().data_ptr())
                    if name is not None:
                        touched.add(name)
            return func(*args, **(kwargs or {}))

    return Watcher()

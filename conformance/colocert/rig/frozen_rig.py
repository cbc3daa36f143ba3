"""The rig of a frozen-weight offload: a real small module, a counted device, and a real folder.

Knows what `frozen_offload(rig)` is given. Does not know how an offload is observed or judged.

    frozen_offload(rig) -> offload() backload() ... , any number of times; then the process ends or is killed
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colocert.rig.contract import Claims, Config
from colocert.rig.frozen_module import MIB, FakeDevice, Made, make
from colocert.rig.rig import Rig
from colocert.trace.events import AnyEvent

CHUNK = 2 * MIB
"""Bytes that an offload may stage at a time."""


@dataclass(frozen=True, kw_only=True)
class FrozenConfig(Config):
    """What a frozen-offload scenario is.

    `file_backed`: frozen tensors go to files in `rig.directory`; otherwise to host memory. `size` is the module's:
    small, medium, large or many. `chunk`: bytes that may be staged at a time.
    """

    file_backed: bool = True
    size: str = "small"
    chunk: int = CHUNK


class FrozenRig(Rig):
    """What `frozen_offload` gets, in a process of its own.

    `module`: a torch module whose parameters are on `device`. `adapter_names`: which of them are adapters; a parameter
    that is not one and does not require gradients is frozen. `fused`: by name, the flat device tensors of which
    trainable parameters are views. `rank`: this process's among those that share `directory`. `device`: makes and
    counts device memory; a storage of it that is emptied with `resize_(0)`, or that nothing refers to, is free again.
    """

    def __init__(
        self,
        config: FrozenConfig,
        claims: Claims,
        sink: Callable[[AnyEvent], None],
        directory: Path,
        *,
        rank: int,
        values: int,
    ) -> None:
        self.config: FrozenConfig
        self.device = FakeDevice()
        self.made: Made = make(self.device, config.size, lora=config.lora, values=values)
        super().__init__(config, claims, sink, directory=directory)
        self.rank = rank

    @property
    def module(self) -> Any:
        return self.made.module

    @property
    def adapter_names(self) -> frozenset[str]:
        return self.made.adapter_names

    @property
    def fused(self) -> dict[str, Any]:
        return self.made.fused

    def start(self) -> None:
        """Nothing: the memory is the module's."""

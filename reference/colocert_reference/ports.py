"""What the reference trainer needs from the world, as ports: memory, process groups, gradients, work.

Knows the calls and what each promises. Does not know torch, the saver library, megatron or colocert: `real/` puts
those behind the ports, `colocert_impl.py` puts the suite's doubles there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

GRADS, PARAMS, DEFAULT = "grad_buffer", "param_buffer", "default"
"""The trainer's tags: gradients (no host backup), rematerialised parameters (none), everything else (with backup)."""


class OffloadOff(RuntimeError):
    """A release was asked for although train offload is off."""


class NotLora(RuntimeError):
    """An early release was asked for without LoRA, which alone keeps gradient buffers in a region of their own."""


class OutOfDeviceMemory(RuntimeError):
    """The memory to resume is not free. Raised before the saver is called, whose own answer would be `exit(1)`."""


class Memory(Protocol):
    """The saver."""

    def pause(self, tag: str) -> None: ...

    def resume(self, tag: str) -> None: ...

    def fits(self, tags: Sequence[str]) -> bool:
        """Whether all of these released tags can be resumed now."""


class Groups(Protocol):
    """Process groups; both calls leave alone what is already as asked."""

    def tear_down(self) -> None: ...

    def rebuild(self) -> None:
        """Creates each missing group with the arguments that it was first created with."""


class Gradients(Protocol):
    """The gradient buffers' contents."""

    def live(self) -> bool:
        """Whether they hold gradients that a later step still needs."""

    def keep(self) -> Any:
        """A copy on the host."""

    def restore(self, kept: Any) -> None: ...

    def zero(self) -> None: ...


class Work(Protocol):
    """What a trainer does between hand-offs."""

    def step(self) -> None: ...

    def send(self, tag: str, *, from_host: bool) -> None:
        """Sends what the engine needs, out of `tag`: from the device, or from the host backup."""

    def rematerialize(self) -> None:
        """Writes the parameters anew from the master weights, which must be resident."""

    def clear_memory(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Ports:
    """The four ports of one trainer."""

    memory: Memory
    groups: Groups
    gradients: Gradients
    work: Work


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the trainer runs. `tags` are the tags it has allocations under; `syncs`: this role sends weights."""

    tags: frozenset[str]
    lora: bool
    offload_train: bool = True
    rematerialize: bool = False
    syncs: bool = True

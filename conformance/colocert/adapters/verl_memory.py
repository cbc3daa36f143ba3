"""What verl's offload and onload functions are given: tensors that are the storages of a rig's worker group.

Knows what `verl.utils.megatron_utils` and the FSDP engine ask of a module, a DDP buffer, a parameter and an optimizer;
each answer comes from the worker, and each move is one of its moves. Does not know engines, syncs or rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from colocert.rig.workers import ADAPTERS, DEVICE, GRADS, HOST, MODEL, OPTIMIZER, WorkerGroup

SIZE = 1
"""Elements of a storage that is there: bytes are counted by the worker."""


class Parameter:
    """A tensor on its own: a frozen parameter, one of a module without DDP, or an fp32 copy of the optimizer.

    It moves when `data` is assigned, as the storage that it had is freed then.
    """

    requires_grad, grad = False, None

    def __init__(self, worker: WorkerGroup, kind: str) -> None:
        self.worker, self.kind = worker, kind

    @property
    def device(self) -> Any:
        return SimpleNamespace(type="cuda" if self.worker.resident(self.kind) else "cpu")

    @property
    def data(self) -> Any:
        return self

    @data.setter
    def data(self, place: str) -> None:
        self.worker.move(self.kind, place)

    def to(self, device: str, non_blocking: bool = False) -> str:
        return HOST if device == "cpu" else DEVICE

    def storage(self) -> Storage:
        return Storage(self.worker, self.kind)

    def numel(self) -> int:
        return SIZE

    def storage_offset(self) -> int:
        return 0

    def is_contiguous(self) -> bool:
        return True


class Storage:
    """The storage of a tensor: empty while the worker holds the kind on the host."""

    def __init__(self, worker: WorkerGroup, kind: str) -> None:
        self.worker, self.kind = worker, kind

    def size(self) -> int:
        return SIZE if self.worker.resident(self.kind) else 0

    def resize_(self, size: int) -> None:
        self.worker.move(self.kind, DEVICE if size else HOST)


class Flat:
    """The parameters or the gradients of a DDP buffer: flat, and emptied by resizing the storage.

    The copy to or from pinned memory beside it is part of the worker's move.
    """

    shape, dtype = (SIZE,), "bfloat16"

    def __init__(self, worker: WorkerGroup, kind: str) -> None:
        self.held = Storage(worker, kind)

    @property
    def data(self) -> Any:
        return self

    def size(self) -> tuple[int, ...]:
        return self.shape

    def storage(self) -> Storage:
        return self.held

    def copy_(self, source: Any, non_blocking: bool = False) -> None: ...
    def zero_(self) -> None: ...


class Pinned:
    """The host tensor that the offload keeps for each buffer."""

    def __init__(self, size: Any, dtype: Any, device: str, pin_memory: bool) -> None:
        self.shape, self.dtype = size, dtype

    def storage(self) -> Any:
        return SimpleNamespace(size=lambda: SIZE)

    def copy_(self, source: Any, non_blocking: bool = False) -> None: ...


class Buffer:
    """A DDP buffer of what trains."""

    def __init__(self, worker: WorkerGroup, kind: str) -> None:
        self.param_data, self.grad_data = Flat(worker, kind), Flat(worker, GRADS)


class Module:
    """A model chunk without DDP: the reference model's (megatron/transformer_impl.py:471)."""

    def __init__(self, worker: WorkerGroup) -> None:
        self.worker = worker
        self.held = Parameter(worker, MODEL)

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        return [("base", self.held)]

    def modules(self) -> tuple[Any, ...]:
        return ()

    def train(self) -> None: ...
    def eval(self) -> None: ...


class Wrapped(Module):
    """A model chunk under DDP: its buffers hold what trains, so under LoRA the base is beside them."""

    def __init__(self, worker: WorkerGroup) -> None:
        super().__init__(worker)
        frozen = ADAPTERS in worker.kinds
        self.buffers = [Buffer(worker, ADAPTERS if frozen else MODEL)]
        self.expert_parallel_buffers: list[Buffer] = []
        self.module = SimpleNamespace(parameters=lambda: [self.held] if frozen else [])

    def zero_grad_buffer(self) -> None: ...


class Optimizer:
    """One optimizer; its states are one storage, held as megatron's fp32 copies are."""

    optimizer = None

    def __init__(self, worker: WorkerGroup) -> None:
        self.worker = worker
        self.shard_fp32_from_float16_groups = [[Parameter(worker, OPTIMIZER)]]

    def zero_grad(self) -> None: ...


class Collected(str):
    """A tensor that was read, as its content token: a copy of it says the same."""

    __slots__ = ()

    def detach(self) -> Collected:
        return self

    def cpu(self) -> Collected:
        return self


class FlatModule:
    """An FSDP module: model and adapters are in its flat parameters. `peft_config` only under LoRA.

    It is its own base model, which moves as a whole.
    """

    def __init__(self, worker: WorkerGroup, lora: bool) -> None:
        self.worker = worker
        self.base_model = SimpleNamespace(model=self)
        if lora:
            self.peft_config = {"default": SimpleNamespace(to_dict=lambda: {"r": 8})}

    def parameters(self) -> Iterator[Parameter]:
        yield Parameter(self.worker, MODEL)

    def to(self, device: str) -> FlatModule:
        self.worker.move(MODEL, HOST if device == "cpu" else DEVICE)
        return self

    def adapters(self) -> dict[str, Collected]:
        """The adapter's tensors, gathered on the device."""
        return self._sent("adapter", DEVICE)

    def state_dict(self) -> dict[str, Collected]:
        """The base, from where it is."""
        return self._sent("base", DEVICE if self.worker.resident(MODEL) else HOST)

    def _sent(self, what: str, source: str) -> dict[str, Collected]:
        return {name: Collected(content) for name, content in self.worker.send(what, source=source).items()}

    def train(self) -> None: ...
    def eval(self) -> None: ...


class FlatOptimizer(Optimizer):
    """FSDP's: gradients come with a backward pass and go when they are zeroed."""

    def zero_grad(self) -> None:
        self.worker.move(GRADS, HOST)

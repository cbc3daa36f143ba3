"""Device memory in named pools, each of which can leave the device and come back to the same address."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from torch_memory_saver import torch_memory_saver


class Pool(Enum):
    """What lives together. The value is the saver's tag, and whether a copy is kept on the host while it is away."""

    MODEL = ("default", True)  # frozen base, adapter, Adam's moments
    GRADIENTS = ("grad_buffer", False)

    @property
    def tag(self) -> str:
        return self.value[0]


@contextmanager
def inside(pool: Pool) -> Iterator[None]:
    """Tensors made in here belong to the pool."""
    tag, host_copy = pool.value
    with torch_memory_saver.region(tag=tag, enable_cpu_backup=host_copy):
        yield


def evict(pool: Pool) -> None:
    torch_memory_saver.pause(pool.tag)


def fetch(pool: Pool) -> None:
    torch_memory_saver.resume(pool.tag)

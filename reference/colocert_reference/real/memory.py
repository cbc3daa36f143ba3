"""The memory port over the real torch_memory_saver, and what lies in which region.

    default       host backup: base weights, LoRA parameters, the optimizer's moments (and its loss scale, one number)
    grad_buffer   no backup: the fused gradient buffers of megatron-core's DistributedDataParallel
    neither       activations, the gradients that autograd makes before DDP adds them to its buffers, inputs, and what
                  torch keeps on the host anyway (Adam's step counters)

On `host` DDP has fused gradient buffers only: parameters keep the memory they were made in. For the distributed
optimizer DDP also makes fused *parameter* buffers and moves the parameters there. Those hold weights that are kept
nowhere else, so they belong to `default`, although DDP makes them beside the gradients' (`SaverMemory.fused_buffers`).

Knows tags, bytes, the saver's calls and where its host backup is. Does not know the order of releases (`lifecycle`),
nor what a tensor means. The `cuda` half has been written against torch and the saver's source and has not run yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from colocert_reference.ports import DEFAULT, GRADS
from colocert_reference.real import SWITCHES_THE_MODE

BACKED_UP = {DEFAULT: True, GRADS: False}
GRANULE = 2 << 20
"""What the device hands out physical memory in; the saver rounds every allocation up to it."""


class ManagedMemory(Protocol):
    """One device under the saver, as this process sees it."""

    device: str
    saver: Any

    def region(self, tag: str, *, backup: bool) -> contextlib.AbstractContextManager[None]:
        """What this thread allocates inside belongs to `tag`."""

    def pause(self, tag: str) -> int:
        """Releases `tag`; the bytes that gave back, which are those that its resume needs."""

    def resume(self, tag: str) -> None: ...

    def free_bytes(self) -> int:
        """Bytes free on the whole device, whoever holds the rest."""

    def host_bytes(self) -> int:
        """Pinned host bytes that this process holds; -1 where the platform does not say."""

    def give_up_cache(self) -> None:
        """Returns to the device what an allocator holds and no tensor uses."""

    def library(self) -> Any:
        """The saver's C entry points."""


class CudaMemory:
    """A GPU: torch's caching allocator, one pool a tag, every segment of which the saver moves. Has not run yet."""

    device = "cuda"

    def __init__(self) -> None:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        package = importlib.import_module("torch_memory_saver")
        self.saver: Any = package.torch_memory_saver
        if self.saver._impl is None:
            self.saver.hook_mode = "preload"
            self.saver._ensure_initialized()
        if self.saver._impl._hook_mode != "preload":
            raise RuntimeError(f"the saver must run in preload mode (got {self.saver._impl._hook_mode!r})")

    def region(self, tag: str, *, backup: bool) -> contextlib.AbstractContextManager[None]:
        return self.saver.region(tag=tag, enable_cpu_backup=backup)

    def pause(self, tag: str) -> int:
        torch.cuda.synchronize()
        nbytes = self._segments(tag)
        self.saver.pause(tag)
        return nbytes

    def resume(self, tag: str) -> None:
        self.saver.resume(tag)
        torch.cuda.synchronize()

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info()[0])

    def host_bytes(self) -> int:
        return -1

    def give_up_cache(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def library(self) -> Any:
        return self.saver._impl._binary_wrapper.cdll

    def _segments(self, tag: str) -> int:
        """The bytes of all segments in the tag's pools; the saver's pool key begins with the tag."""
        pools = {tuple(pool.id) for key, pool in self.saver._impl._mem_pools.items() if key[0] == tag}
        return sum(
            granules(segment["total_size"])
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) in pools
        )


class SaverMemory:
    """The port. `resume` of more than is free ends the process, so `fits` is asked first, for all tags together.

    What a tag needs is what its pause gave back. Between `fits` and `resume` another process can take the memory: the
    hand-off protocol has to exclude that, the device cannot.
    """

    def __init__(self, managed: ManagedMemory) -> None:
        self.managed = managed
        self.owed: dict[str, int] = {}

    @contextlib.contextmanager
    def region(self, tag: str) -> Iterator[None]:
        with self.managed.region(tag, backup=BACKED_UP[tag]):
            yield

    @contextlib.contextmanager
    def fused_buffers(self) -> Iterator[None]:
        """For DDP's constructor: its FP32 buffers, of gradients, and its bf16 ones, of parameters, each in its region.

        One region a buffer and none around them: which of two nested pools torch's CUDA allocator takes is not ours.
        """
        with _FusedBuffers(self):
            yield

    def pause(self, tag: str) -> None:
        self.owed[tag] = self.managed.pause(tag)

    def resume(self, tag: str) -> None:
        self.managed.resume(tag)
        del self.owed[tag]

    def fits(self, tags: Sequence[str]) -> bool:
        needed = sum(self.owed[tag] for tag in tags)
        if needed > self.managed.free_bytes():
            self.managed.give_up_cache()
        return needed <= self.managed.free_bytes()

    def backup(self, tensor: torch.Tensor) -> torch.Tensor:
        """A released tensor's bytes in the saver's host backup: a view that is valid until the resume.

        The C library looks an address up among its allocations and ends the process where there is no backup.
        """
        assert tensor.is_contiguous(), f"a backup is read as one run of bytes (got strides {tensor.stride()})"
        address = ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_uint8))
        lookup = self.managed.library().tms_get_cpu_backup_pointer
        lookup.argtypes = [ctypes.POINTER(ctypes.c_uint8), ctypes.c_uint64]
        lookup.restype = ctypes.POINTER(ctypes.c_uint8)
        found = lookup(address, tensor.nbytes)
        if not found:
            raise RuntimeError("a host backup exists only while its region is released (got a resident tensor)")
        raw = (ctypes.c_uint8 * tensor.nbytes).from_address(ctypes.addressof(found.contents))
        return torch.frombuffer(raw, dtype=tensor.dtype).view(tensor.shape)


class _FusedBuffers(TorchFunctionMode):
    """DDP makes its buffers, and nothing else, by `torch.zeros` with a type."""

    def __init__(self, memory: SaverMemory) -> None:
        super().__init__()
        self.memory = memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.zeros or "dtype" not in kwargs:
            return func(*args, **kwargs)
        with self.memory.region(DEFAULT if kwargs["dtype"] is torch.bfloat16 else GRADS):
            return func(*args, **kwargs)


def granules(nbytes: int) -> int:
    """Bytes rounded up to whole granules."""
    return -(-nbytes // GRANULE) * GRANULE


def open_memory(device: str) -> ManagedMemory:
    """The managed memory of this process on `host` or `cuda`; imports first what would switch the saver's mode."""
    importlib.import_module(SWITCHES_THE_MODE)
    if device == "cuda":
        return CudaMemory()
    if device != "host":
        raise ValueError(f"device must be host or cuda (got {device!r})")
    from colocert_reference.real.host_memory import HostMemory

    return HostMemory()

"""Torch tensors in memory that the saver manages, on a machine without a GPU and on one with.

Knows torch and the saver package; imports both only when used. On `cuda` torch's own allocator does the work and
`region` is the saver's. On `host` a mode places what tensor factories return in memory from the hooked `cudaMalloc`.

    import megatron.core                      # first: its import would switch the saver's mode
    saver = tensors.start()                   # in a child of colocert.device.run
    with tensors.region(saver, "default", backup=True):
        model = build_model()                 # its parameters lie in managed memory
    with tensors.region(saver, "grad_buffer", backup=False):
        ddp = wrap(model)                     # its fused gradient buffer too
    saver.pause("grad_buffer"); saver.pause("default")     # the bytes are free, the addresses hold
    saver.resume("default"); saver.resume("grad_buffer")   # parameters as before, gradients 0xDB: zero them

Not placed on `host`: what C++ allocates by itself (gradients of autograd, results of operators), tensors made in
another thread, and sparse, quantised or meta tensors. As the saver's, a region belongs to the thread that opened it.
Every tensor takes whole granules of 2 MiB there; its memory is freed with the last reference to its storage.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from colocert.device.errors import DeviceOutOfMemory
from colocert.device.hook import Hook
from colocert.device.machine import find_preload
from colocert.device.probe import refuse_torch_mode

if TYPE_CHECKING:
    import torch


def start(device: str | None = None) -> Any:
    """The saver of this process, in preload mode and initialised; `torch_memory_saver.torch_memory_saver`.

    Raises `TorchMode` where an import has put a saver to use in torch mode already. Call it after such imports.
    """
    import torch_memory_saver

    saver = torch_memory_saver.torch_memory_saver
    if saver._impl is None:
        saver.hook_mode = "preload"
        saver._ensure_initialized()
    refuse_torch_mode()
    if (device or os.environ.get("COLOCERT_DEVICE", "host")) == "host":
        saver._impl._device_module = _HostModule
    return saver


@contextlib.contextmanager
def region(saver: Any, tag: str, backup: bool) -> Iterator[None]:
    """What this thread creates inside belongs to `tag`. Regions nest; the innermost counts."""
    placed = saver._impl._device_module is _HostModule
    with saver.region(tag=tag, enable_cpu_backup=backup), placement() if placed else contextlib.nullcontext():
        yield


def placement() -> contextlib.AbstractContextManager[Any]:
    """The `host` placement alone, without a region: new tensors lie in device memory that no pause moves."""
    return _placement_class()()


def place(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in device memory, with the shape, strides, type and `requires_grad` of the original.

    Raises `torch.OutOfMemoryError` where the device is full, as torch does on a GPU.
    """
    import torch

    nbytes = tensor.untyped_storage().nbytes()
    hook = _hook()
    try:
        address = hook.malloc(nbytes)
    except DeviceOutOfMemory as error:
        raise torch.OutOfMemoryError(f"{error}; {hook.free_bytes()} bytes are free") from None
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(memory, hook.free, address).atexit = False  # the storage holds `memory` as long as it lives
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    with torch.no_grad():
        placed = torch.empty(0, dtype=tensor.dtype)
        placed.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        placed.copy_(tensor)
    return placed.requires_grad_(tensor.requires_grad)


class _HostModule:
    """Stands where the saver expects `torch.cuda`: pools that do nothing, one device."""

    class MemPool:
        def __init__(self, allocator: object = None) -> None:
            self.allocator = allocator

    @staticmethod
    def use_mem_pool(pool: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @staticmethod
    def current_device() -> int:
        return 0


@lru_cache(maxsize=1)
def _hook() -> Hook:
    return Hook(find_preload())


_FACTORIES = (
    *("empty", "zeros", "ones", "full", "rand", "randn", "randint", "randperm", "arange", "linspace", "eye", "tensor"),
    *("empty_strided", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "clone"),
)
_METHODS = (
    *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "new_tensor"),
    *("clone", "contiguous", "to", "float", "half", "bfloat16", "double"),  # a copy, or the same tensor again
)


@lru_cache(maxsize=1)
def _placement_class() -> Any:
    import torch
    from torch.overrides import TorchFunctionMode

    factories = {getattr(torch, name) for name in _FACTORIES} | {getattr(torch.Tensor, name) for name in _METHODS}

    class PlacementMode(TorchFunctionMode):
        """Places what factories return; `device="cuda"` asks for the same, and is the CPU to torch."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            result = func(*args, **kwargs)
            if func in factories and kwargs.get("out") is None and _placeable(result) and not _shares(result, args):
                return place(result)
            return result

    return PlacementMode


def _is_cuda(device: Any) -> bool:
    import torch

    if isinstance(device, int) and not isinstance(device, bool):
        return True
    return device is not None and torch.device(device).type == "cuda"


def _placeable(result: Any) -> bool:
    import torch

    if not isinstance(result, torch.Tensor) or result.device.type != "cpu" or result.layout != torch.strided:
        return False
    return result.numel() > 0 and not result.is_quantized and result.grad_fn is None


def _shares(result: torch.Tensor, args: tuple[Any, ...]) -> bool:
    import torch

    storage = result.untyped_storage().data_ptr()
    return any(isinstance(arg, torch.Tensor) and arg.untyped_storage().data_ptr() == storage for arg in args[:1])

"""SkyRL's offload of a Megatron model, over the rig's module: `offload_megatron_model_to_cpu` and its counterpart.

Fits the wheel skyrl 0.4.0, the public main before it and the head of PR 2062. Needs torch and numpy; no GPU, and not
Megatron: what the functions import of it is replaced.

Real: the two functions and all that they call in their module: files, mappings, the fallback to host memory. Replaced
by the rig: the device, which torch's own calls are led to; pinned memory, which is ordinary host memory here; and
Megatron's wrapper with its fused buffers. Runs in a process of its own, which ends with the offload: torch is patched
there and nowhere else. Does not know any rule.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from typing import Any

from colocert.adapters.skyrl import MEGATRON, SKYRL, STAND_INS
from colocert.extras import has_torch
from colocert.rig.frozen_rig import FrozenRig

DEVICE = "the rig's device"
"""What `torch.cuda.current_device()` says, and `Tensor.to` takes."""


def can_be_driven() -> bool:
    """Whether the source has the functions, and torch and numpy are installed: without numpy no file is written."""
    return (
        has_torch()
        and PathFinder.find_spec("numpy") is not None
        and "def offload_megatron_model_to_cpu(" in SKYRL.source(MEGATRON)
    )


class Buffer:
    """Megatron's fused buffer of parameters: its storage is emptied, and filled again from a host copy that is kept."""

    def __init__(self, flat: Any) -> None:
        self.flat, self.nbytes = flat, flat.untyped_storage().nbytes()
        self.copy: Any = None

    def offload_to_cpu(self, move_params: bool = True, move_grads: bool = True) -> None:
        storage = self.flat.untyped_storage()
        if not move_params or not storage.nbytes():
            return
        if self.copy is None:
            self.copy = self.flat.cpu().pin_memory()
        else:
            self.copy.copy_(self.flat)
        storage.resize_(0)

    def reload_from_cpu(self, move_params: bool = True, move_grads: bool = True) -> None:
        storage = self.flat.untyped_storage()
        if move_params and self.copy is not None and not storage.nbytes():
            storage.resize_(self.nbytes)
            self.flat.copy_(self.copy)


class Chunk:
    """Stands where Megatron's `DistributedDataParallel` is: the module's parameters, and the buffers."""

    def __init__(self, rig: FrozenRig) -> None:
        self.module = rig.module
        self.buffers = [Buffer(flat) for flat in rig.fused.values()]
        self.expert_parallel_buffers: list[Buffer] = []

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        return iter(self.module.named_parameters())


class SkyRLOffload:
    """The two functions over one chunk, called as `MegatronStrategy` calls them."""

    def __init__(self, rig: FrozenRig) -> None:
        rig.stubs((*STAND_INS, "megatron" if "megatron" in sys.modules else "!megatron"))
        self.utils = SKYRL.load(MEGATRON)
        rig.patch((self.utils, "DDP"), Chunk)
        if hasattr(self.utils, "_FROZEN_OFFLOAD_DIR"):
            rig.patch((self.utils, "_FROZEN_OFFLOAD_DIR"), str(rig.directory) if rig.config.file_backed else "0")
        lead_to_device(rig)
        self.chunks = [Chunk(rig)]
        takes = inspect.signature(self.utils.offload_megatron_model_to_cpu).parameters
        self.options = {"is_lora": rig.config.lora} if "is_lora" in takes else {}

    def offload(self) -> None:
        self.utils.offload_megatron_model_to_cpu(self.chunks, **self.options)

    def backload(self) -> None:
        self.utils.load_megatron_model_to_gpu(self.chunks, **self.options)


def lead_to_device(rig: FrozenRig) -> None:
    """Makes torch take the rig's device for the GPU: what is on it says so, and every way off it or onto it copies."""
    import torch

    device, tensor = rig.device, torch.Tensor
    cpu, to, contiguous = tensor.cpu, tensor.to, tensor.contiguous

    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        target = args[0] if args else kwargs.get("device")
        if target is DEVICE:
            return device.to_device(self)
        off = isinstance(target, (str, torch.device)) and device.holds(self)
        return device.to_host(self) if off else to(self, *args, **kwargs)

    def on_host(self: Any, **kwargs: Any) -> Any:
        return device.to_host(self) if device.holds(self) else cpu(self, **kwargs)

    def laid_out(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = contiguous(self, *args, **kwargs)
        return device.adopt(made) if device.holds(self) and not device.holds(made) else made

    rig.patch((tensor, "is_cuda"), property(device.holds))
    rig.patch((tensor, "cpu"), on_host)
    rig.patch((tensor, "pin_memory"), lambda self, *args: self.clone())
    rig.patch((tensor, "to"), moved)
    rig.patch((tensor, "contiguous"), laid_out)
    rig.patch((torch.cuda, "current_device"), lambda: DEVICE)
    rig.patch((torch.distributed, "is_initialized"), lambda: True)
    rig.patch((torch.distributed, "get_rank"), lambda group=None: rig.rank)

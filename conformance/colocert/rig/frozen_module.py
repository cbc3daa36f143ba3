"""A small module for the frozen-offload profile, on a device that is counted instead of real.

Knows torch, which is imported when a module is made. Does not know who offloads it, or rules.

The device without a GPU is memory of ordinary torch storages that are entered in `FakeDevice`. A tensor is on it while
its storage is one of those and has bytes: emptied with `resize_(0)`, or left by `param.data = other`, it is off.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

KIB, MIB = 1 << 10, 1 << 20

SIZES = {"small": 1, "medium": 24, "large": 192}
"""By what factor the widest tensors of a module grow: about 0.3, 6 and 46 MiB of frozen tensors."""

MANY = 2000
"""Frozen tensors of a module of size "many", each of 64 bytes."""


class FakeDevice:
    """Device memory that is counted: what is made here is on the device, any other storage is host memory."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}

    def adopt(self, tensor: Any) -> Any:
        """Enters the tensor's storage as device memory, and returns the tensor."""
        from torch.multiprocessing.reductions import StorageWeakRef

        storage = tensor.untyped_storage()
        self._known[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def empty(self, nbytes: int) -> Any:
        """New device memory of that many bytes, as a uint8 tensor."""
        import torch

        return self.adopt(torch.empty(nbytes, dtype=torch.uint8))

    def to_device(self, tensor: Any) -> Any:
        """A copy of the tensor on the device, with the same shape, dtype and strides."""
        import torch

        return self.adopt(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)).copy_(tensor)

    def to_host(self, tensor: Any) -> Any:
        """A copy of the tensor in host memory."""
        return tensor.detach().clone()

    def holds(self, tensor: Any) -> bool:
        """Whether the tensor's bytes are on the device."""
        storage = tensor.untyped_storage()
        return storage._cdata in self._known and storage.nbytes() > 0

    def resident_bytes(self) -> int:
        """Bytes of the device that are in use."""
        import torch

        total = 0
        for key, weak in list(self._known.items()):
            if weak.expired():
                del self._known[key]
            else:
                total += torch.UntypedStorage._new_with_weak_ptr(weak.cdata).nbytes()
        return total


class Made:
    """A module with what the rig tells of it.

    `adapter_names` are names of parameters. `fused`: by name the flat device tensors of which trainable parameters are
    views, as a distributed data-parallel wrapper keeps them.
    """

    def __init__(self, module: Any, adapter_names: frozenset[str], fused: dict[str, Any]) -> None:
        self.module, self.adapter_names, self.fused = module, adapter_names, fused


def make(device: FakeDevice, size: str, *, lora: bool, values: int) -> Made:
    """A module of that size on the device, filled with random bits from the seed `values`."""
    made = _lora_module(device, size) if lora else _full_module(device, size)
    fill(made, values)
    return made


def fill(made: Made, values: int, *, only: str = "") -> None:
    """Random bits, in place, in every tensor, or in those of a kind (frozen, adapter, trained, buffer)."""
    for name, kind, tensor in tensors(made):
        if (not only or kind == only) and kind != "fused":
            overwrite(tensor, _bits(tensor, f"{values}/{name}"))


def overwrite(tensor: Any, bits: Any) -> None:
    """Copies into the tensor without autograd noticing; its version counter rises, as with `load_state_dict`."""
    import torch

    with torch.no_grad():
        tensor.copy_(bits)


def random_like(tensor: Any, values: int, name: str) -> Any:
    """Random bits of the tensor's shape and dtype, in host memory."""
    return _bits(tensor, f"{values}/{name}")


def tensors(made: Made) -> Iterator[tuple[str, str, Any]]:
    """Name, kind and tensor of everything in the module, tied names included, and the fused buffers."""
    for name, parameter in made.module.named_parameters(remove_duplicate=False):
        kind = "adapter" if name in made.adapter_names else "trained" if parameter.requires_grad else "frozen"
        yield name, kind, parameter
    for name, buffer in made.module.named_buffers():
        yield name, "buffer", buffer
    for name, flat in made.fused.items():
        yield name, "fused", flat


def _bits(tensor: Any, seed: str) -> Any:
    import hashlib

    import torch

    number = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=6).digest(), "big")
    generator = torch.Generator().manual_seed(number)
    nbytes = tensor.numel() * tensor.element_size()
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(tensor.dtype).reshape(tensor.shape) if nbytes else torch.empty(tensor.shape, dtype=tensor.dtype)


def _lora_module(device: FakeDevice, size: str) -> Made:
    import torch

    block = torch.nn.Module
    root = block()

    def frozen(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.nn.Parameter(device.adopt(torch.empty(shape, dtype=dtype)), requires_grad=False)

    if size == "many":
        root.experts = torch.nn.ParameterList([frozen(32) for _ in range(MANY)])
    else:
        wide = 64 * SIZES[size]
        root.embed, root.head, root.layer = block(), block(), block()
        root.embed.weight = frozen(wide, 512)
        root.head.weight = root.embed.weight
        root.layer.weight = frozen(wide, 384, dtype=torch.float32)
        root.layer.bias = frozen(384, dtype=torch.float32)
        root.layer.quantised = frozen(wide, 256, dtype=torch.float8_e4m3fn)
        root.layer.every_other = torch.nn.Parameter(
            device.adopt(torch.empty(64, 64, dtype=torch.float16))[:, 1::2], requires_grad=False
        )
        root.layer.temperature = frozen()  # between others: what it breaks for those after it is to be seen
        root.layer.transposed = torch.nn.Parameter(
            device.adopt(torch.empty(96, wide, dtype=torch.float32)).t(), requires_grad=False
        )
        root.layer.no_rows = frozen(0, 8)
        root.layer.adapter_norm = frozen(wide, 16)
    root.register_buffer("positions", device.adopt(torch.empty(128, dtype=torch.int64)))
    root.register_buffer("mean", device.adopt(torch.empty(64, dtype=torch.float32)), persistent=False)
    flat = device.adopt(torch.empty(3 * 64 * 16, dtype=torch.bfloat16))
    a, b, c = (torch.nn.Parameter(piece.view(64, 16)) for piece in flat.chunk(3))
    root.proj = block()
    root.proj.lora_a, root.proj.delta, root.proj.adapter_scale = a, b, c
    names = frozenset({"proj.lora_a", "proj.delta", "proj.adapter_scale"})
    return Made(root, names, {"fused.adapters": flat})


def _full_module(device: FakeDevice, size: str) -> Made:
    import torch

    root, fused = torch.nn.Module(), {}
    for dtype, label in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        shapes = {"weight": (64 * SIZES[size], 256), "bias": (256,), "scale": ()}
        flat = device.adopt(torch.empty(sum(math.prod(s) for s in shapes.values()), dtype=dtype))
        part = torch.nn.Module()
        start = 0
        for name, shape in shapes.items():
            count = math.prod(shape)
            setattr(part, name, torch.nn.Parameter(flat[start : start + count].view(shape)))
            start += count
        setattr(root, label, part)
        fused[f"fused.{label}"] = flat
    root.register_buffer("positions", device.adopt(torch.empty(128, dtype=torch.int64)))
    return Made(root, frozenset(), fused)

"""The port that memory rows are written against, and its two adapters.

Knows allocations, tags, bytes and contents. Does not know training or serving. `HostDevice` is the real saver over the
stand-in driver, by ctypes, without torch. `CudaDevice` is the real saver under torch's allocator on a GPU; it has not
been run in this project's CI, which has no GPU: the rows of gpu_tests run it on one.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from colocert.device import launcher
from colocert.device.errors import DeviceOutOfMemory
from colocert.device.hook import GRANULE, Backup, Hook
from colocert.device.launcher import Child
from colocert.device.link import Link
from colocert.device.machine import Machine
from colocert.device.probe import device_index

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class Block:
    """One allocation. `tag` is None for plain memory, which no pause moves. `tensor` is torch's, on `cuda` only."""

    tag: str | None
    backup: bool | Backup
    nbytes: int
    address: int
    tensor: torch.Tensor | None = field(default=None, repr=False)


class Device(Protocol):
    """Real device memory under the real saver, as this process sees it."""

    name: str
    granule: int

    hook: Hook

    def alloc(self, tag: str | None, backup: bool | Backup, nbytes: int, fill: int | None = None) -> Block:
        """New memory under a tag, or plain memory. `DeviceOutOfMemory` where it does not fit."""

    def alloc_raw(self, tag: str | None, backup: bool | Backup, nbytes: int, fill: int | None = None) -> Block:
        """The same by a `cudaMalloc` of its own, past any allocator: whole granules on every device."""

    def free(self, block: Block) -> None:
        """Gives a block up, paused or not."""

    def pause(self, tag: str | None = None) -> None:
        """Releases a tag or everything. The saver ends the process where something of it is released already."""

    def resume(self, tag: str | None = None) -> None:
        """Takes a tag or everything again. The saver ends the process where it does not fit, or is not released."""

    def footprint(self, *blocks: Block) -> int:
        """The device bytes that pausing these blocks alone must free: whole granules, or whole segments."""

    def free_bytes(self) -> int:
        """Bytes free on the whole device."""

    def own_bytes(self) -> int | None:
        """Device bytes of this process; None where the platform does not say."""

    def fill(self, block: Block, value: int) -> None:
        """Sets every byte of a block."""

    def touch(self, block: Block) -> None:
        """Reads and writes one byte. On a paused block: SIGSEGV on `host`, a CUDA error on `cuda`."""

    def checksum(self, block: Block) -> str:
        """SHA-256 of a block's bytes."""

    def read(self, block: Block) -> bytes:
        """A block's bytes."""

    def write(self, block: Block, data: bytes) -> None:
        """Sets the first bytes of a block."""

    def spawn(self, body: Callable[..., Any] | str, /, **arguments: Any) -> Child:
        """Starts a scenario in another process on the same device."""


@dataclass(frozen=True)
class Stage:
    """What a scenario's body is given: the device, and a line to whoever started it."""

    device: Device
    link: Link

    def tell(self, message: Any) -> None:
        """Sends the starter a JSON value."""
        self.link.tell(message)

    def listen(self, timeout: float = 60.0) -> Any:
        """The starter's next message."""
        return self.link.listen(timeout)


def open_device(name: str, hook: Hook) -> Device:
    """The device of this process, whose hook has been probed."""
    return CudaDevice(hook) if name == "cuda" else HostDevice(hook)


class _OnHook:
    """What both adapters do alike."""

    granule = GRANULE

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def alloc_raw(self, tag: str | None, backup: bool | Backup, nbytes: int, fill: int | None = None) -> Block:
        with self.hook.region(tag, backup) if tag is not None else contextlib.nullcontext():
            address = self.hook.malloc(nbytes)
        block = Block(tag, backup, nbytes, address)
        if fill is not None:
            self.hook.fill(address, fill, nbytes)
        return block

    def read(self, block: Block) -> bytes:
        self.hook.synchronize()
        return self.hook.read(block.address, block.nbytes)

    def write(self, block: Block, data: bytes) -> None:
        assert len(data) <= block.nbytes, "more than the block holds"
        self.hook.write(block.address, data)
        self.hook.synchronize()

    def checksum(self, block: Block) -> str:
        return hashlib.sha256(self.read(block)).hexdigest()

    def spawn(self, body: Callable[..., Any] | str, /, **arguments: Any) -> Child:
        return launcher.start(body, machine=Machine.of_this_process(), own_group=False, **arguments)


class HostDevice(_OnHook):
    """The real saver over the stand-in driver. Bytes are exact: whole granules of 2 MiB a block."""

    name = "host"

    def alloc(self, tag: str | None, backup: bool | Backup, nbytes: int, fill: int | None = None) -> Block:
        return self.alloc_raw(tag, backup, nbytes, fill)

    def free(self, block: Block) -> None:
        self.hook.free(block.address)

    def pause(self, tag: str | None = None) -> None:
        self.hook.pause(tag)

    def resume(self, tag: str | None = None) -> None:
        self.hook.resume(tag)

    def footprint(self, *blocks: Block) -> int:
        return sum(-(-block.nbytes // GRANULE) * GRANULE for block in blocks)

    def free_bytes(self) -> int:
        return self.hook.free_bytes()

    def own_bytes(self) -> int:
        return self.hook.standin("own_bytes")

    def fill(self, block: Block, value: int) -> None:
        self.hook.fill(block.address, value, block.nbytes)

    def touch(self, block: Block) -> None:
        self.hook.write(block.address, self.hook.read(block.address, 1))


class CudaDevice(_OnHook):
    """The real saver under torch's caching allocator on a GPU. Not run without one.

    A block of `alloc` is a tensor, so its pause frees the segment that the allocator took for it: `footprint` asks the
    allocator. `tag=None` is a tensor outside every region. A block of `alloc_raw` is whole granules, as on `host`.
    Everything is synchronised before it is measured or paused.
    """

    name = "cuda"

    def __init__(self, hook: Hook) -> None:
        super().__init__(hook)
        import torch

        self._torch: Any = torch
        torch.cuda.set_device(device_index())

    @cached_property
    def _saver(self) -> Any:
        """Started at its first use: importing megatron-core fails in a process that has used the saver already."""
        from colocert.device import tensors

        return tensors.start("cuda")

    def alloc(self, tag: str | None, backup: bool | Backup, nbytes: int, fill: int | None = None) -> Block:
        torch = self._torch
        try:
            with self._region(tag, backup):
                tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            raise DeviceOutOfMemory(nbytes, 2) from error
        block = Block(tag, backup, nbytes, tensor.data_ptr(), tensor)
        if fill is not None:
            self.fill(block, fill)
        return block

    def free(self, block: Block) -> None:
        """The segment stays in its pool, as torch keeps it; the device has it back at the process's end."""
        self._torch.cuda.synchronize()
        if block.tensor is None:
            self.hook.free(block.address)
        block.tensor = None

    def pause(self, tag: str | None = None) -> None:
        self._torch.cuda.synchronize()
        self._saver.pause(tag)

    def resume(self, tag: str | None = None) -> None:
        self._saver.resume(tag)
        self._torch.cuda.synchronize()

    def footprint(self, *blocks: Block) -> int:
        raw = sum(-(-block.nbytes // GRANULE) * GRANULE for block in blocks if block.tensor is None)
        segments = {
            segment["address"]: segment["total_size"]
            for segment in self._torch.cuda.memory_snapshot()
            for block in blocks
            if segment["address"] <= block.address < segment["address"] + segment["total_size"]
        }
        return raw + sum(-(-size // GRANULE) * GRANULE for size in segments.values())

    def free_bytes(self) -> int:
        self._torch.cuda.synchronize()
        return int(self._torch.cuda.mem_get_info()[0])

    def own_bytes(self) -> int | None:
        """By NVML; None where it is absent, or hides processes (a container without the host's pid namespace)."""
        return self.processes().get(os.getpid())

    def processes(self) -> dict[int, int]:
        """The bytes of each process on this device, by NVML; empty where it is absent, or hides processes."""
        properties = self._torch.cuda.get_device_properties(self._torch.cuda.current_device())
        return nvml_processes(str(properties.uuid))

    def fill(self, block: Block, value: int) -> None:
        self.hook.fill(block.address, value, block.nbytes)

    def touch(self, block: Block) -> None:
        if block.tensor is None:
            self.hook.write(block.address, self.hook.read(block.address, 1))
        else:
            block.tensor[:1].add_(0)
        self._torch.cuda.synchronize()

    def _region(self, tag: str | None, backup: bool | Backup) -> contextlib.AbstractContextManager[None]:
        if tag is None:
            return contextlib.nullcontext()
        return self._saver.region(
            tag=tag,
            enable_cpu_backup=backup not in (False, "disk"),
            enable_disk_backup=backup == "disk",
            cpu_backup_backend=backup if backup in ("pinned", "mmap") else None,
        )


def nvml_processes(uuid: str) -> dict[int, int]:
    """The bytes of each process on a device; by its UUID, since NVML and CUDA may number devices differently."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return {}
    try:
        nvml.nvmlInit()
        card = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        running = nvml.nvmlDeviceGetComputeRunningProcesses(card)
    except nvml.NVMLError:
        return {}
    return {process.pid: process.usedGpuMemory for process in running if process.usedGpuMemory is not None}

"""G16: an adapter travels from one process to another through device memory that both see.

On `cuda`, not run so far, that is CUDA IPC as torch does it, and a region's memory is refused by the driver. On `host`
a memory file stands for the exported allocation, its descriptor travels over a socket, and the refusal is modelled: the
stand-in has no CUDA IPC.

    producer: offered -> (row hands it on) -> consumer: received, closed -> producer: acknowledged, releases, measures

The consumer stays until the producer has measured: a process that ends gives its CUDA context back, half a GiB.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import pickle
import socket as sockets
from typing import Any

from colocert.device.ports import Block
from gpu_tests.harness.port import Port

UNITS = 4
POISON = 0xDB


class NotExportable(RuntimeError):
    """What stands in for the driver's "invalid argument" on memory of a region."""


def producer(port: Port, fault: str | None, socket: str) -> dict[str, Any]:
    """Offers an adapter from its region, is refused, repacks it, and holds the copy until it is acknowledged."""
    ways = CudaIpc(port) if port.device.name == "cuda" else MemoryFile(port, socket, fault)
    port.settle()
    adapter = port.alloc("default", UNITS * port.unit, backup=True, fill=0x2A)
    before = port.device.free_bytes()
    refusal = ways.refusal(adapter)
    handle = ways.offer(adapter)
    offered = {
        "region": "refused" if refusal else "exported",
        "refusal": refusal,
        "whole": port.device.checksum(adapter),
        "handle": handle,
    }
    if fault == "released-before-the-acknowledgement":
        ways.release()
    port.tell(offered)
    port.listen()
    if fault != "released-before-the-acknowledgement":
        ways.release()
    port.pause("default")
    port.resume("default")
    port.tell("released")
    port.listen()
    ways.closed()
    return {"left": before - port.device.free_bytes()}


def consumer(port: Port, fault: str | None, socket: str) -> None:
    """Takes what it is handed, says its checksum, and lets go of it."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as listening:
        listening.bind(socket)
        listening.listen()
        port.tell("waiting")
        if port.device.name == "cuda":
            _receive_cuda(port)
        else:
            _receive_file(port, listening)
        port.tell("closed")
        port.listen()


class MemoryFile:
    """`host`: the repacked copy lies in plain device memory; a memory file of the same bytes is handed over."""

    def __init__(self, port: Port, socket: str, fault: str | None) -> None:
        self._port, self._fault = port, fault
        self._line = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        self._line.connect(socket)
        self._staged: Block | None = None
        self._file = -1

    def refusal(self, block: Block) -> str:
        try:
            self._export(block)
        except NotExportable as error:
            return str(error)
        return ""

    def _export(self, block: Block) -> None:
        if block.tag is not None and self._fault != "region-exported":
            raise NotExportable(f"memory of the region {block.tag!r} has no handle (modelled)")

    def offer(self, block: Block) -> int:
        data = self._port.device.read(block)
        self._staged = self._port.alloc(None, block.nbytes)
        self._port.device.write(self._staged, data)
        self._export(self._staged)
        self._file = os.memfd_create("colocert-handover")
        os.ftruncate(self._file, len(data))
        os.pwrite(self._file, data, 0)
        sockets.send_fds(self._line, [b"adapter"], [self._file])
        return len(data)

    def release(self) -> None:
        """The memory goes to whoever asks next, so the bytes are no longer the adapter's."""
        assert self._staged is not None
        os.pwrite(self._file, bytes([POISON]) * self._staged.nbytes, 0)
        os.close(self._file)
        self._port.free(self._staged)
        self._line.close()

    def closed(self) -> None:
        """The consumer has let go; nothing here waits for that."""


def _receive_file(port: Port, listening: sockets.socket) -> None:
    line, _ = listening.accept()
    with line:
        _, files, _, _ = sockets.recv_fds(line, 16, 1)
        nbytes = port.listen()
        with mmap.mmap(files[0], nbytes, prot=mmap.PROT_READ) as seen:
            port.tell(hashlib.sha256(seen).hexdigest())
        os.close(files[0])


class CudaIpc:
    """`cuda`: torch's own sharing of a storage, which asks the driver for a handle of the allocation."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._staged: Any = None

    def refusal(self, block: Block) -> str:
        try:
            self._handle(block.tensor)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return ""

    def offer(self, block: Block) -> str:
        assert block.tensor is not None
        self._staged = block.tensor.clone()
        return self._handle(self._staged)

    def release(self) -> None:
        self._staged = None

    def closed(self) -> None:
        """Torch keeps a shared block until the consumer has counted itself out; only then can it go back."""
        import torch

        torch.cuda.synchronize()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()

    def _handle(self, tensor: Any) -> str:
        from torch.multiprocessing.reductions import reduce_tensor

        return pickle.dumps(reduce_tensor(tensor)).hex()


def _receive_cuda(port: Port) -> None:
    import torch

    rebuild, arguments = pickle.loads(bytes.fromhex(port.listen()))
    tensor = rebuild(*arguments)
    torch.cuda.synchronize()
    port.tell(hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest())
    del tensor
    torch.cuda.ipc_collect()

"""How an adapter travels from the trainer process to the engine process: a socket, raw bytes, one acknowledgement.

    {"tensors": [[name, nbytes], ...], ...}\\n a line of JSON, with what else the sender says of them
    the bytes of each tensor in that order     nothing before, between or after
    {"sha256": ..., ...}\\n                    back: the receiver has copied everything

The sender returns once it has the acknowledgement and has compared the digest, so what it sent from may then be
released. Knows bytes and names. Does not know torch, tensors' types or who trains what.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any

Buffer = bytes | bytearray | memoryview
LINE_LIMIT = 1 << 20


class BadTransfer(RuntimeError):
    """The other side ended in the middle, or acknowledged other bytes than were sent."""


def listen(name: str, timeout: float) -> socket.socket:
    """Where a receiver waits. The name is in Linux' abstract space: no file is left behind, whatever ends it."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.settimeout(timeout)
    server.bind(f"\0{name}")
    server.listen(1)
    return server


def send(
    name: str,
    tensors: Mapping[str, Buffer],
    timeout: float,
    connected: Callable[[], None] = lambda: None,
    **said: Any,
) -> dict[str, Any]:
    """The receiver's acknowledgement, with the payload bytes that were sent under `bytes`.

    `connected` is called before anything is sent. A receiver asked from then on waits for nobody: if this process ends,
    the connection does.
    """
    digest, sent = hashlib.sha256(), 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as wire:
        wire.settimeout(timeout)
        wire.connect(f"\0{name}")
        connected()
        sizes = [[tensor, len(memoryview(data).cast("B"))] for tensor, data in tensors.items()]
        wire.sendall(json.dumps({"tensors": sizes, **said}).encode() + b"\n")
        for data in tensors.values():
            raw = memoryview(data).cast("B")
            wire.sendall(raw)
            digest.update(raw)
            sent += len(raw)
        told: dict[str, Any] = json.loads(_line(wire))
    if told.get("sha256") != digest.hexdigest():
        raise BadTransfer(f"the acknowledgement must name the bytes sent (got {told.get('sha256')})")
    return {**told, "bytes": sent}


def receive(server: socket.socket) -> tuple[socket.socket, dict[str, Any], dict[str, bytearray]]:
    """The sender, which waits for `acknowledge`; what it said of the tensors; copies of all of them."""
    wire, _ = server.accept()
    try:
        wire.settimeout(server.gettimeout())
        said = json.loads(_line(wire))
        sizes = said.pop("tensors")
        return wire, said, {tensor: _exactly(wire, nbytes, tensor) for tensor, nbytes in sizes}
    except BaseException:
        wire.close()
        raise


def acknowledge(wire: socket.socket, tensors: Mapping[str, Buffer], **facts: Any) -> None:
    """Tells the sender which bytes have been copied, and ends the transfer."""
    with wire:
        wire.sendall(json.dumps({"sha256": digest_of(tensors), **facts}).encode() + b"\n")


def digest_of(tensors: Mapping[str, Buffer]) -> str:
    """SHA-256 over the bytes of all tensors in their order."""
    digest = hashlib.sha256()
    for data in tensors.values():
        digest.update(data)
    return digest.hexdigest()


def _line(wire: socket.socket) -> bytes:
    """Read byte by byte: what follows the line is payload."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = wire.recv(1)
        if not byte or len(line) > LINE_LIMIT:
            raise BadTransfer(f"a line must end (got {len(line)} bytes, then {'more' if byte else 'the end'})")
        line += byte
    return bytes(line)


def _exactly(wire: socket.socket, nbytes: int, tensor: str) -> bytearray:
    data, filled = bytearray(nbytes), 0
    while filled < nbytes:
        got = wire.recv_into(memoryview(data)[filled:])
        if not got:
            raise BadTransfer(f"{tensor} must have {nbytes} bytes (got {filled}, then the sender ended)")
        filled += got
    return data

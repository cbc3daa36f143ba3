"""A byte stream between two children, with both ends counting what passes.

A message is a header of fixed size, the tensor's name, and its bytes; the header is the declared framing.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

HEADER = struct.Struct("!HQ")  # length of the name, number of bytes
PATIENCE = 60.0


def framing(name: str) -> int:
    """The bytes that a message of this name costs beside its payload."""
    return HEADER.size + len(name.encode())


@dataclass
class Wire:
    """One end of a connection. `total` counts every byte, `payload` the tensors' alone."""

    stream: socket.socket
    total: int = 0
    payload: int = 0

    @staticmethod
    def listening() -> tuple[socket.socket, str]:
        """A socket to accept on, and the name to connect to."""
        server = socket.socket(socket.AF_UNIX)
        name = f"\0colocert-{os.getpid()}-{os.urandom(4).hex()}"
        server.bind(name)
        server.listen(1)
        server.settimeout(PATIENCE)
        return server, name

    @staticmethod
    def accepted(server: socket.socket) -> Wire:
        stream, _ = server.accept()
        stream.settimeout(PATIENCE)
        return Wire(stream)

    @staticmethod
    def connected(name: str) -> Wire:
        stream = socket.socket(socket.AF_UNIX)
        stream.settimeout(PATIENCE)
        stream.connect(name)
        return Wire(stream)

    def send(self, name: str, data: bytes) -> None:
        """One tensor."""
        head = HEADER.pack(len(name.encode()), len(data)) + name.encode()
        self.stream.sendall(head + data)
        self.total += len(head) + len(data)
        self.payload += len(data)

    def receive(self) -> tuple[str, bytes] | None:
        """The next tensor; None where the other end is done."""
        head = self._exactly(HEADER.size)
        if not head:
            return None
        length, nbytes = HEADER.unpack(head)
        name = self._exactly(length).decode()
        data = self._exactly(nbytes)
        self.payload += len(data)
        return name, data

    def close(self) -> None:
        self.stream.close()

    def _exactly(self, count: int) -> bytes:
        parts, left = [], count
        while left:
            part = self.stream.recv(min(left, 1 << 20))
            if not part:
                assert left == count, f"a message must be whole (got {count - left} of {count} bytes)"
                return b""
            parts.append(part)
            left -= len(part)
        self.total += count
        return b"".join(parts)

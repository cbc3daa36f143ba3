"""What the suite sends to an engine under test: tensors whose bytes tell what they are, in memory that it takes back.

Knows the tensors of a base and of an adapter, and the safetensors format as far as writing needs it. Does not know
what an engine makes of them.

Transport memory is the sender's: once a call is acknowledged, or has failed, the suite overwrites it. Bytes that were
not copied out before are then no tensor of anything.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

BASE_TENSORS = ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight")
ADAPTER_TENSORS = (
    "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight",
    "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight",
)
NBYTES = 128
"""Bytes of every tensor."""

NOISE = b"\xee"


class What(NamedTuple):
    """What some bytes were sent as: a tensor of the base, or of an adapter by name, of a version."""

    kind: str
    name: str
    version: int
    tensor: str


class Sent:
    """Every tensor that was sent, by its bytes."""

    def __init__(self) -> None:
        self._known: dict[bytes, What] = {}

    def make(self, what: What) -> bytearray:
        """New transport memory with the bytes of that tensor."""
        text = f"{what.kind} {what.name} {what.version} {what.tensor}".encode()
        data = text.ljust(NBYTES, b".")
        self._known[data] = what
        return bytearray(data)

    def what(self, data: Any) -> What | None:
        """What these bytes were sent as, if ever."""
        return self._known.get(bytes(data))


class Wire(Mapping[str, memoryview]):
    """Tensors by name in transport memory. Taking the memory of one is a fault point of the suite's."""

    def __init__(self, buffers: Mapping[str, bytearray], passing: Callable[[], Any]) -> None:
        self._buffers, self._passing = dict(buffers), passing

    def __getitem__(self, name: str) -> memoryview:
        with self._passing():
            return memoryview(self._buffers[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffers)

    def __len__(self) -> int:
        return len(self._buffers)

    def take_back(self) -> None:
        """The memory is used for something else."""
        for buffer in self._buffers.values():
            buffer[:] = NOISE * len(buffer)


class AdapterFile:
    """An adapter's tensors in a safetensors file, as bytes of type U8."""

    def __init__(self, path: Path, buffers: Mapping[str, bytearray]) -> None:
        self.path = path
        at, header = 0, {}
        for name, data in buffers.items():
            header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
            at += len(data)
        text = json.dumps(header).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        self._data_at, self._nbytes = 8 + len(text), at
        path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(buffers.values()))

    def take_back(self) -> None:
        """The file is written over in place, as the next sync does: what is still mapped changes."""
        with self.path.open("r+b") as file:
            file.seek(self._data_at)
            file.write(NOISE * self._nbytes)

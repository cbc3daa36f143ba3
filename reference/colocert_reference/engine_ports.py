"""The engine's ports over the doubles of a rig, and adapters read from safetensors files without a library.

Knows where a rig keeps what an engine needs. Does not know what the engine decides.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colocert.rig.engine_rig import EngineRig, Request, Step
from colocert_reference.engine import Engine, EngineSettings


class RigEnginePorts:
    """The strict saver as memory, the wire or a file as transport, the rig's forward as model."""

    def __init__(self, rig: EngineRig) -> None:
        self.rig = rig

    def pause(self, tag: str) -> None:
        self.rig.saver.pause(tag)

    def resume(self, tag: str) -> None:
        self.rig.saver.resume(tag)

    async def write_base(self, source: Mapping[str, Any]) -> None:
        for name in source:
            self.rig.write(name, source[name])
            await self.rig.pace()

    async def copied(self, source: Mapping[str, Any] | Path) -> Mapping[str, bytes]:
        if isinstance(source, Path):
            return from_file(source)
        copies = {}
        for name in source:
            copies[name] = bytes(source[name])
            await self.rig.pace()
        return copies

    async def compute(self, request: Request, adapter: Mapping[str, Any] | None, cached: int | None) -> Step:
        return await self.rig.step(request, adapter=adapter, cached=cached)

    def done(self, request: Request) -> None:
        """A rig keeps nothing for a request."""


def from_file(path: Path) -> dict[str, bytes]:
    """The tensors of a safetensors file as bytes, in the file's own layout. Raises `ValueError` for a cut one."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if 8 + length + end > len(data):
            raise ValueError(f"{path.name}: {name} must end within the file (got {len(data)} bytes)")
        tensors[name] = data[8 + length + begin : 8 + length + end]
    return tensors


def settings_of(rig: EngineRig) -> EngineSettings:
    """What the rig's configuration and the claims say of the engine."""
    return EngineSettings(
        tags=frozenset(rig.config.engine_sizes),
        lora=rig.config.lora,
        mirror=rig.config.engine_mirror,
        base_requests=rig.claims.base_requests_in_lora_mode,
    )


def engine(rig: EngineRig) -> Engine:
    """The reference's engine on a rig."""
    return Engine(RigEnginePorts(rig), settings_of(rig))

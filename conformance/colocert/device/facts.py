"""What a preflight saw of a machine. Plain values, so that a check can be asked about a machine that is not here.

Knows no rule and asks nobody: `gather` fills these in, `preflight` judges them. None is "could not be told". Nothing
here identifies a single device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Driver:
    """libcuda. `status` is cuInit's, None where the library does not load; `waited` is in seconds."""

    status: int | None
    said: str = ""
    version: str = ""
    waited: float = 0.0


@dataclass(frozen=True)
class Card:
    """One visible device. `memory` is torch's total; `used` and `foreign` (processes) are NVML's, before our use."""

    name: str
    capability: tuple[int, int]
    memory: int
    used: int | None = None
    foreign: int | None = None
    mig: bool | None = None
    addressing: str = ""


@dataclass(frozen=True)
class Torch:
    """The installed torch, and the CUDA it was built for. `matmul` is empty where the product was exact."""

    version: str
    cuda: str
    archs: tuple[str, ...]
    matmul: str = ""


@dataclass(frozen=True)
class Saver:
    """torch_memory_saver. `library` is the preload library of a child; `freed` is what its pause of 64 MiB freed.

    One entry a device in `freed`; `said` is the first error of a child, and empty where every hook was live. `pinned`
    is what a child pinned beyond its limit, 0 where it could not or need not.
    """

    version: str
    library: str = ""
    freed: tuple[int, ...] = ()
    said: str = ""
    pinned: int = 0


@dataclass(frozen=True)
class Host:
    """The machine. `memlock` in bytes, -1 for unlimited. `allocator` holds torch's allocator variables as they are set.

    `coherent` is the driver's mode for device memory on Grace (`driver` is CDMM), `hbm_nodes` the NUMA nodes that have
    memory and no CPU: device memory that the host counts as its own.
    """

    arch: str
    page_size: int
    memlock: int
    memory: int = 0
    allocator: Mapping[str, str] = field(default_factory=dict)
    coherent: str = ""
    hbm_nodes: int = 0
    python: str = ""


@dataclass(frozen=True)
class Facts:
    """A machine, as a preflight saw it. `nvml` is empty where NVML answered, else why not."""

    host: Host
    driver: Driver | None = None
    nvml: str = ""
    cards: tuple[Card, ...] = ()
    torch: Torch | None = None
    torch_said: str = ""
    saver: Saver | None = None

"""The device that a child will run on, and the environment it must start with.

Knows the preload library, the library path and the allocator's variables. Does not start anything.

The environment is built from scratch: of the parent's it keeps the names below, never `LD_PRELOAD`, a `TMS_*` setting
or an allocator configuration, which would decide what a row measures without being seen.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from colocert.device.build import build
from colocert.device.errors import ExpandableSegments, NoSaver

DeviceName = Literal["host", "cuda"]
PRELOAD = "torch_memory_saver_hook_mode_preload_cu13.abi3.so"
ALLOCATOR_CONF = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
DEVICE_ORDER = "PCI_BUS_ID"
"""NVML's order. CUDA's own begins with the fastest device, and a number would mean two things on a mixed machine."""

SOURCE_ROOT = Path(__file__).parents[2]

_KEPT = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR", "VIRTUAL_ENV", "CC"),
        *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG"),
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "HF_HOME", "LOCAL_RANK"),
    }
)
_KEPT_PREFIXES = ("LC_", "XDG_", "PYTHON", "NCCL_", "GLOO_", "COLOCERT_")


@dataclass(frozen=True)
class Machine:
    """One device. Children started on the same `ledger` share it; without one each child has a device of its own.

    `capacity`, `ledger`, `sticky_pinned` and `snapshot` shape the stand-in and mean nothing on `cuda`. `preload` and
    `libraries` are found where they are None; the rows on a broken start pass their own.
    """

    device: DeviceName = "host"
    capacity: int = 1 << 30
    ledger: Path | None = None
    sticky_pinned: bool = False
    snapshot: bool = False
    preload: Path | Literal["none"] | None = None
    libraries: Path | None = None

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The whole environment of a child."""
        extra = dict(extra or {})
        refuse_expandable_segments(os.environ)
        refuse_expandable_segments(extra)
        libraries = self.libraries or (build().folder if self.device == "host" else _pip_cuda())
        env = {name: value for name, value in os.environ.items() if _kept(name)}
        env["PYTHONPATH"] = os.pathsep.join(_distinct(str(SOURCE_ROOT), *os.environ.get("PYTHONPATH", "").split(":")))
        env["LD_LIBRARY_PATH"] = ":".join(
            _distinct(str(libraries or ""), *os.environ.get("LD_LIBRARY_PATH", "").split(":"))
        )
        env["COLOCERT_DEVICE"] = self.device
        if self.preload != "none":
            env["LD_PRELOAD"] = str(self.preload or find_preload())
        if self.device == "host":
            env.update(self._standin(libraries))
        else:
            env["CUDA_DEVICE_ORDER"] = DEVICE_ORDER
        return {**env, **extra}

    def _standin(self, libraries: Path | None) -> dict[str, str]:
        env = {
            "COLOCERT_STANDIN_CAPACITY": str(self.capacity),
            "COLOCERT_STANDIN_LIBRARIES": str(libraries),
            "CUDA_VISIBLE_DEVICES": "",  # a GPU of this machine has no part in it
        }
        if self.ledger is not None:
            env["COLOCERT_STANDIN_LEDGER"] = str(self.ledger)
        if self.sticky_pinned:
            env["COLOCERT_STANDIN_PINNED"] = "sticky"
        if self.snapshot:
            env["COLOCERT_STANDIN_FORK"] = "snapshot"
        return env

    @classmethod
    def of_this_process(cls) -> Machine:
        """The device that this child itself runs on, for a sibling."""
        env = os.environ
        ledger = env.get("COLOCERT_STANDIN_LEDGER")
        return cls(
            device="cuda" if env.get("COLOCERT_DEVICE") == "cuda" else "host",
            capacity=int(env.get("COLOCERT_STANDIN_CAPACITY", 1 << 30)),
            ledger=Path(ledger) if ledger else None,
            sticky_pinned=env.get("COLOCERT_STANDIN_PINNED") == "sticky",
            snapshot=env.get("COLOCERT_STANDIN_FORK") == "snapshot",
        )


def find_preload() -> Path:
    """The saver's preload library for CUDA 13, found without importing the package, which needs torch."""
    spec = importlib.util.find_spec("torch_memory_saver")
    for folder in (Path(p).parent for p in (spec.submodule_search_locations or ())) if spec else ():
        if (folder / PRELOAD).exists():
            return folder / PRELOAD
    raise NoSaver(
        "Rows on real memory run over torch_memory_saver 0.0.10",
        got=f"a package without {PRELOAD}" if spec else "no package of that name",
        fix="`pip install torch_memory_saver==0.0.10`.",
    )


def refuse_expandable_segments(env: Mapping[str, str]) -> None:
    """Raises where an allocator variable names expandable segments, in whatever spelling and with whatever value.

    The saver itself looks for one spelling in one of the two variables, and frees nothing with any other.
    """
    for name in ALLOCATOR_CONF:
        if "expandable_segments" in env.get(name, "").lower():
            raise ExpandableSegments(
                f"{name} must not mention expandable_segments: the saver frees nothing with them",
                got=f"{env[name]!r}",
                fix=f"Unset {name} for this run.",
            )


def _kept(name: str) -> bool:
    standin = name.startswith("COLOCERT_STANDIN_")
    return not standin and (name in _KEPT or name.startswith(_KEPT_PREFIXES))


def _distinct(*parts: str) -> list[str]:
    return list(dict.fromkeys(part for part in parts if part))


def _pip_cuda() -> Path | None:
    """The folder of the pip-installed CUDA 13 runtime, which the preload library does not look for by itself."""
    for entry in sys.path:
        folder = Path(entry) / "nvidia" / "cu13" / "lib"
        if folder.is_dir():
            return folder
    return None

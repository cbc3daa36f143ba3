"""colocert: a conformance suite for the colocated LoRA lifecycle.

The public surface: what an implementation needs to describe itself and to be driven. Imports no torch, Ray or
matplotlib; its names are imported when they are first asked for, so that a pytest run without `--impl` pays for none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colocert.live import record as record
    from colocert.rig import (
        Claims,
        Config,
        ContractError,
        GroupGone,
        Implementation,
        InjectedFault,
        Region,
        Rig,
        SaverFatal,
        SaverRefused,
        Trainer,
    )

__version__ = "0.1.0"

__all__ = [
    "Claims",
    "Config",
    "ContractError",
    "GroupGone",
    "Implementation",
    "InjectedFault",
    "Region",
    "Rig",
    "SaverFatal",
    "SaverRefused",
    "Trainer",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """The names of `__all__`, from `colocert.rig`; and `record`, which records a real run and is callable."""
    if name == "record":
        return importlib.import_module("colocert.record")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("colocert.rig"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

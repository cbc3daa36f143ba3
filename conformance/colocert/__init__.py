"""colocert: a conformance suite for the colocated LoRA lifecycle.

The public surface: what an implementation needs to describe itself and to be driven. Imports no torch, Ray or
matplotlib. `colocert.record(...)`, which records a real run, is imported when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from colocert.live import record as record

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
    if name == "record":
        from importlib import import_module

        return import_module("colocert.record")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

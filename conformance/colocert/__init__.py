"""colocert: a conformance suite for the colocated LoRA lifecycle.

The public surface: what an implementation needs to describe itself and to be driven. Imports no torch, Ray or
matplotlib.
"""

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

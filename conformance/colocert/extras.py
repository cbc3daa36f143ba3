"""Which optional packages are installed, without importing them.

Knows where they are looked for. Does not know what anyone does with them.
"""

from __future__ import annotations

import importlib.util


def has_torch() -> bool:
    """Whether torch is installed. A profile that works on tensors is not claimed, or not run, without it."""
    return importlib.util.find_spec("torch") is not None

"""Runs before anything else in a child of row G01.

COLOCERT_TEST_LATE_PRELOAD    is put into LD_PRELOAD of the process that is already running
COLOCERT_TEST_NO_PROBE        removes the launcher's proof that the hook is live (the seeded fault)
"""

from __future__ import annotations

import ctypes
import os

if late := os.environ.get("COLOCERT_TEST_LATE_PRELOAD"):
    os.environ["LD_PRELOAD"] = late

if os.environ.get("COLOCERT_TEST_NO_PROBE"):
    from colocert.device import probe as probing
    from colocert.device.hook import Hook
    from colocert.device.machine import find_preload

    def believe(device: str) -> Hook:
        """A hook of whatever is loaded: every call of it returns normally."""
        for library in ("libcuda.so.1", "libcudart.so.13"):
            ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
        return Hook(find_preload())

    probing.probe = believe

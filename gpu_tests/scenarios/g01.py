"""G01: a child that starts under a hook that may not be live.

`site/sitecustomize.py`, on a child's PYTHONPATH, does before the launcher's module runs what a careless program does.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from colocert.device.machine import find_preload
from gpu_tests.harness.port import Port

SITE = Path(__file__).parent / "site"


def frees(port: Port, fault: str | None) -> dict[str, Any]:
    """What a release frees once the launcher has let the child through."""
    port.alloc("default", 4 * port.unit)
    return port.moved(lambda: port.pause("default"))


def library_that_misses_its_runtime(folder: Path) -> Path:
    """A copy of the preload library that needs a libcudart of a version that nobody has.

    So it finds none whatever is on the library path and in the loader's cache, as on a machine without a toolkit.
    """
    original = find_preload()
    copy = folder / original.name
    changed, count = re.subn(rb"libcudart\.so\.1\d\0", b"libcudart.so.99\0", original.read_bytes())
    assert count, f"{original} names no libcudart"
    copy.write_bytes(changed)
    return copy

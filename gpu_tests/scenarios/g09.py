"""G09: what the saver does with a call in the wrong state. One child a case, since most of them end it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from colocert.device.errors import DeviceOutOfMemory
from gpu_tests.harness.port import Port


def _two_tags(port: Port) -> None:
    port.alloc("a", port.unit, backup=True)
    port.alloc("b", port.unit, backup=True)


def pause_twice(port: Port) -> None:
    _two_tags(port)
    port.pause("a")
    port.pause("a")


def pause_all_after_one(port: Port) -> None:
    _two_tags(port)
    port.pause("a")
    port.pause(None)


def resume_active(port: Port) -> None:
    _two_tags(port)
    port.resume("a")


def resume_all_with_some_active(port: Port) -> None:
    _two_tags(port)
    port.pause("a")
    port.resume(None)


def resume_that_does_not_fit(port: Port) -> None:
    """Another allocation of this process takes the room."""
    free = port.device.free_bytes() // 2
    port.alloc_raw("a", free + port.device.granule)
    port.pause("a")
    port.alloc_raw(None, free)
    port.resume("a")


def unknown_tag(port: Port) -> dict[str, Any]:
    """Returns, and moves nothing."""
    _two_tags(port)
    moved = [port.moved(lambda: port.pause("nobody")), port.moved(lambda: port.resume("nobody"))]
    return {"moved": [one["free"] for one in moved]}


def region_of_another_thread(port: Port) -> dict[str, Any]:
    """What a thread allocates inside another's region is captured by no tag."""
    with port.device.hook.region("a", True):
        worker = threading.Thread(target=lambda: port.device.hook.malloc(port.unit))
        worker.start()
        worker.join()
    return {"moved": [port.moved(lambda: port.device.pause("a"))["free"]]}


def allocation_that_does_not_fit(port: Port) -> dict[str, Any]:
    """Refused, and the process goes on."""
    free = port.device.free_bytes()
    with contextlib.suppress(DeviceOutOfMemory):
        port.alloc_raw("a", free + port.device.granule)
        return {"moved": ["it fitted"]}
    return {"moved": [port.device.free_bytes() - free]}


def bad_setting(port: Port) -> None:
    """A value that the library does not accept ends the process at the first use; the row's child does not get here."""


def touch_of_released(port: Port) -> None:
    block = port.alloc("a", port.unit, backup=True)
    port.pause("a")
    port.device.touch(block)


Case = tuple[Callable[[Port], Any], str, str]
TABLE: tuple[Case, ...] = (  # what a child does, how it ends on the stand-in, and on a GPU
    (pause_twice, "hook abort", "hook abort"),
    (pause_all_after_one, "hook abort", "hook abort"),
    (resume_active, "hook abort", "hook abort"),
    (resume_all_with_some_active, "hook abort", "hook abort"),
    (resume_that_does_not_fit, "oom in resume", "oom in resume"),
    (unknown_tag, "ok", "ok"),
    (region_of_another_thread, "ok", "ok"),
    (allocation_that_does_not_fit, "ok", "ok"),
    (bad_setting, "hook abort", "hook abort"),
    (touch_of_released, "SIGSEGV", "failed"),
)


def case(port: Port, fault: str | None, name: str) -> Any:
    """Runs one case under the saver, or under a wrapper that has the fault."""
    port.tell("begun")
    if fault == "swallows":
        _swallow(port)
    elif fault == "raises":
        _raise(port)
    return next(body for body, *_ in TABLE if body.__name__ == name)(port)


def _swallow(port: Port) -> None:
    """A wrapper that takes a pause of what is released for none."""
    pause, released = port.device.pause, set[str | None]()

    def forgiving(tag: str | None = None) -> None:
        if tag not in released:
            pause(tag)
        released.add(tag)

    port.device.pause = forgiving  # type: ignore[method-assign]


def _raise(port: Port) -> None:
    """A saver that has learnt to raise. The table is then what has to change."""
    pause, released = port.device.pause, set[str | None]()

    def raising(tag: str | None = None) -> None:
        if tag in released:
            raise RuntimeError(f"{tag} is released already")
        pause(tag)
        released.add(tag)

    port.device.pause = raising  # type: ignore[method-assign]


BAD_ENVIRONMENT = {"TMS_INIT_ENABLE": "maybe"}

"""G24: a release while the buffer is being written. The `cuda` half has not run on a GPU."""

from __future__ import annotations

import threading
import time
from typing import Any

from gpu_tests.harness.port import Port

BUSY = 0.2
CLOCK = 2e9  # cycles a second, about; that the kernel is under way is checked
LAST = 7


def release_under_work(port: Port, fault: str | None) -> dict[str, Any]:
    """Starts the work, releases at once, wakes, and looks at what the work wrote."""
    port.settle()
    block = port.alloc("default", 4 * port.unit, backup=True, fill=1)
    wanted = port.alloc(None, 4 * port.unit, fill=LAST)
    expected = port.device.checksum(wanted)
    work = _Stream(port, block) if port.device.name == "cuda" else _Worker(port, block)
    under_way = not work.done()
    begun = time.monotonic()
    # A GPU's pause has to wait by itself; of a Python thread it cannot know, so on `host` the row's own code waits.
    if port.device.name == "host" and fault != "no-synchronise":
        work.wait()
    port.pause("default")
    done, waited = work.done(), time.monotonic() - begun
    work.wait()
    port.resume("default")
    return {
        "under way": under_way,
        "done": done,
        "waited": waited,
        "expected": expected,
        "contents": port.device.checksum(block),
    }


class _Worker:
    """A thread that holds the buffer as a kernel would: it writes now, and again at its end."""

    def __init__(self, port: Port, block: Any) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(port, block))
        self._thread.start()

    def _work(self, port: Port, block: Any) -> None:
        port.device.fill(block, 3)
        time.sleep(BUSY)
        port.device.fill(block, LAST)
        self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        self._thread.join()


class _Stream:
    """A kernel that is busy for 200 ms on a stream of its own, a write behind it, and an event behind both."""

    def __init__(self, port: Port, block: Any) -> None:
        import torch

        self._torch = torch
        stream = torch.cuda.Stream()
        self._event = torch.cuda.Event()
        torch.cuda._sleep(1)
        block.tensor.fill_(1)  # a kernel is loaded at its first use, and loading may wait for those that run
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(BUSY * CLOCK))
            block.tensor.fill_(LAST)
            self._event.record(stream)

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._torch.cuda.synchronize()

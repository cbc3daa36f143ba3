"""The most that a process had on the device while something ran.

The stand-in keeps a high-water mark of the process, which is exact. On a GPU a thread samples the device's free bytes
every 20 ms; that half has not run.
"""

from __future__ import annotations

import threading

from gpu_tests.harness.port import Port

TICK = 0.02


class Peak:
    """A context: `above` is how many more bytes were in use inside it than at its start, at the most."""

    def __init__(self, port: Port) -> None:
        self._device = port.device
        self._done = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self.above = 0

    def __enter__(self) -> Peak:
        if self._device.name == "host":
            self._device.hook.runtime.colocert_standin_reset_own_peak()
            self._start = self._device.own_bytes() or 0
        else:
            self._start = self._device.hook.free_bytes()
            self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._device.name == "host":
            self.above = self._device.hook.standin("own_peak") - self._start
        else:
            self._done.set()
            self._sampler.join()
            self._look()

    def _sample(self) -> None:
        while not self._done.wait(TICK):
            self._look()

    def _look(self) -> None:
        self.above = max(self.above, self._start - self._device.hook.free_bytes())  # waits for no stream

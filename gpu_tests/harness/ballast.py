"""Device memory that no pause moves: a plain process without the hook takes it until a given number of bytes is free.

Run as a script it takes the memory, says what is then free, and holds it until its standard input ends. One cudaMalloc,
then granules one by one: with its own context in the account the wall lies within a granule of where it was wanted.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from colocert.device import Machine
from colocert.device.hook import GRANULE


class Ballast:
    """The process, from outside. `free` is what it left on the device."""

    def __init__(self, machine: Machine, free: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(free)],
            env=replace(machine, preload="none").environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the ballast must say what is free (it ended with {self._process.wait()})"
        self.free: int = json.loads(line)["free"]

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def _hold(target: int) -> None:
    runtime = ctypes.CDLL("libcudart.so.13")
    runtime.cudaMalloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]

    def free_bytes() -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        status = runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
        assert not status, f"cudaMemGetInfo returned {status}"
        return free.value

    def take(nbytes: int) -> None:
        address = ctypes.c_void_p()
        status = runtime.cudaMalloc(ctypes.byref(address), nbytes)
        assert not status, f"cudaMalloc of {nbytes} bytes returned {status}"

    runtime.cudaSetDevice(0)
    if (first := (free_bytes() - target) // GRANULE - 8) > 0:
        take(first * GRANULE)
    while free_bytes() - target >= GRANULE:
        take(GRANULE)
    print(json.dumps({"free": free_bytes()}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _hold(int(sys.argv[1]))

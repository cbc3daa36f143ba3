"""The device of a live pair: where its processes start, and what the suite measures on it from outside.

Knows the kit's device port. Does not know an implementation, scenarios or rules.

On `host` it is the stand-in, read through its ledger. On `cuda` it is the GPU: a process of the suite's own stays on it
and says how much is free; its own bytes are the same in every measurement.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from colocert.device import Child, DeviceError, Machine, Stage, run, start
from colocert.device import ledger as device_ledger
from colocert.device.hook import GRANULE
from colocert.device.link import LinkClosed

SETTLE = 2.0
"""Seconds that freed bytes may take to show: a driver may answer before it has given them back."""

TORCH_SEGMENT = 20 << 20
"""What torch's allocator takes of a GPU for an allocation of 1 to 10 MiB."""

_FOREVER = 7 * 86400.0


class NoLiveDevice(Exception):
    """This machine has not the device that was asked for; the text says why."""


def device_name() -> str:
    """`host` or `cuda`, by `COLOCERT_DEVICE`. Raises `NoLiveDevice` for another name."""
    name = os.environ.get("COLOCERT_DEVICE", "") or "host"
    if name not in ("host", "cuda"):
        raise NoLiveDevice(f"COLOCERT_DEVICE must be host or cuda (got {name!r})")
    return name


@functools.cache
def lacking(name: str) -> str:
    """Why this machine has no such device, found by a process that starts on it; empty where it has one."""
    try:
        outcome = run(meter, machine=Machine(device="cuda" if name == "cuda" else "host"), deadline=60.0, once=True)
    except DeviceError as error:
        return f"device {name}: {' '.join(str(error).split())}"
    if outcome.kind == "ok":
        return ""
    last = (outcome.traceback.strip().splitlines() or [outcome.last_words or outcome.kind])[-1]
    return f"device {name}: a process on it ended with {last}"


class LiveDevice:
    """One device for all processes of a pair. `capacity` limits the stand-in and means nothing on `cuda`."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name, self.capacity = name, capacity
        self.granule = GRANULE if name == "host" else TORCH_SEGMENT
        self._folder = Path(tempfile.mkdtemp(prefix="colocert-live-"))
        self.ledger = (self._folder / "ledger").resolve()
        self.machine = Machine(device="cuda" if name == "cuda" else "host", capacity=capacity, ledger=self.ledger)
        self._meter: Child | None = None

    def free(self) -> int:
        """Bytes free on the whole device."""
        if self.name == "cuda":
            return int(self._ask("free"))
        return device_ledger.read(self.ledger).free if self.ledger.exists() else self.capacity

    def settled(self, wanted: Callable[[int], bool]) -> int:
        """Free bytes once they are as wanted, or after `SETTLE` seconds."""
        end = time.monotonic() + SETTLE
        while not wanted(free := self.free()) and time.monotonic() < end:
            time.sleep(0.01)
        return free

    def held(self, pids: Iterable[int]) -> dict[int, int]:
        """Device bytes by process; processes of which the device does not tell are left out."""
        if self.name == "cuda":
            told = self._ask("processes")
            return {pid: int(told[str(pid)]) for pid in pids if str(pid) in told}
        holders = device_ledger.read(self.ledger).holders if self.ledger.exists() else ()
        by_pid = {h.pid: h.used for h in holders if h.alive}
        return {pid: by_pid.get(pid, 0) for pid in pids}

    def close(self) -> None:
        """Ends the suite's own process and removes the ledger."""
        if self._meter is not None:
            with self._meter as ending, contextlib.suppress(LinkClosed):
                ending.tell(None)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ask(self, what: str) -> Any:
        if self._meter is None:
            self._meter = start(meter, machine=self.machine, deadline=_FOREVER, own_group=False)
        self._meter.tell(what)
        return self._meter.listen(60.0)


def meter(stage: Stage, once: bool = False) -> None:
    """The suite's process on the device: says what is free, and who holds what, until it is told to leave."""
    device: Any = stage.device
    while not once and (message := stage.listen(_FOREVER)) is not None:
        stage.tell(device.free_bytes() if message == "free" else device.processes())

"""G18: a trainer that is killed at a point of the hand-off, the engine beside it, and the trainer's next start."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from colocert.device.ledger import start_time
from gpu_tests.harness.port import Port
from gpu_tests.scenarios.engine import Engine
from gpu_tests.scenarios.trainer import GRADS, WEIGHTS, Trainer

POINTS = ("before the release", "gradients released", "all released", "weights taken again", "all taken again")
UNITS = 8


def trainer(port: Port, fault: str | None, home: str, until: str) -> None:
    """Wipes what dead predecessors left, does one hand-off and stops at a point, where it waits to be killed."""
    wiped = [] if fault == "wipes-at-exit-only" else wipe_stale(Path(home))
    port.device.hook.set_disk_folder(Path(home, f"{os.getpid()}-{start_time(os.getpid())}"))
    held = Trainer(port, units=UNITS, backup="disk")
    steps: dict[str, Callable[[], None]] = {
        "before the release": lambda: None,
        "gradients released": held.release_gradients,
        "all released": held.release_rest,
        "weights taken again": lambda: port.resume(WEIGHTS),
        "all taken again": lambda: port.resume(GRADS),
    }
    for point, step in steps.items():
        step()
        if point == until:
            port.tell({"wiped": wiped, "own": port.device.own_bytes()})
            port.listen()


def wipe_stale(home: Path) -> list[str]:
    """Removes the folders of processes that are gone; a folder is named by its process's pid and start time."""
    wiped = []
    for folder in sorted(home.iterdir()) if home.exists() else []:
        pid, started = (int(part) for part in folder.name.split("-"))
        if start_time(pid) != started:
            shutil.rmtree(folder)
            wiped.append(folder.name)
    return wiped


def engine(port: Port, fault: str | None) -> None:
    """Obeys: sleeps, waits for bytes to come back, wakes and answers."""
    held = Engine(port, units=2 * UNITS)
    port.tell({"tokens": held.tokens(), "free": port.device.free_bytes()})
    while call := port.listen():
        if call["call"] == "sleep":
            held.sleep()
            port.tell({"free": port.device.free_bytes()})
        elif call["call"] == "until free":
            begun = time.monotonic()
            while port.device.free_bytes() < call["bytes"] and time.monotonic() - begun < call["seconds"]:
                time.sleep(0.01)
            port.tell({"free": port.device.free_bytes(), "lag": time.monotonic() - begun})
        elif call["call"] == "wake":
            held.wake()
            port.tell({"tokens": held.tokens()})

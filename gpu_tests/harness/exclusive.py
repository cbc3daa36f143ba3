"""Whether anybody is on the device who does not belong to the row.

On `host` the row has a device of its own, and its ledger names who holds memory. On `cuda` NVML says it of every device
of the run's world, as far as it shows processes; the parent makes no CUDA context for that. NVML counts devices by bus
id, and `Machine` has CUDA do the same. The `cuda` half has not run on a GPU.
"""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

from colocert.device import Machine, ledger

QUIET = 1 << 30


def foreign(machine: Machine, patience: float) -> str:
    """Who holds device memory now, in words; empty where nobody does. Waits for what is just going away."""
    look = _on_gpu if machine.device == "cuda" else _on_standin
    until = time.monotonic() + patience
    while found := look(machine):
        if time.monotonic() > until:
            return found
        time.sleep(0.02)
    return ""


def _on_standin(machine: Machine) -> str:
    if machine.ledger is None or not machine.ledger.exists():
        return ""
    alive = [holder for holder in ledger.read(machine.ledger).holders if holder.alive]
    return ", ".join(f"process {holder.pid} holds {holder.used} bytes" for holder in alive)


def _on_gpu(machine: Machine) -> str:
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return "nvidia-ml-py is not installed, so nothing says who is on the GPU"
    try:
        nvml.nvmlInit()
        cards = _cards(nvml, int(os.environ.get("COLOCERT_WORLD", "1")))
        return next(filter(None, (_busy(nvml, number, card) for number, card in enumerate(cards))), "")
    except nvml.NVMLError as error:
        return f"NVML does not say who is on the GPU: {error}"


def _busy(nvml: Any, number: int, card: Any) -> str:
    try:
        running = [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(card)]
    except nvml.NVMLError:
        running = []  # hidden: the bytes in use are left to tell
    if running:
        return f"processes {running} are on GPU {number}"
    # Version 2 leaves the driver's own reserve out, which on a B300 is 0.9 GiB by itself.
    used = nvml.nvmlDeviceGetMemoryInfo(card, version=nvml.nvmlMemory_v2).used
    return f"{used} bytes of GPU {number} are in use" if used > QUIET else ""


def _cards(nvml: Any, world: int) -> list[Any]:
    """The devices that a run of that world uses, in CUDA's order."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(world)]
    return [_card(nvml, name.strip()) for name in names[:world]]


def _card(nvml: Any, name: str) -> Any:
    """A device by its number, or by its UUID, which CUDA takes shortened too."""
    if name.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    for number in range(nvml.nvmlDeviceGetCount()):
        card = nvml.nvmlDeviceGetHandleByIndex(number)
        if str(nvml.nvmlDeviceGetUUID(card)).startswith(name):
            return card
    return nvml.nvmlDeviceGetHandleByUUID(name)

"""Whether anybody is on the device who does not belong to the row.

On `host` the row has a device of its own, and its ledger names who holds memory. On `cuda` NVML says it, as far as it
shows processes; the parent makes no CUDA context for that. The `cuda` half has not run on a GPU.
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
    nvml.nvmlInit()
    card = _card(nvml)
    if running := [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(card)]:
        return f"processes {running} are on the GPU"
    used = nvml.nvmlDeviceGetMemoryInfo(card).used
    return f"{used} bytes of the GPU are in use" if used > QUIET else ""


def _card(nvml: Any) -> Any:
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if first.startswith("GPU-"):
        return nvml.nvmlDeviceGetHandleByUUID(first)
    return nvml.nvmlDeviceGetHandleByIndex(int(first or "0"))

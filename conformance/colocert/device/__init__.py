"""Real device memory behind one port: a GPU, or the real torch_memory_saver over a stand-in driver in C.

The reader's path: `ports` (what a memory row may do), `launcher` (one child process a scenario), `probe` (the child's
first act: is the hook live), `build` and `csrc` (the stand-in), `ledger` (who holds what), `tensors` (torch tensors on
it), `differential` (the strict saver against the real library). `errors` names what can go wrong.

Nothing here imports torch at import; only `tensors` and the `cuda` port need it.
"""

from colocert.device.errors import (
    BuildFailed,
    DeviceError,
    DeviceOutOfMemory,
    ExpandableSegments,
    HookNotLive,
    LatePreload,
    LibraryNotFound,
    NoCompiler,
    NoPreload,
    NoSaver,
    NothingFreed,
    PreloadNotFound,
    TorchMode,
    WrongRuntime,
)
from colocert.device.launcher import Child, Outcome, run, start
from colocert.device.machine import Machine
from colocert.device.ports import Block, Device, Stage

__all__ = [
    "Block",
    "BuildFailed",
    "Child",
    "Device",
    "DeviceError",
    "DeviceOutOfMemory",
    "ExpandableSegments",
    "HookNotLive",
    "LatePreload",
    "LibraryNotFound",
    "Machine",
    "NoCompiler",
    "NoPreload",
    "NoSaver",
    "NothingFreed",
    "Outcome",
    "PreloadNotFound",
    "Stage",
    "TorchMode",
    "WrongRuntime",
    "run",
    "start",
]

"""Is the saver's hook live in this process? The first act of every child, before torch is imported.

Knows what must be mapped, where `cudaMalloc` must lead, and that a pause must free what it pauses. A hook that is not
live returns normally from every call and frees nothing; here that is an error with a name.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from colocert.device.errors import (
    DeviceOutOfMemory,
    HookNotLive,
    LatePreload,
    NoPreload,
    NothingFreed,
    PreloadNotFound,
    TorchMode,
    WrongRuntime,
)
from colocert.device.hook import GRANULE, Hook
from colocert.device.machine import refuse_expandable_segments

SAVER = "torch_memory_saver"
PROBE_BYTES = 64 << 20
RETRIES, PAUSE = {"host": 0, "cuda": 8}, 0.25
"""On a GPU the device's bytes are counted, and another process may start or end there meanwhile."""
_START_UNDER_US = "Start the process with colocert.device.run or .start, which set it before the process begins."


def probe(device: str) -> Hook:
    """The live hook of this process; raises a `HookNotLive` that says which link is missing."""
    refuse_expandable_segments(os.environ)
    assert "torch" not in sys.modules, "the probe runs before torch is imported"
    preload = _preload()
    hook = Hook(preload)
    _leads_to("cudaMalloc", hook.runtime.cudaMalloc, preload.resolve(), NoPreload)
    if device == "host":
        standin = Path(os.environ.get("COLOCERT_STANDIN_LIBRARIES", "")).resolve()
        _leads_to("cudaMemGetInfo", hook.runtime.cudaMemGetInfo, standin, WrongRuntime)
        _leads_to("cuMemCreate", hook.runtime.cuMemCreate, standin, WrongRuntime)
    else:
        hook.set_device(device_index())  # makes the context that the hook asks for
    _patiently(hook, (lambda: -hook.standin("own_bytes")) if device == "host" else hook.free_bytes, RETRIES[device])
    if device == "host":
        hook.runtime.colocert_standin_reset_own_peak()
    return hook


def device_index() -> int:
    """The number of this process's device among those that it sees."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def refuse_torch_mode() -> None:
    """Raises where the saver package is loaded and is, or at its first use would be, in torch mode.

    Importing megatron-core 0.16.1 sets that mode as a side effect, silently where the saver was not used before.
    """
    package = sys.modules.get(SAVER)
    saver = getattr(package, SAVER, None)
    if saver is None:
        return
    used = saver._impl is not None
    mode = saver._impl._hook_mode if used else saver._impl_ctor_kwargs.get("hook_mode", "preload")
    if mode == "torch":
        raise TorchMode(
            "The saver must run in preload mode",
            got="hook_mode 'torch'" + (", already in use" if used else ", set by an import (megatron-core does)"),
            fix="Import megatron first, then call colocert.device.tensors.start(), then use the saver.",
        )


def _preload() -> Path:
    now = _saver_entry(os.environ.get("LD_PRELOAD", ""))
    at_start = _saver_entry(_environment_at_start().get("LD_PRELOAD", ""))
    mapped = [path for path in _mapped() if SAVER in path.name and "preload" in path.name]
    if mapped and at_start:
        return mapped[0]
    must = "The saver's preload library must be mapped before Python starts"
    if at_start:
        raise PreloadNotFound(must, got=f"LD_PRELOAD={at_start}, which the loader did not load", fix="Check the path.")
    if now:
        raise LatePreload(must, got=f"LD_PRELOAD={now}, set in a process already running", fix=_START_UNDER_US)
    raise NoPreload(must, got="no LD_PRELOAD that names it", fix=_START_UNDER_US)


def _saver_entry(value: str) -> str:
    return next((entry for entry in value.replace(" ", ":").split(":") if SAVER in entry), "")


def _environment_at_start() -> dict[str, str]:
    pairs = Path("/proc/self/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def _mapped() -> list[Path]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [Path(fields[5]) for line in lines if len(fields := line.split(maxsplit=5)) == 6 and fields[5][0] == "/"]


class _DlInfo(ctypes.Structure):
    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


def _leads_to(name: str, function: object, where: Path, error: type[HookNotLive]) -> None:
    """Raises unless the function lies in the library `where`, or in one of the folder `where`."""
    info = _DlInfo()
    address = ctypes.cast(function, ctypes.c_void_p)  # type: ignore[arg-type]  # any foreign function will do
    found = ctypes.CDLL(None).dladdr(address, ctypes.byref(info))
    file = Path(info.file.decode()).resolve() if found and info.file else Path("nowhere")
    if where not in (file, file.parent):
        raise error(
            f"`{name}` must lead into {where}",
            got=f"{file}",
            fix="The preload library goes into LD_PRELOAD, the stand-in first on LD_LIBRARY_PATH: use the launcher.",
        )


def _patiently(hook: Hook, room: Callable[[], int], retries: int) -> None:
    """`_frees`, again where the count is wrong and may have been disturbed."""
    for _ in range(retries):
        try:
            return _frees(hook, room)
        except NothingFreed:
            time.sleep(PAUSE)
    return _frees(hook, room)


def _frees(hook: Hook, room: Callable[[], int]) -> None:
    """Pauses and resumes one block and counts. Less than 64 MiB where the device has less to spare."""
    nbytes = min(PROBE_BYTES, hook.free_bytes() // GRANULE * GRANULE)
    if not nbytes:
        raise DeviceOutOfMemory(GRANULE, 2)
    with hook.region("colocert.probe", backup=False):
        block = hook.malloc(nbytes)
    try:
        _counts(hook, room, nbytes)
    finally:
        hook.free(block)


def _counts(hook: Hook, room: Callable[[], int], nbytes: int) -> None:
    held = room()
    hook.pause("colocert.probe")
    paused = room()
    if paused - held < nbytes:
        raise NothingFreed(
            f"A pause of {nbytes} bytes must free as many",
            got=f"{paused - held} bytes",
            fix="The hook is mapped but moves nothing: check the saver's version (0.0.10) and the allocator settings.",
        )
    hook.resume("colocert.probe")
    taken = paused - room()
    if taken < nbytes:
        raise NothingFreed(
            f"A resume of {nbytes} bytes must take as many",
            got=f"{taken} bytes",
            fix="Another process may be using this device; it must be ours alone.",
        )

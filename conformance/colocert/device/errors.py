"""What can be wrong with a device before a memory row says anything, each by name.

    DeviceError
      NoSaver            torch_memory_saver is not installed
      NoCompiler         nothing here compiles C
      BuildFailed        the compiler refused, or the cache cannot be written
      HookNotLive        the saver's hook would move no memory, and would say nothing
        ExpandableSegments    the allocator is configured in a way that the saver cannot hook
        NoPreload             the process started without the preload library
        LatePreload           LD_PRELOAD was set after the process had started
        PreloadNotFound       LD_PRELOAD names a file that the loader could not use
        LibraryNotFound       the preload library found no libcudart or libcuda (the loader ends with 127)
        WrongRuntime          on `host`: another CUDA runtime was loaded in place of the stand-in
        TorchMode             an import switched the saver to its torch mode
        NothingFreed          everything looks right and a pause frees nothing
    DeviceOutOfMemory    an allocation does not fit; recoverable, as on a GPU

A fault in a child travels by its class name in the verdict file and is raised again in the parent.
"""

from __future__ import annotations


class DeviceError(Exception):
    """The device or its hook is not usable. The message says what must hold, what was found, and what to do."""

    def __init__(self, must: str, *, got: str, fix: str) -> None:
        super().__init__(f"{must}; got {got}. {fix}")
        self.must, self.got, self.fix = must, got, fix


class NoSaver(DeviceError):
    """torch_memory_saver is not installed."""


class NoCompiler(DeviceError):
    """There is no C compiler for the stand-in."""


class BuildFailed(DeviceError):
    """The stand-in did not compile, or its cache cannot be written."""


class HookNotLive(DeviceError):
    """A pause would free nothing."""


class ExpandableSegments(HookNotLive):
    """The allocator is told to use expandable segments."""


class NoPreload(HookNotLive):
    """The process started without the preload library."""


class LatePreload(HookNotLive):
    """LD_PRELOAD was set in a process that was already running."""


class PreloadNotFound(HookNotLive):
    """LD_PRELOAD names a file that the loader did not load."""


class LibraryNotFound(HookNotLive):
    """The loader ended the child: a library that the preload library needs is not on its path."""


class WrongRuntime(HookNotLive):
    """A CUDA runtime other than the stand-in was loaded on `host`."""


class TorchMode(HookNotLive):
    """The saver runs, or would run, in torch mode."""


class NothingFreed(HookNotLive):
    """A pause returned and freed nothing."""


class DeviceOutOfMemory(MemoryError):
    """An allocation does not fit on the device; nothing was allocated."""

    def __init__(self, nbytes: int, status: int) -> None:
        super().__init__(f"cudaMalloc of {nbytes} bytes returned {status}")
        self.nbytes, self.status = nbytes, status


HOOK_ERRORS: dict[str, type[HookNotLive]] = {
    kind.__name__: kind
    for kind in (
        ExpandableSegments,
        NoPreload,
        LatePreload,
        PreloadNotFound,
        LibraryNotFound,
        WrongRuntime,
        TorchMode,
        NothingFreed,
    )
}
"""Those that a child reports, by the name in its verdict."""

"""The saver's hook and the device calls behind it, by ctypes: no torch, no saver package.

Knows the C entry points of torch_memory_saver 0.0.10's preload library and the handful of runtime calls that a row
needs. Works in any process that was started under the preload library, on `host` and on `cuda`.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from colocert.device.errors import DeviceOutOfMemory

GRANULE = 2 << 20
_TO_DEVICE, _TO_HOST = 1, 2  # cudaMemcpyKind

Backup = Literal["pinned", "mmap", "disk"]
"""Where a pause keeps contents. `True` is the saver's default, pinned host memory; `False` is nowhere."""


class DeviceCallFailed(RuntimeError):
    """A device call returned an error. On a GPU a touch of released memory ends here, on the stand-in in SIGSEGV."""

    def __init__(self, call: str, status: int, text: str) -> None:
        super().__init__(f"{call} returned {status} ({text})")
        self.call, self.status = call, status


class Hook:
    """The hook of this process. Tag and backup are a setting of the calling thread, as in the saver's region."""

    def __init__(self, preload: Path | str) -> None:
        self.saver = ctypes.CDLL(str(preload))
        self.runtime = ctypes.CDLL(None)  # by symbol, as a caller of cudaMalloc finds it
        size, pointer, text = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p
        signatures: tuple[tuple[Any, list[Any]], ...] = (
            (self.runtime.cudaMalloc, [ctypes.POINTER(pointer), size]),
            (self.runtime.cudaFree, [pointer]),
            (self.runtime.cudaMemGetInfo, [ctypes.POINTER(size), ctypes.POINTER(size)]),
            (self.runtime.cudaMemcpy, [pointer, pointer, size, ctypes.c_int]),
            (self.runtime.cudaMemset, [pointer, ctypes.c_int, size]),
            (self.saver.tms_set_current_tag, [text]),
            (self.saver.tms_set_interesting_region, [ctypes.c_bool]),
            (self.saver.tms_set_enable_cpu_backup, [ctypes.c_bool]),
            (self.saver.tms_pause, [text]),
            (self.saver.tms_resume, [text]),
        )
        for function, arguments in signatures:
            function.argtypes = arguments
        self.runtime.cudaGetErrorString.restype = text
        self.saver.tms_get_interesting_region.restype = ctypes.c_bool
        self.saver.tms_get_enable_cpu_backup.restype = ctypes.c_bool
        self._newer = hasattr(self.saver, "tms_get_current_tag")  # 0.0.10; 0.0.9 has host backups of one kind only
        if self._newer:
            self.saver.tms_get_current_tag.restype = self.saver.tms_get_cpu_backup_backend.restype = text
            self.saver.tms_get_enable_disk_backup.restype = ctypes.c_bool
            self.saver.tms_set_enable_disk_backup.argtypes = [ctypes.c_bool]
            for name in ("tms_set_cpu_backup_backend", "tms_set_disk_backup_dir"):
                getattr(self.saver, name).argtypes = [text]

    @contextlib.contextmanager
    def region(self, tag: str, backup: bool | Backup) -> Iterator[None]:
        """What this thread allocates inside belongs to `tag`. Regions nest."""
        before = self._settings()
        host, disk = backup not in (False, "disk"), backup == "disk"
        kind = backup.encode() if isinstance(backup, str) and host else before[3]
        self._set(tag.encode(), True, host, kind, disk)
        try:
            yield
        finally:
            self._set(*before)

    def set_disk_folder(self, folder: Path) -> None:
        """Where files of a backup on disk are made from now on, by the whole process."""
        folder.mkdir(parents=True, exist_ok=True)
        self.saver.tms_set_disk_backup_dir(str(folder).encode())

    def _settings(self) -> tuple[bytes, bool, bool, bytes, bool]:
        saver = self.saver
        on, host = saver.tms_get_interesting_region(), saver.tms_get_enable_cpu_backup()
        if not self._newer:
            return b"default", on, host, b"pinned", False
        return (
            saver.tms_get_current_tag(),
            on,
            host,
            saver.tms_get_cpu_backup_backend(),
            saver.tms_get_enable_disk_backup(),
        )

    def _set(self, tag: bytes, on: bool, host: bool, kind: bytes, disk: bool) -> None:
        self.saver.tms_set_current_tag(tag)
        self.saver.tms_set_interesting_region(on)
        self.saver.tms_set_enable_cpu_backup(host)
        if self._newer:
            self.saver.tms_set_cpu_backup_backend(kind)
            self.saver.tms_set_enable_disk_backup(disk)

    def malloc(self, nbytes: int) -> int:
        """The address of new device memory; `DeviceOutOfMemory` where it does not fit."""
        address = ctypes.c_void_p()
        status = self.runtime.cudaMalloc(ctypes.byref(address), nbytes)
        if status or not address.value:
            raise DeviceOutOfMemory(nbytes, status)
        return address.value

    def free(self, address: int) -> None:
        """Frees device memory, paused or not."""
        self._check("cudaFree", self.runtime.cudaFree(address))

    def pause(self, tag: str | None = None) -> None:
        """Releases `tag`, or everything. Ends the process where one allocation of it is already released."""
        self.synchronize()
        self.saver.tms_pause(tag.encode() if tag else None)

    def resume(self, tag: str | None = None) -> None:
        """Takes `tag`, or everything, again. Ends the process where it does not fit or is not released."""
        self.saver.tms_resume(tag.encode() if tag else None)

    def free_bytes(self) -> int:
        """Bytes free on the whole device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._check("cudaMemGetInfo", self.runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)))
        return free.value

    def set_device(self, index: int) -> None:
        """Makes a device the calling thread's, with a context on it."""
        self._check(f"cudaSetDevice({index})", self.runtime.cudaSetDevice(index))

    def can_pin(self, nbytes: int) -> bool:
        """Whether the driver pins that many bytes of host memory now; they are given back at once."""
        address = ctypes.c_void_p()
        self.runtime.cudaMallocHost.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]
        self.runtime.cudaFreeHost.argtypes = [ctypes.c_void_p]
        if self.runtime.cudaMallocHost(ctypes.byref(address), nbytes):
            return False
        self._check("cudaFreeHost", self.runtime.cudaFreeHost(address))
        return True

    def synchronize(self) -> None:
        """Waits for everything on the device."""
        self._check("cudaDeviceSynchronize", self.runtime.cudaDeviceSynchronize())

    def fill(self, address: int, value: int, nbytes: int) -> None:
        """Sets every byte."""
        self._check("cudaMemset", self.runtime.cudaMemset(address, value, nbytes))
        self.synchronize()

    def read(self, address: int, nbytes: int) -> bytes:
        """The bytes at an address, copied to the host."""
        host = ctypes.create_string_buffer(nbytes)
        self._check("cudaMemcpy", self.runtime.cudaMemcpy(host, address, nbytes, _TO_HOST))
        return host.raw

    def write(self, address: int, data: bytes) -> None:
        """Copies bytes from the host to an address."""
        self._check("cudaMemcpy", self.runtime.cudaMemcpy(address, data, len(data), _TO_DEVICE))

    def standin(self, name: str) -> int:
        """One figure that only the stand-in knows: `own_bytes`, `own_peak`, `device_peak` or `pinned_bytes`."""
        function = getattr(self.runtime, f"colocert_standin_{name}")
        function.restype = ctypes.c_uint64
        return int(function())

    def _check(self, call: str, status: int) -> None:
        if status:
            raise DeviceCallFailed(call, status, self.runtime.cudaGetErrorString(status).decode())

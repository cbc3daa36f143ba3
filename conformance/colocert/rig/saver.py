"""The strict saver: a double of `torch_memory_saver` 0.0.10 that keeps the truth about every allocation.

Knows allocations, contents and legal transitions, and writes an event for each. Does not know who calls it or why.

It is a drop-in for the public surface of `torch_memory_saver.torch_memory_saver`. Where the real library ends the
process with C `exit(1)` (pausing what is paused, resuming what is active, a resume that does not fit) it writes a
`saver.fatal` event and raises `SaverFatal`, a `BaseException`; from then on the process counts as gone. Agreement
with the real library, operation by operation, is what `colocert.device.differential` checks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from colocert.rig.faults import Faults
from colocert.trace.events import (
    POISON,
    Data,
    Event,
    SaverAlloc,
    SaverCall,
    SaverFree,
    SaverPause,
    SaverResume,
    SaverTouch,
)
from colocert.trace.events import (
    SaverFatal as SaverFatalEvent,
)
from colocert.trace.events import (
    SaverRefused as SaverRefusedEvent,
)

GRANULE = 2 << 20
"""Device memory is taken in granules of this many bytes."""

DEFAULT_TAG = "default"
KIND_OF_TAG = {"grad_buffer": "grads", "param_buffer": "params"}


class SaverFatal(BaseException):
    """The saver ended the process. Not an `Exception`: nothing in a trainer survives it."""


class Allocation:
    """One allocation. `content` stands for its bits; `nbytes` is the size asked for, `size` what the device gives."""

    __slots__ = ("address", "backup", "content", "freed", "kept", "kind", "name", "nbytes", "paused", "size", "tag")

    def __init__(self, name: str, tag: str, nbytes: int, backup: bool, kind: str, address: int, content: str) -> None:
        self.name, self.tag, self.nbytes, self.backup, self.kind = name, tag, nbytes, backup, kind
        self.address, self.content, self.kept = address, content, ""
        self.size = -(-nbytes // GRANULE) * GRANULE
        self.paused = self.freed = False

    def __repr__(self) -> str:
        return f"<{self.name} {self.nbytes} B {'paused' if self.paused else 'active'}>"


class StrictSaver:
    """The double. `capacity` limits the device in bytes (None: no limit), shared with `ballast` bytes of others."""

    def __init__(
        self, emit: Callable[[Event], None], *, capacity: int | None = None, faults: Faults | None = None
    ) -> None:
        self._emit = emit
        self._faults = faults or Faults(emit)
        self.capacity, self.ballast = capacity, 0
        self.allocations: dict[str, Allocation] = {}
        self.dead = False
        self.device_bytes = self.host_bytes = 0
        self._region: tuple[str, bool] | None = None
        self._calls = self._names = self._contents = 0
        self._address = 1
        self._margin = 0
        self._retain = False

    # ---- the public surface of torch_memory_saver 0.0.10

    @contextlib.contextmanager
    def region(
        self,
        tag: str = DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: str | None = None,
    ) -> Iterator[None]:
        """Allocations inside belong to `tag`. Regions nest; the innermost counts."""
        if cpu_backup_backend is not None and not enable_cpu_backup:
            raise ValueError("cpu_backup_backend needs enable_cpu_backup=True")
        assert not (enable_cpu_backup and enable_disk_backup), "a region has a cpu backup or a disk backup, not both"
        outer, self._region = self._region, (tag, enable_cpu_backup or enable_disk_backup)
        try:
            yield
        finally:
            self._region = outer

    @contextlib.contextmanager
    def cuda_graph(
        self,
        cuda_graph: object,
        pool: object = None,
        stream: object = None,
        capture_error_mode: str = "global",
        tag: str = DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        cpu_backup_backend: str | None = None,
    ) -> Iterator[None]:
        """Memory captured inside belongs to `tag`; the capture itself is not modelled."""
        with self.region(tag, enable_cpu_backup, cpu_backup_backend=cpu_backup_backend):
            yield

    @contextlib.contextmanager
    def disable(self, dispose_mem_pool_after_use: bool = True) -> Iterator[None]:
        """Memory inside is ordinary memory. Only legal inside a region, as in the real library."""
        assert dispose_mem_pool_after_use, "only dispose_mem_pool_after_use=True is supported"
        assert self._region is not None, "disable() is legal only inside a region"
        outer, self._region = self._region, None
        try:
            yield
        finally:
            self._region = outer

    def pause(self, tag: str | None = None) -> None:
        """Gives the physical memory of `tag`, or of everything, back. An unknown tag moves nothing, silently."""
        call = self._begin("pause", tag)
        chosen = self._chosen(tag)
        mixed = _mixed(chosen)
        for allocation in chosen:
            if allocation.paused:
                self._die("pause", tag, allocation, call, "double-release", partial=mixed)
            allocation.paused = True
            self.device_bytes -= allocation.size
            if allocation.backup:
                self.host_bytes += 0 if allocation.kept else allocation.nbytes
                allocation.kept = allocation.content
            else:
                allocation.content = POISON
            self._emit(
                SaverPause(allocation.tag, allocation.name, allocation.nbytes, allocation.backup, call, allocation.kept)
            )

    def resume(self, tag: str | None = None) -> None:
        """Takes the physical memory of `tag`, or of everything, again; backed-up content is copied back."""
        call = self._begin("resume", tag)
        chosen = self._chosen(tag)
        mixed = _mixed(chosen)
        for allocation in chosen:
            if not allocation.paused:
                self._die("resume", tag, allocation, call, "double-resume", partial=mixed)
            if not self.fits(allocation.size):
                self._die("resume", tag, allocation, call, "out-of-memory")
            allocation.paused = False
            self.device_bytes += allocation.size
            if allocation.backup:
                allocation.content = allocation.kept
                if not self._retain:
                    self.host_bytes -= allocation.nbytes
                    allocation.kept = ""
            self._emit(
                SaverResume(
                    allocation.tag,
                    allocation.name,
                    allocation.nbytes,
                    allocation.backup,
                    call,
                    allocation.content,
                    allocation.address,
                    allocation.backup and self._retain,
                )
            )

    @property
    def enabled(self) -> bool:
        return True

    @property
    def hook_mode(self) -> str:
        raise AttributeError("hook_mode can only be set, as in torch_memory_saver 0.0.10")

    @hook_mode.setter
    def hook_mode(self, mode: str) -> None:
        assert self._calls == 0, "hook_mode is set before first use"
        assert self._region is None, "hook_mode is set before first use"

    @property
    def memory_margin_bytes(self) -> int:
        raise NotImplementedError("memory_margin_bytes can only be set, as in torch_memory_saver 0.0.10")

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, nbytes: int) -> None:
        self._margin = nbytes

    @property
    def retain_cpu_backup(self) -> bool:
        return self._retain

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._retain = value

    def get_cpu_backup(self, x: Any, zero_copy: bool = False) -> Any:
        """The host copy of a released allocation: its content token, or None while it is resident.

        `x` is an `Allocation` or its name. A released region without a backup ends the process, as the real one does.
        """
        allocation = x if isinstance(x, Allocation) else self.allocations.get(str(x))
        if allocation is None or (allocation.paused and not allocation.backup):
            self._die("get_cpu_backup", None, allocation, self._calls, "no-backup")
        return (allocation.kept or None) if allocation.paused else None

    def set_disk_backup_dir(self, path: str) -> None:
        """Accepted; the double keeps every backup in memory."""

    # ---- the double's own side

    def alloc(self, nbytes: int, *, name: str | None = None, kind: str | None = None) -> Allocation:
        """Allocates in the current region, or ordinary memory outside one.

        Raises `MemoryError` where it does not fit, which the real library reports as an allocator error. An allocation
        of 0 bytes in a region ends the process, as the real one does.
        """
        if not nbytes and self._region:
            self._die("alloc", self._region[0], None, self._calls, "zero-size")
        size = -(-nbytes // GRANULE) * GRANULE
        if not self.fits(size + (self._margin if self._region else 0)):
            raise MemoryError(f"{nbytes} bytes do not fit: {self.free_bytes()} of {self.capacity} are free")
        tag, backup = self._region or ("", False)
        self._names += 1
        name = name or f"alloc.{self._names}"
        kind = kind or KIND_OF_TAG.get(tag, "other")
        allocation = Allocation(name, tag, nbytes, backup, kind, self._address, self.fresh_content())
        self._address += allocation.size
        self.device_bytes += allocation.size
        if tag:
            self.allocations[name] = allocation
            self._emit(SaverAlloc(tag, name, nbytes, backup, kind, allocation.address, allocation.content))
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Frees an allocation, released or not."""
        self._alive()
        if allocation.freed:
            raise ValueError(f"{allocation.name} is already freed")
        allocation.freed = True
        if not allocation.paused:
            self.device_bytes -= allocation.size
        if allocation.kept:
            self.host_bytes -= allocation.nbytes
        if allocation.tag:
            del self.allocations[allocation.name]
            self._emit(SaverFree(allocation.tag, allocation.name, allocation.nbytes, allocation.paused))

    def touch(self, allocation: Allocation, how: str = "read", content: str | None = None) -> str:
        """Numerical work on an allocation; returns the content it leaves. Touching released memory is the end."""
        self._alive()
        if allocation.paused:
            self._emit(SaverTouch(allocation.tag, allocation.name, how))
            self.dead = True
            raise SaverFatal(f"{how} of {allocation.name}, which is released")
        if content is not None:
            allocation.content = content
        elif how in ("accumulate", "overwrite"):
            allocation.content = self.fresh_content()
        elif how == "zero":
            allocation.content = "zero"
        self._emit(Data(allocation.tag, allocation.name, how, allocation.kind, allocation.content))
        return allocation.content

    def of(self, tag: str) -> list[Allocation]:
        """The allocations of a tag, in the order they were made."""
        return [a for a in self.allocations.values() if a.tag == tag]

    def free_bytes(self) -> int:
        """Bytes of the device that nobody holds; very large where the scenario sets no capacity."""
        return (self.capacity if self.capacity is not None else 1 << 62) - self.ballast - self.device_bytes

    def fits(self, nbytes: int) -> bool:
        """Whether that many bytes are free on the device."""
        return self.capacity is None or nbytes <= self.free_bytes()

    def fresh_content(self) -> str:
        """A content token that nothing had before."""
        self._contents += 1
        return f"#{self._contents}"

    def fingerprint(self) -> tuple[object, ...]:
        """The state as a hashable value: allocations, capacity and whether the process is gone."""
        return (
            tuple((a.name, a.paused, a.content, a.kept) for a in self.allocations.values()),
            self.capacity,
            self.ballast,
            self.dead,
        )

    def _chosen(self, tag: str | None) -> list[Allocation]:
        # The real library takes an empty tag for none.
        return [a for a in self.allocations.values() if not tag or a.tag == tag]

    def _begin(self, op: str, tag: str | None) -> int:
        self._alive()
        self._calls += 1
        self._emit(SaverCall(op, tag or None, self._calls))
        self._faults.refuse(f"saver.{op}.{tag or '*'}", SaverRefusedEvent(op, tag or None, self._calls))
        return self._calls

    def _alive(self) -> None:
        if self.dead:
            raise SaverFatal("the process is gone: the saver ended it earlier")

    def _die(
        self, op: str, tag: str | None, allocation: Allocation | None, call: int, reason: str, *, partial: bool = False
    ) -> NoReturn:
        name = allocation.name if allocation else "unknown"
        self._emit(SaverFatalEvent(op, tag or None, name, call, reason, partial))
        self.dead = True
        raise SaverFatal(f"{op}({tag!r}): {reason} of {name}")


def _mixed(allocations: list[Allocation]) -> bool:
    """Whether some are released and some are not."""
    return len({a.paused for a in allocations}) > 1

"""What an offload did, by its effects: where each tensor is, what it holds, and what the process spent.

Knows torch storages and /proc. Does not know how the implementation works, and asks it nothing.

Device memory of the rig is anonymous memory of this process, so it is counted apart and taken off. The highest use is
looked at whenever the implementation's Python enters or leaves a function, built-in ones included: what exists only
within one such call is not seen.
"""

from __future__ import annotations

import bisect
import ctypes
import gc
import hashlib
import os
import re
import stat
import sys
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from colocert.rig.frozen_module import KIB, FakeDevice, tensors
from colocert.rig.frozen_rig import FrozenRig
from colocert.trace.events import MemorySeen, ModuleSeen, TensorsSeen

PAGE = os.sysconf("SC_PAGE_SIZE")
_SHARED = ("/memfd:", "/dev/shm/", "/SYSV", "/dev/zero")
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD, _PR_SET_THP_DISABLE, _MS_SYNC = -3, -1, 41, 4
_libc = ctypes.CDLL(None, use_errno=True)
_libc.msync.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_NOISE = 128 * KIB

Inode = tuple[int, int]


def make_memory_exact() -> None:
    """Makes this process give freed blocks back at once, and take memory page by page, so that use can be read off.

    What exists already is left out of garbage collection, which is run before every look.
    """
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_MMAP_THRESHOLD, 64 * KIB)
        _libc.mallopt(_M_TRIM_THRESHOLD, 0)
    gc.freeze()
    _libc.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)


class Mapping(NamedTuple):
    """One mapping of this process. `facts`: what /proc/self/smaps says of it, in bytes."""

    start: int
    end: int
    rights: str
    inode: int
    path: str
    facts: dict[str, int]

    @property
    def shared_memory(self) -> bool:
        return self.inode != 0 and self.path.startswith(_SHARED)

    @property
    def of_file(self) -> bool:
        return self.inode != 0 and not self.shared_memory


_HEAD = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+) *(.*)$", re.MULTILINE)
_FACT = re.compile(r"^(\w+): +(\d+) kB$", re.MULTILINE)


def mappings() -> list[Mapping]:
    """The mappings of this process, by address, without facts."""
    return [_mapping(head) for head in _HEAD.finditer(Path("/proc/self/maps").read_text())]


def measured(apart: Collection[tuple[int, str]]) -> list[Mapping]:
    """The mappings with their facts, less those of the inodes and paths `apart`."""
    if all((m.inode, m.path) in apart for m in mappings()):
        return []  # smaps takes its time
    text = Path("/proc/self/smaps").read_text()
    heads = list(_HEAD.finditer(text))
    found = []
    for head, ends in zip(heads, [*(h.start() for h in heads[1:]), len(text)], strict=True):
        mapping = _mapping(head)
        if (mapping.inode, mapping.path) not in apart:
            facts = {f[1]: int(f[2]) * KIB for f in _FACT.finditer(text, head.end(), ends)}
            found.append(mapping._replace(facts=facts))
    return found


def _mapping(head: re.Match[str]) -> Mapping:
    start, end, rights, inode, path = head.groups()
    return Mapping(int(start, 16), int(end, 16), rights, int(inode), path, {})


class Files:
    """The regular files that a process may keep copies in: all of the folder, and what it has opened or mapped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open_before = {inode for inode, _ in _open_files()}
        self._mapped_before = {(m.inode, m.path) for m in mappings()}

    def now(self) -> dict[Inode, os.stat_result]:
        """Those with a name in the folder, and those open here that were not when this began."""
        found = {inode: facts for inode, facts in _open_files() if inode not in self._open_before}
        return {**found, **dict(self._named())}

    def mapped(self) -> list[Mapping]:
        """What has been mapped since, libraries left out."""
        known = measured(self._mapped_before)
        libraries = {m.path for m in known if "x" in m.rights}
        return [m for m in known if m.path not in libraries]

    def nbytes(self, known: dict[Inode, os.stat_result], mapped: list[Mapping]) -> int:
        """Bytes on disk of these; of a file that is only mapped, the length of its mapping."""
        inodes = {inode for _, inode in known}
        only_mapped = {(m.inode, m.start): m.end - m.start for m in mapped if m.of_file}
        total = sum(facts.st_blocks * 512 for facts in known.values())
        return total + sum(length for (inode, _), length in only_mapped.items() if inode not in inodes)

    def _named(self) -> Iterator[tuple[Inode, os.stat_result]]:
        for root, _, names in os.walk(self._folder):
            for name in names:
                try:
                    facts = os.lstat(os.path.join(root, name))  # noqa: PTH118
                except OSError:
                    continue
                if stat.S_ISREG(facts.st_mode):
                    yield (facts.st_dev, facts.st_ino), facts


def _open_files() -> Iterator[tuple[Inode, os.stat_result]]:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            facts = os.fstat(int(name))
            shared = str(Path(f"/proc/self/fd/{name}").readlink()).startswith(_SHARED)
        except OSError:
            continue
        if stat.S_ISREG(facts.st_mode) and not shared:
            yield (facts.st_dev, facts.st_ino), facts


class HighWater:
    """Anonymous memory of this process, the device's taken off: the highest value while it is entered.

    `exact=False` looks at the beginning and at the end only: looking costs some microseconds a Python call.
    """

    def __init__(self, device: FakeDevice, *, exact: bool = True) -> None:
        self._device, self._exact = device, exact
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._last = -1
        self.highest = 0

    def now(self) -> int:
        """Bytes at this moment."""
        return self._resident() - self._device.resident_bytes()

    def _resident(self) -> int:
        _, resident, shared, *_ = os.pread(self._statm, 128, 0).split()
        return (int(resident) - int(shared)) * PAGE

    def _see(self, frame: Any, event: str, arg: Any) -> None:
        resident = self._resident()
        if resident != self._last:
            self._last = resident
            if resident - self._device.resident_bytes() > self.highest + _NOISE:
                _trim()
                self.highest = max(self.highest, self.now())

    def __enter__(self) -> HighWater:
        self.highest, self._last = self.now(), -1
        if self._exact:
            threading.setprofile(self._see)
            sys.setprofile(self._see)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._exact:
            sys.setprofile(None)
            threading.setprofile(None)
        _trim()
        self.highest = max(self.highest, self.now())


class Probe:
    """One process's probe. `before()`, the call within `high_water`, `after()`; `tensors()` at any time in between."""

    def __init__(self, rig: FrozenRig) -> None:
        self._rig = rig
        self._files = Files(rig.directory)
        self.high_water = HighWater(rig.device, exact=rig.config.size != "many")
        self._descriptors = _descriptors()
        self._start: dict[str, Any] = {}

    # ---- tensors

    def module(self, found: list[str]) -> ModuleSeen:
        """What the module is made of."""
        first: dict[int, str] = {}
        facts: dict[str, list[Any]] = {}
        storages: dict[int, int] = {}
        for name, kind, tensor in tensors(self._rig.made):
            group = first.setdefault(id(tensor), name)
            facts[name] = [kind, _layout(tensor), tensor.numel() * tensor.element_size(), group]
            if kind == "frozen":
                storage = tensor.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
        frozen = sum(f[2] for name, f in facts.items() if f[0] == "frozen" and f[3] == name)
        self._bytes = {name: f[2] for name, f in facts.items()}
        return ModuleSeen(facts, frozen, sum(storages.values()), found)

    def tensors(self, when: str) -> TensorsSeen:
        """Where every tensor is and what it holds; the process may die of reading them."""
        known = sorted(mappings())
        starts = [m.start for m in known]
        held = {}
        for name, _, tensor in tensors(self._rig.made):
            place = self._place(name, tensor, known, starts)
            content = "" if place in ("empty", "none") else _content(tensor)
            held[name] = [place, content, _layout(tensor)]
        return TensorsSeen(when, held)

    def _place(self, name: str, tensor: Any, known: list[Mapping], starts: list[int]) -> str:
        if not self._bytes[name]:
            return "none"
        storage = tensor.untyped_storage()
        if tensor.is_meta or not storage.nbytes() or not tensor.numel():
            return "empty"
        if self._rig.device.holds(tensor):
            return "device"
        at = bisect.bisect_right(starts, storage.data_ptr()) - 1
        mapping = known[at]
        if mapping.shared_memory:
            return "shared"
        return "file" if mapping.of_file else "host"

    # ---- what a call costs

    def before(self) -> None:
        """The state before a call. Dirty pages of files are written out first, so that stores to them show."""
        gc.collect()
        _trim()
        mapped = [m for m in self._files.mapped() if m.of_file]
        for mapping in mapped:
            _libc.msync(mapping.start, mapping.end - mapping.start, _MS_SYNC)
        self._start = {
            "files": _stamps(self._files.now()),
            "dirty": _dirty(self._files.mapped()) if mapped else 0,
            "anonymous": self.high_water.now(),
            "wchar": _wchar(),
        }

    def after(self, method: str) -> MemorySeen:
        """What the call since `before()` cost."""
        wchar = _wchar() - self._start["wchar"]
        gc.collect()
        _trim()
        known, before = self._files.now(), self._start["files"]
        changed = sum(known[inode].st_blocks * 512 for inode, s in _stamps(known).items() if before.get(inode) != s)
        mapped = self._files.mapped()
        of_files = [m for m in mapped if m.of_file]
        return MemorySeen(
            method=method,
            written=max(wchar, _dirty(mapped) - self._start["dirty"], changed),
            peak=self.high_water.highest - self._start["anonymous"],
            extra=self.high_water.now() - self._start["anonymous"],
            file_bytes=self._files.nbytes(known, mapped),
            shared=sum(m.facts.get("Rss", 0) for m in mapped if m.shared_memory),
            anonymous=sum(m.facts.get("Anonymous", 0) for m in of_files),
            locked=sum(m.facts.get("Locked", 0) for m in of_files),
            open_files=_descriptors() - self._descriptors,
        )


def _trim() -> None:
    """Gives back what the allocator keeps of freed blocks: a block that came out of its heap, it keeps."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def _dirty(mapped: list[Mapping]) -> int:
    """Bytes of pages of files that were stored to and are not on disk yet."""
    return sum(m.facts.get("Shared_Dirty", 0) + m.facts.get("Private_Dirty", 0) for m in mapped if m.of_file)


def _layout(tensor: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _content(tensor: Any) -> str:
    """A token for the tensor's bits, in the order of its indices."""
    plain = tensor.detach().contiguous()
    nbytes = plain.numel() * plain.element_size()
    raw = (ctypes.c_char * nbytes).from_address(plain.data_ptr())
    return "#" + hashlib.blake2b(raw, digest_size=6).hexdigest()


def _stamps(known: dict[Inode, os.stat_result]) -> dict[Inode, tuple[int, int]]:
    return {inode: (facts.st_mtime_ns, facts.st_size) for inode, facts in known.items()}


def _wchar() -> int:
    """Bytes that this process has written by system calls."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("wchar:"):
            return int(line.split()[1])
    return 0


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

"""Frozen weights off the device and back: to one unlinked file a rank, or to host memory.

Knows when a copy is complete and still that of what it was made from. Does not know torch: what holds the weights, and
how its bytes are read, dropped and put back, are a port (`Store`).

    offload():   reserve room -> write every store that has no valid copy -> drop the device memory of all
    backload():  put back every store that was dropped

The order is the point. Blocks are reserved before a byte is written, so a full disk is an error here and not a signal
later; nothing is dropped before everything is written, so an error loses nothing; the file has no name from the moment
it exists, so nobody can map it by mistake and a killed process leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

ALIGNMENT = 4096
"""Bytes to which each copy in the file is aligned."""


class Store(Protocol):
    """One piece of device memory that is offloaded as a whole: everything that aliases it follows.

    `key` names it for as long as the process lives. `version()` differs whenever its content may have changed.
    """

    key: str
    nbytes: int

    def version(self) -> Hashable: ...

    def resident(self) -> bool:
        """Whether its bytes are on the device."""
        ...

    def pieces(self, chunk: int) -> Iterator[memoryview]:
        """Its bytes in order, at most `chunk` at a time; a piece is good until the next is asked for."""
        ...

    def drop(self) -> None:
        """Gives the device memory back."""
        ...

    def restore(self, content: memoryview) -> None:
        """Takes device memory again and copies `content` into it."""
        ...


class HostCopies:
    """Copies in host memory. `forget` gives one back."""

    def __init__(self) -> None:
        self._copies: dict[str, bytearray] = {}

    def reserve(self, stores: Sequence[Store]) -> None:
        """Makes room for copies of these. Raises `MemoryError`."""
        for store in stores:
            if len(self._copies.get(store.key, b"")) != store.nbytes:
                self._copies[store.key] = bytearray(store.nbytes)

    def write(self, store: Store, chunk: int) -> None:
        """Copies the store's bytes."""
        copy, start = memoryview(self._copies[store.key]), 0
        for piece in store.pieces(chunk):
            copy[start : start + len(piece)] = piece
            start += len(piece)

    def content(self, store: Store) -> memoryview:
        """The copy's bytes."""
        return memoryview(self._copies[store.key])

    def forget(self, store: Store) -> None:
        """Gives the copy's memory back."""
        self._copies.pop(store.key, None)


class FileCopies:
    """Copies in files without a name, each mapped once, in `directory`.

    There is one file, and another only where stores come later that have no room yet. The mappings are shared and never
    written through: their pages are clean, and the kernel drops them when memory is short.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._places: dict[str, Place] = {}

    def reserve(self, stores: Sequence[Store]) -> None:
        """Makes room for copies of these, on the disk. Raises `OSError`, and then nothing has changed."""
        lacking = [s for s in stores if s.key not in self._places or self._places[s.key].nbytes != s.nbytes]
        total = sum(_aligned(store.nbytes) for store in lacking)
        if not total:
            return
        file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115  (it lives as its copies do)
        os.posix_fallocate(file.fileno(), 0, total)
        mapped = mmap.mmap(file.fileno(), total, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        start = 0
        for store in lacking:
            self._places[store.key] = Place(file, mapped, start, store.nbytes)
            start += _aligned(store.nbytes)

    def write(self, store: Store, chunk: int) -> None:
        """Writes the store's bytes to its place. Raises `OSError`; what is there is then worth nothing."""
        place = self._places[store.key]
        at = place.start
        for piece in store.pieces(chunk):
            left = piece
            while left:
                written = os.pwrite(place.file.fileno(), left, at)
                left, at = left[written:], at + written

    def content(self, store: Store) -> memoryview:
        """The copy's bytes, in the mapping."""
        place = self._places[store.key]
        return memoryview(place.mapped)[place.start : place.start + place.nbytes]

    def forget(self, store: Store) -> None:
        """Gives the copy up; a file goes with its last one."""
        self._places.pop(store.key, None)


class Place(NamedTuple):
    """Where a copy lies: in which file, and where in its mapping."""

    file: Any
    mapped: mmap.mmap
    start: int
    nbytes: int


class FrozenOffload:
    """Offloads stores that change seldom (`frozen`) to files, and those that change at every step to host memory.

    `frozen` and `changing` are asked for at every call, so memory that was replaced is seen. Without a `directory`
    everything goes to host memory. `report` is told, in words, where files could not be had.
    """

    file_copies = FileCopies
    host_copies = HostCopies

    def __init__(
        self,
        frozen: Callable[[], Iterable[Store]],
        changing: Callable[[], Iterable[Store]] = tuple,
        *,
        directory: Path | None,
        chunk: int,
        report: Callable[[str], None],
    ) -> None:
        self._frozen, self._changing, self._chunk, self._report = frozen, changing, chunk, report
        self._host = self.host_copies()
        self._files = self.file_copies(directory) if directory is not None else None
        self._copies: dict[str, Hashable] = {}
        self._on_file: set[str] = set()
        self._out: dict[str, Store] = {}

    def offload(self) -> None:
        """Takes everything off the device. Raises what the host says if it has no room either; nothing is lost then."""
        frozen = [s for s in self._frozen() if s.resident()]
        changing = [s for s in self._changing() if s.resident()]
        self._copy([s for s in frozen if self._copies.get(s.key) != s.version()])
        self._to_host(changing)
        for store in (*frozen, *changing):
            self._out[store.key] = store
            store.drop()

    def backload(self) -> None:
        """Puts everything back. The copies of what does not change stay."""
        for key, store in list(self._out.items()):
            copies = self._files if self._files is not None and key in self._on_file else self._host
            store.restore(copies.content(store))
            del self._out[key]
        for store in self._changing():
            self._host.forget(store)

    def _copy(self, stores: Sequence[Store]) -> None:
        """Makes valid copies of stores that have none: on file, or in host memory where that fails."""
        for store in stores:
            self._copies.pop(store.key, None)
        if self._files is None or not self._to_files(self._files, stores):
            self._to_host(stores)
        for store in stores:
            self._copies[store.key] = store.version()

    def _to_files(self, files: FileCopies, stores: Sequence[Store]) -> bool:
        """Whether all of the stores are on file now."""
        try:
            files.reserve(stores)
            for store in stores:
                files.write(store, self._chunk)
        except OSError as error:
            self._report(f"no file to offload to ({error}): host memory takes it")
            for store in stores:
                files.forget(store)
                self._on_file.discard(store.key)
            return False
        for store in stores:
            self._host.forget(store)
            self._on_file.add(store.key)
        return True

    def _to_host(self, stores: Sequence[Store]) -> None:
        self._host.reserve(stores)
        for store in stores:
            self._host.write(store, self._chunk)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT

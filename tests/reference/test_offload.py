"""The reference offload over stores of plain bytes: when it writes, what it keeps, what an error leaves. No torch."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from colocert_reference.offload import FileCopies, FrozenOffload, Store

CHUNK = 1000


class Bytes:
    """A store; `reads` counts the pieces that were read from it."""

    def __init__(self, key: str, content: bytes) -> None:
        self.key, self.nbytes = key, len(content)
        self.content: bytes | None = content
        self.edition = self.reads = 0

    def version(self) -> int:
        return self.edition

    def resident(self) -> bool:
        return self.content is not None

    def pieces(self, chunk: int) -> Iterator[memoryview]:
        assert self.content is not None
        for start in range(0, self.nbytes, chunk):
            self.reads += 1
            yield memoryview(self.content[start : start + chunk])

    def drop(self) -> None:
        assert self.content is not None
        self.content = None

    def restore(self, content: memoryview) -> None:
        assert self.content is None
        self.content = bytes(content)

    def load(self, content: bytes) -> None:
        self.content, self.edition = content, self.edition + 1


class Set:
    """Two frozen stores and one that changes, with the offload over them."""

    def __init__(self, directory: Path | None, offload: type[FrozenOffload] = FrozenOffload) -> None:
        self.frozen = [Bytes("a", os.urandom(2500)), Bytes("b", os.urandom(7))]
        self.changing = [Bytes("c", os.urandom(1200))]
        self.reports: list[str] = []
        self.offload = offload(
            lambda: self.frozen, lambda: self.changing, directory=directory, chunk=CHUNK, report=self.reports.append
        )

    @property
    def stores(self) -> list[Bytes]:
        return [*self.frozen, *self.changing]

    def contents(self) -> list[bytes | None]:
        return [store.content for store in self.stores]


@pytest.fixture(params=["file", "host"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Set:
    return Set(tmp_path if request.param == "file" else None)


def test_everything_comes_back_as_it_was(made: Set) -> None:
    before = made.contents()
    for _ in range(3):
        made.offload.offload()
        assert made.contents() == [None, None, None]
        made.offload.backload()
        assert made.contents() == before


def test_a_repeated_call_does_nothing(made: Set) -> None:
    before = made.contents()
    made.offload.backload()
    made.offload.offload()
    made.offload.offload()
    made.offload.backload()
    made.offload.backload()
    assert made.contents() == before


def test_frozen_stores_are_read_once_and_changing_ones_every_time(made: Set) -> None:
    for _ in range(3):
        made.offload.offload()
        made.offload.backload()
    assert [store.reads for store in made.stores] == [3, 1, 6]


def test_another_content_is_copied_again(made: Set) -> None:
    made.offload.offload()
    made.offload.backload()
    made.frozen[0].load(os.urandom(2500))
    made.changing[0].content = os.urandom(1200)
    before = made.contents()
    made.offload.offload()
    made.offload.backload()
    assert made.contents() == before
    assert [store.reads for store in made.frozen] == [6, 1]


def test_a_store_that_takes_anothers_place_is_copied_even_if_its_size_differs(made: Set) -> None:
    made.offload.offload()
    made.offload.backload()
    made.frozen[1] = Bytes("b", os.urandom(5000))
    made.frozen[1].edition = 1
    before = made.contents()
    made.offload.offload()
    made.offload.backload()
    assert made.contents() == before


def test_the_file_has_no_name_at_any_time(tmp_path: Path) -> None:
    made = Set(tmp_path)
    seen: list[list[Path]] = []
    made.frozen[0].pieces = lambda chunk: seen.append(list(tmp_path.iterdir())) or iter([memoryview(b"x" * 2500)])  # type: ignore[method-assign]
    made.offload.offload()
    assert (seen, list(tmp_path.iterdir())) == ([[]], [])


@pytest.mark.parametrize("nth", [0, 1])
def test_a_write_that_fails_is_reported_and_host_memory_takes_all(tmp_path: Path, nth: int) -> None:
    class Failing(FileCopies):
        def write(self, store: Store, chunk: int) -> None:
            if store.key == "ab"[nth]:
                raise OSError(errno.ENOSPC, "full")
            super().write(store, chunk)

    made = Set(tmp_path, type("Over", (FrozenOffload,), {"file_copies": Failing}))
    before = made.contents()
    made.offload.offload()
    assert made.contents() == [None, None, None]
    made.offload.backload()
    assert (made.contents(), len(made.reports)) == (before, 1)
    assert "full" in made.reports[0]


def test_an_error_of_the_host_too_drops_nothing(tmp_path: Path) -> None:
    """And a later call works."""
    made = Set(tmp_path)
    before = made.contents()
    reserve = made.offload._host.reserve
    made.offload._host.reserve = lambda stores: (_ for _ in ()).throw(MemoryError)  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        made.offload.offload()
    assert made.contents() == before
    made.offload._host.reserve = reserve  # type: ignore[method-assign]
    made.offload.offload()
    made.offload.backload()
    assert made.contents() == before


def test_a_limit_on_file_size_is_met_before_a_byte_is_written(tmp_path: Path) -> None:
    made, before = Set(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        made.offload.offload()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(made.reports) == 1
    assert [store.reads for store in made.frozen] == [3, 1]


def test_open_files_do_not_grow_with_stores_or_with_cycles(tmp_path: Path) -> None:
    """A file of unchanged size is written again in place."""
    made = Set(tmp_path)
    made.frozen = [Bytes(str(n), bytes(10)) for n in range(200)]
    made.offload.offload()
    made.offload.backload()
    opened = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(3):
        for store in made.frozen:
            store.load(os.urandom(10))
        made.offload.offload()
        made.offload.backload()
    assert len(os.listdir("/proc/self/fd")) == opened  # noqa: PTH208

"""Torch storages as the stores of an offload.

Knows torch. Does not know where the copies go (`offload`), or which parameters are adapters.

A store is a whole storage, not a tensor: what is tied to it, a view of it, transposed or strided, follows by itself,
and its bytes are copied in the order in which they lie. While it is off, its tensors keep their shapes and cannot be
read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class StorageStore:
    """The storage of some parameters. `named`: them, by name; the first name is the store's key."""

    def __init__(self, named: dict[str, torch.Tensor]) -> None:
        self._named = named
        self.key = next(iter(named))
        self._storage = named[self.key].untyped_storage()
        self._identity = StorageWeakRef(self._storage)
        self.nbytes = self._storage.nbytes()

    def version(self) -> Hashable:
        """Which storage this is, and how often each of its tensors was written to."""
        return Version(self._identity), tuple((name, tensor._version) for name, tensor in self._named.items())

    def resident(self) -> bool:
        return self._storage.nbytes() > 0

    def pieces(self, chunk: int) -> Iterator[memoryview]:
        raw = self._raw()
        for start in range(0, self.nbytes, chunk):
            piece = raw[start : start + chunk]
            yield _bytes_of(piece if piece.is_cpu else piece.cpu())

    def drop(self) -> None:
        self._storage.resize_(0)

    def restore(self, content: memoryview) -> None:
        self._storage.resize_(self.nbytes)
        self._raw().copy_(torch.frombuffer(content, dtype=torch.uint8))

    def _raw(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._storage.device).set_(self._storage)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, in place. `numpy()` would make its storage unfit for `resize_`."""
    return memoryview((ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())).cast("B")


class Version:
    """The identity of a storage. Equal to that of the same storage only, also after it is gone: its address is kept."""

    def __init__(self, reference: StorageWeakRef) -> None:
        self._reference = reference

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and self._reference.cdata == other._reference.cdata

    def __hash__(self) -> int:
        return hash(self._reference.cdata)


def stores(parameters: Iterable[tuple[str, torch.Tensor]], apart: Iterable[torch.Tensor] = ()) -> list[StorageStore]:
    """The stores of these parameters that hold bytes, less those whose storage also holds one of `apart`."""
    left_alone = {tensor.untyped_storage()._cdata for tensor in apart}
    by_storage: dict[Any, dict[str, torch.Tensor]] = {}
    for name, parameter in parameters:
        if parameter.numel() and parameter.untyped_storage()._cdata not in left_alone:
            by_storage.setdefault(parameter.untyped_storage()._cdata, {})[name] = parameter
    return [StorageStore(named) for named in by_storage.values()]

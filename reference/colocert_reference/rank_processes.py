"""Ranks as forked processes of this one, called over a pipe: the group's port where Ray is not installed, and in tests.

Knows processes and pipes. Does not know what a rank does.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from colocert_reference.group import RankLost

Build = Callable[[int], tuple[Callable[..., object], tuple[Any, ...]]]
"""For a rank: what to build in its process, and from which arguments."""

_FORK = multiprocessing.get_context("fork")


class ProcessRank:
    """One forked process. Its calls are made one at a time."""

    def __init__(self, rank: int, make: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.rank = rank
        self._one_at_a_time = asyncio.Lock()
        self._pipe, theirs = _FORK.Pipe()
        self.process = _FORK.Process(target=_serve, args=(theirs, make, args), daemon=True)
        self.process.start()
        theirs.close()

    async def call(self, method: str, *args: Any) -> Any:
        """Raises what the rank raised, or `RankLost` once its process has ended."""
        async with self._one_at_a_time:
            return await self._called(method, args)

    async def _called(self, method: str, args: tuple[Any, ...]) -> Any:
        try:
            put(self._pipe, (method, args))
            if not self._pipe.poll():
                await self._readable()
            ok, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise RankLost(f"the process of rank {self.rank} has ended in {method}()") from error
        if not ok:
            raise value
        return value

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        fd = self._pipe.fileno()
        loop.add_reader(fd, lambda: None if ready.done() else ready.set_result(None))
        try:
            await ready
        finally:
            loop.remove_reader(fd)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


class ProcessRanks:
    """Starts ranks as forked processes."""

    def __init__(self, build: Build) -> None:
        self._build = build

    async def start(self, rank: int) -> ProcessRank:
        """Returns once the rank is built in its process."""
        started = ProcessRank(rank, *self._build(rank))
        try:
            await started.call("address")
        except BaseException:
            started.kill()
            raise
        return started


def _serve(pipe: Connection[Any, Any], make: Callable[..., object], args: tuple[Any, ...]) -> None:
    """The process of a rank: carries out one call after the other until its caller is gone."""
    keep_only(pipe)
    rank = make(*args)
    with contextlib.suppress(EOFError, OSError):
        while True:
            method, given = pipe.recv()
            try:
                answer = (True, getattr(rank, method)(*given))
            except Exception as error:
                answer = (False, error)
            put(pipe, answer)
    os._exit(0)


def put(pipe: Connection[Any, Any], value: object) -> None:
    """Sends a value, pickled here.

    `Connection.send` makes a view of a `BytesIO`; where sending then fails, the view ends in a reference cycle with
    the traceback, and Python up to 3.12.1 crashes when it collects that.
    """
    pipe.send_bytes(pickle.dumps(value))


def keep_only(pipe: Connection[Any, Any]) -> None:
    """For a forked rank: closes every file of its parent but the standard ones and this pipe.

    A forked process holds its parent's ends of the pipes of the ranks before it, and whatever the parent is read by:
    a rank would not learn that its caller has gone, nor the reader that the parent has.
    """
    for entry in [*Path("/proc/self/fd").iterdir()]:
        if (fd := int(entry.name)) > 2 and fd != pipe.fileno():
            with contextlib.suppress(OSError):  # the listing's own
                os.close(fd)

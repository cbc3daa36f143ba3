"""A line of JSON messages between a scenario's child and whoever started it.

Knows two pipes. Apart from stdout and stderr, which the saver and torch write to as they please.
"""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any


class LinkClosed(EOFError):
    """The other side is gone."""


class Link:
    """One end: messages are read from one descriptor and written to the other."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes
        self._pending = b""

    def tell(self, message: Any) -> None:
        """Sends one JSON value."""
        data = json.dumps(message).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._writes, data) :]
        except BrokenPipeError:
            raise LinkClosed("the other side of the link ended before it was told") from None

    def listen(self, timeout: float = 60.0) -> Any:
        """The next message; `LinkClosed` where the other side ended, `TimeoutError` where nothing comes in time."""
        until = time.monotonic() + timeout
        while b"\n" not in self._pending:
            ready, _, _ = select.select([self._reads], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError(f"a message must come within {timeout} s; got none")
            data = os.read(self._reads, 1 << 16)
            if not data:
                raise LinkClosed("the other side of the link ended without another message")
            self._pending += data
        line, self._pending = self._pending.split(b"\n", 1)
        return json.loads(line)

    def close(self) -> None:
        """Ends this side."""
        for descriptor in {self._reads, self._writes}:
            os.close(descriptor)


def pair() -> tuple[Link, tuple[int, int]]:
    """This side's link, and the (reads, writes) descriptors for the other's."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    return Link(ours_in, ours_out), (theirs_in, theirs_out)

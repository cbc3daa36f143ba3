"""The byte ledger: what is on the device and on the host, as a fold over events.

Knows allocations, their sizes and whether they are released. Does not know calls, claims or rules.
"""

from __future__ import annotations

from typing import NamedTuple

from colocert.trace.events import AnyEvent, SaverAlloc, SaverFree, SaverPause, SaverResume


class Allocation(NamedTuple):
    """One allocation of a region, as the trace shows it. `nbytes` are bytes."""

    name: str
    tag: str
    nbytes: int
    backup: bool
    kind: str
    address: int


class Ledger:
    """Device and host bytes after each event, in total, by tag and by kind.

    `out` are the released allocations, `copies` those of which a copy is on the host.
    """

    __slots__ = (
        "allocations",
        "copies",
        "device_bytes",
        "host_bytes",
        "out",
        "peak_device_bytes",
        "peak_host_bytes",
        "seen_tags",
    )

    def __init__(self) -> None:
        self.allocations: dict[str, Allocation] = {}
        self.out: set[str] = set()
        self.copies: set[str] = set()
        self.seen_tags: set[str] = set()
        self.device_bytes = self.host_bytes = 0
        self.peak_device_bytes = self.peak_host_bytes = 0

    def apply(self, event: AnyEvent) -> None:
        """Moves the ledger past one event; events that move no bytes leave it as it is."""
        if isinstance(event, SaverPause):
            self._move(event, released=True)
        elif isinstance(event, SaverResume):
            self._move(event, released=False)
        elif isinstance(event, SaverAlloc):
            self._alloc(event)
        elif isinstance(event, SaverFree):
            self._free(event)

    def _alloc(self, event: SaverAlloc) -> None:
        self.allocations[event.alloc] = Allocation(
            event.alloc, event.tag, event.nbytes, event.backup, event.kind, event.address
        )
        self.seen_tags.add(event.tag)
        self.device_bytes += event.nbytes
        self._peak()

    def _move(self, event: SaverPause | SaverResume, *, released: bool) -> None:
        if event.alloc not in self.allocations or (event.alloc in self.out) is released:
            return
        sign = -1 if released else 1
        (self.out.add if released else self.out.discard)(event.alloc)
        self.device_bytes += sign * event.nbytes
        if isinstance(event, SaverPause) and event.backup and event.alloc not in self.copies:
            self.copies.add(event.alloc)
            self.host_bytes += event.nbytes
        elif isinstance(event, SaverResume) and event.alloc in self.copies and not event.retained:
            self.copies.discard(event.alloc)
            self.host_bytes -= event.nbytes
        self._peak()

    def _free(self, event: SaverFree) -> None:
        allocation = self.allocations.pop(event.alloc, None)
        if allocation is None:
            return
        if event.alloc not in self.out:
            self.device_bytes -= allocation.nbytes
        if event.alloc in self.copies:
            self.host_bytes -= allocation.nbytes
        self.out.discard(event.alloc)
        self.copies.discard(event.alloc)

    def _peak(self) -> None:
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)

    def released(self, tag: str) -> bool | None:
        """Whether a tag is released; None where it has no allocation or its allocations differ."""
        states = {name in self.out for name, a in self.allocations.items() if a.tag == tag}
        return states.pop() if len(states) == 1 else None

    def tags(self) -> list[str]:
        """The tags that have allocations now, in the order of their first allocation."""
        return list(dict.fromkeys(a.tag for a in self.allocations.values()))

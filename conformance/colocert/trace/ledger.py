"""The byte ledger: what is on the device and on the host, as a fold over events.

Knows allocations, their sizes and whether they are released. Does not know calls, claims or rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from colocert.trace.events import AnyEvent, SaverAlloc, SaverFree, SaverPause, SaverResume


@dataclass(slots=True)
class Allocation:
    """One allocation of a region, as the trace shows it. `nbytes` are bytes."""

    name: str
    tag: str
    nbytes: int
    backup: bool
    kind: str
    address: int
    released: bool = False


@dataclass(slots=True)
class Ledger:
    """Device and host bytes after each event, in total, by tag and by kind."""

    allocations: dict[str, Allocation] = field(default_factory=dict)
    seen_tags: set[str] = field(default_factory=set)
    device_bytes: int = 0
    host_bytes: int = 0
    peak_device_bytes: int = 0
    peak_host_bytes: int = 0

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
        allocation = self.allocations.get(event.alloc)
        if allocation is None or allocation.released is released:
            return
        allocation.released = released
        sign = -1 if released else 1
        self.device_bytes += sign * allocation.nbytes
        if event.backup:
            self.host_bytes -= sign * allocation.nbytes
        self._peak()

    def _free(self, event: SaverFree) -> None:
        allocation = self.allocations.pop(event.alloc, None)
        if allocation is None:
            return
        if not allocation.released:
            self.device_bytes -= allocation.nbytes
        elif allocation.backup:
            self.host_bytes -= allocation.nbytes

    def _peak(self) -> None:
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)

    def released(self, tag: str) -> bool | None:
        """Whether the tag is released: None if it has no allocation, True if any of them is."""
        states = [a.released for a in self.allocations.values() if a.tag == tag]
        return any(states) if states else None

    def tags(self) -> list[str]:
        """The tags that have allocations now, in the order of their first allocation."""
        return list(dict.fromkeys(a.tag for a in self.allocations.values()))

    def residency(self) -> tuple[tuple[str, bool], ...]:
        """Every allocation with whether it is released, as a hashable value."""
        return tuple((name, a.released) for name, a in self.allocations.items())

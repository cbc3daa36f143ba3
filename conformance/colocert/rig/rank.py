"""The world of one trainer rank: its saver, its process groups, and the work that can be done on its memory.

Knows one rank's doubles. Does not know other ranks, engines or which scenario is running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from colocert.rig.contract import Config
from colocert.rig.faults import Faults, _Point
from colocert.rig.groups import STANDARD_GROUPS, ProcessGroups
from colocert.rig.saver import Allocation, StrictSaver
from colocert.trace.events import Change, Event, Send


class RankRig:
    """One rank. `config`: what this scenario is. `saver`: its strict saver. `process_groups`: its group double."""

    def __init__(
        self,
        rank: int,
        config: Config,
        write: Callable[[Event], None],
        faults: Faults | None = None,
        *,
        capacity: int | None = None,
    ) -> None:
        self.rank, self.config = rank, config
        self._write = write
        self.faults = faults or Faults(self.emit)
        self.saver = StrictSaver(self.emit, capacity=capacity, faults=self.faults)
        self.process_groups = ProcessGroups(self.emit, self.faults)

    def emit(self, event: Event) -> None:
        """Writes an event of this rank; nothing is written once the saver has ended its process."""
        if not self.saver.dead or event.owner:
            event.rank = self.rank
            self._write(event)

    def start(self) -> None:
        """Makes the allocations of `config.regions` and the process groups: what a trainer's initialisation does."""
        for tag, regions in self.config.regions.items():
            for region in regions:
                with self.saver.region(tag, enable_cpu_backup=region.backup):
                    self.saver.alloc(region.nbytes, name=region.name, kind=region.kind)
        if self.config.groups == "present":
            for name, args in STANDARD_GROUPS.items():
                self.process_groups.create(name, **args)
        self.faults.passed.clear()

    def end_process(self) -> None:
        """The rank's process ends, dead or alive: all it held is given back. A new one may take its place."""
        self.saver.dead = False
        for allocation in list(self.saver.allocations.values()):
            self.saver.free(allocation)
        self.process_groups.alive.clear()
        self.emit(Change("rank.ended"))

    def point(self, name: str) -> _Point:
        """A named fault point around an effect of the adapter's: `with rig.point("export"): ...`."""
        return self.faults.point(name)

    # ---- memory

    def start_empty(self) -> None:
        """Frees the allocations of `config.regions`: for adapters that build a real model and allocate themselves."""
        for allocation in list(self.saver.allocations.values()):
            self.saver.free(allocation)

    def alloc(
        self, tag: str, nbytes: int, *, backup: bool = False, name: str | None = None, kind: str | None = None
    ) -> Allocation:
        """An allocation of `nbytes` bytes under `tag`."""
        with self.saver.region(tag, enable_cpu_backup=backup):
            return self.saver.alloc(nbytes, name=name, kind=kind)

    def data(
        self, tag: str, how: str, *, only: str | None = None, content: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Numerical work on a tag's memory: `how` is read, accumulate, zero, overwrite or consume.

        Returns name to content; give it back as `content` with `overwrite` to restore what was read. `only` narrows
        the work to one allocation. Work on released memory ends the process.
        """
        if how not in ("read", "accumulate", "zero", "overwrite", "consume"):
            raise ValueError(f"how must be read, accumulate, zero, overwrite or consume (got {how!r})")
        return {
            a.name: self.saver.touch(a, how, (content or {}).get(a.name))
            for a in self.saver.of(tag)
            if only is None or a.name == only
        }

    def free_bytes(self) -> int:
        """Bytes of the device that nobody holds now: what a trainer can ask before it resumes."""
        return self.saver.free_bytes()

    def clear_memory(self, frees: Iterable[Allocation] = ()) -> None:
        """Cache clearing, a fault point `clear_memory`; `frees` are the allocations that it frees."""
        with self.point("clear_memory"):
            for allocation in frees:
                self.saver.free(allocation)

    def fill_device(self, leave: int) -> None:
        """The suite takes device memory until `leave` bytes are free, as a neighbour on the device does."""
        self.saver.ballast = 0
        if self.saver.capacity is None:
            self.saver.capacity = self.saver.device_bytes + (1 << 30)
        self.saver.ballast = self.saver.free_bytes() - leave
        self.emit(Change("device.filled", {"free": leave}))

    def relieve_device(self) -> None:
        """The suite gives back what `fill_device` took."""
        self.saver.ballast = 0
        self.emit(Change("device.relieved"))

    # ---- weights

    def send(
        self, kind: str, tag: str, *, read_from: str = "device", only: str | None = None, version: int = 0
    ) -> None:
        """Sends weights of `tag` to the engine, a fault point `send`. `kind` is base, adapter or merged.

        `read_from="device"` reads the memory, which must be resident; `"host"` takes the saver's host copy and raises
        `ValueError` if there is none.
        """
        if kind not in ("base", "adapter", "merged") or read_from not in ("device", "host"):
            raise ValueError(
                f"kind must be base, adapter or merged, read_from device or host (got {kind}, {read_from})"
            )
        chosen = [a for a in self.saver.of(tag) if only is None or a.name == only]
        with self.point("send"):
            for allocation in chosen:
                if read_from == "device":
                    self.saver.touch(allocation, "read")
                elif not self.saver.get_cpu_backup(allocation):
                    raise ValueError(f"{allocation.name} has no host copy to send from: it is resident")
            names = [a.name for a in chosen]
            self.emit(Send(kind, sum(a.nbytes for a in chosen), read_from, version, names))

"""The folds of the live profile about memory: bytes of the device and of the host, measured on a running pair.

Knows what LV-01 and LV-04 compare. Does not know devices or processes: all of it is in the trace.
"""

from __future__ import annotations

from colocert.rules.fold import RunFold
from colocert.rules.run import RunView
from colocert.trace.events import AnyEvent, CallEnd, LevelsSeen, ProcessEnded, TagsMoved

MIB = 1 << 20
FLAT = 4 * MIB
"""Bytes by which a level may differ after 90 more cycles: what an interpreter or a driver takes for itself."""

HANDLES_FLAT = 16
"""The same for open files and mappings: far under one a cycle."""

LARGE = 8 * MIB
"""Bytes that a sleep copies to the host from which on their return is judged: they have to stand out."""

SETTLED, FLAT_AGAIN = "settled", "flat"


class Released(RunFold):
    """LV-01. Bytes of the whole device; so it makes no difference in which process an owner lives."""

    rule = "LV-01"
    sees = (CallEnd, LevelsSeen, ProcessEnded, TagsMoved)

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.stated: dict[str, dict[str, list[int]]] = {}
        self.granule = 0
        self.last: LevelsSeen | None = None
        self.handed: list[LevelsSeen] = []
        self.settled: LevelsSeen | None = None

    def on(self, event: AnyEvent) -> None:
        if isinstance(event, TagsMoved):
            self._moved(event)
        elif isinstance(event, LevelsSeen):
            self._levels(event)
        elif isinstance(event, CallEnd) and event.method in ("to_rollout", "to_training"):
            self.met("does-not-fit")
        elif isinstance(event, ProcessEnded) and event.how == "out-of-memory":
            observed = f"the saver ended the {event.owner} process in {event.during}(): no room for what it resumes"
            self.found(event, "does-not-fit", "a hand-off fits on the device: each side releases in time", observed)

    def _moved(self, event: TagsMoved) -> None:
        self.granule = event.granule
        self.stated.setdefault(event.of, {}).update(event.stated)
        if event.op != "release":
            return
        tags = f"{event.of} {', '.join(event.stated)}"
        nbytes, most = _bytes(event.stated), _bytes(event.stated, event.granule)
        freed = event.after - event.before
        self.met("tag-empty")
        empty = [tag for tag, sizes in event.stated.items() if not sum(sizes)]
        if empty:
            observed = f"{event.of} {', '.join(empty)} holds nothing as stated"
            self.found(event, "tag-empty", "regions() states what each tag holds that is released", observed)
            return
        self.met("not-released")
        self.met("other-bytes")
        observed = f"release of {tags} freed {freed} bytes of the device; stated are {nbytes}"
        if freed < nbytes:
            self.found(event, "not-released", f"at least {nbytes} bytes more are free", observed)
        elif freed > most:
            self.found(event, "other-bytes", f"at most {most} bytes more are free, by its granule", observed)

    def _levels(self, event: LevelsSeen) -> None:
        if event.when in ("rollout", "training"):
            self.handed.append(event)
        elif event.when == SETTLED:
            self.settled = event
        elif event.when == FLAT_AGAIN and self.settled is not None:
            self.met("device-grows")
            grown = self.settled.free - event.free
            if grown > FLAT:
                observed = f"{grown} bytes fewer are free after 90 more cycles"
                self.found(event, "device-grows", f"free bytes differ by {FLAT} at most", observed)

    def end(self) -> None:
        """What a hand-off does to the whole device, once all tags have been stated."""
        gone, come = self.stated.get("trainer"), self.stated.get("engine", {})
        if gone is None:
            return
        for before, after in zip(self.handed, self.handed[1:], strict=False):
            to_rollout = after.when == "rollout"
            if before.when == after.when:
                continue
            out, back = (gone, come) if to_rollout else (come, gone)
            more = _bytes(back, self.granule) - _bytes(out)
            used = before.free - after.free
            self.met("kept-at-hand-off")
            if used > more:
                side = "trainer's" if to_rollout else "engine's"
                observed = f"to_{after.when}() left {used - more} bytes more than that in use"
                expected = f"the {side} {', '.join(out)} are off the device: use changes by {more} bytes at most"
                self.found(after, "kept-at-hand-off", expected, observed)


class HostReturns(RunFold):
    """LV-04. By process: what a sleep brought to the host is gone once its owner is awake."""

    rule = "LV-04"
    sees = (LevelsSeen,)

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.before: LevelsSeen | None = None
        self.asleep: LevelsSeen | None = None
        self.settled: LevelsSeen | None = None

    def on(self, event: AnyEvent) -> None:
        assert isinstance(event, LevelsSeen)
        if event.when == "before":
            self.before = event
        elif event.when == "asleep":
            self.asleep = event
        elif event.when == "awake":
            self._awake(event)
        elif event.when == SETTLED:
            self.settled = event
        elif event.when == FLAT_AGAIN and self.settled is not None:
            self._flat(self.settled, event)

    def _awake(self, event: LevelsSeen) -> None:
        if self.before is None or self.asleep is None:
            return
        for owner, level in self.before.host.items():
            copied = self.asleep.host.get(owner, 0) - level
            if "trainer" not in owner:
                continue  # the engine sleeps now; its level awake has no before
            if copied < LARGE:
                continue
            self.met("backup-kept")
            kept = event.host.get(owner, 0) - level
            if kept > max(FLAT, copied // 4):
                observed = f"the {owner} process holds {kept} bytes of host memory more than before its sleep"
                expected = f"host memory is back at its level once awake: of {copied} bytes asleep at most a quarter"
                self.found(event, "backup-kept", expected, observed)

    def _flat(self, settled: LevelsSeen, event: LevelsSeen) -> None:
        if not settled.host:
            return  # no process is known
        self.met("host-grows")
        self.met("handles-grow")
        for owner, level in settled.host.items():
            grown = event.host.get(owner, level) - level
            if grown > FLAT:
                observed = f"the {owner} process holds {grown} bytes of host memory more after 90 more cycles"
                self.found(event, "host-grows", f"host memory differs by {FLAT} bytes at most", observed)
        for what in ("files", "maps"):
            for owner, count in getattr(settled, what).items():
                grown = getattr(event, what).get(owner, count) - count
                if grown > HANDLES_FLAT:
                    kind = "open files" if what == "files" else "mappings"
                    observed = f"the {owner} process has {grown} {kind} more after 90 more cycles"
                    self.found(event, "handles-grow", f"{kind} differ by {HANDLES_FLAT} at most", observed)


def _bytes(stated: dict[str, list[int]], granule: int = 1) -> int:
    """The bytes of allocations by tag, each in whole granules."""
    return sum(-(-n // granule) * granule for sizes in stated.values() for n in sizes)

"""What the processes of a train group leave behind: their events, merged into one trace, and themselves.

Knows the ranks' files, which processes they come from and whether those are still there. Does not know calls or rules.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from colocert.rig.group_rank import STARTED, Stamped, started_at
from colocert.trace.events import AnyEvent, CallBegin, Change, Event, Fault

SHARED_MEMORY = Path("/dev/shm")
GONE_WITHIN = 8.0
"""Seconds after `close()` within which the ranks' processes must have ended."""

_decoder = msgspec.json.Decoder(Stamped)
Process = tuple[int, int]


class RankFiles:
    """The ranks' files of one scenario. `drain` passes on what is new, in the order of time.

    A rank writes before it answers, so everything that a returned call did is there when it has returned. Of a
    process that was replaced only the fact that it is still called is passed on: its memory is no part of the group.
    """

    def __init__(self, folder: Path, emit: Callable[[Event], None]) -> None:
        self._folder, self._emit = folder, emit
        self._read: dict[Path, tuple[int, bytes]] = {}
        self._current: dict[int, int] = {}
        self._lost: set[int] = set()
        self.processes: dict[tuple[int, int], Process] = {}

    def drain(self, *, watch: bool = True) -> None:
        """Passes new events on; with `watch` also that a rank's process has ended without a word."""
        new = [(line.at, rank, n, line.event) for path, rank, n in self._files() for line in self._new(path)]
        for _, rank, incarnation, event in sorted(new, key=lambda entry: entry[0]):
            self._pass_on(rank, incarnation, event)
        if watch:
            for rank, incarnation in self._current.items():
                if rank not in self._lost and not _alive(self.processes[rank, incarnation]):
                    self._lost.add(rank)
                    self._emit_for(rank, Change("rank.ended", {"incarnation": incarnation}))

    def _files(self) -> Iterator[tuple[Path, int, int]]:
        for path in sorted(self._folder.glob("rank-*.jsonl")):
            rank, incarnation = path.stem.removeprefix("rank-").split(".")
            yield path, int(rank), int(incarnation)

    def _new(self, path: Path) -> Iterator[Stamped]:
        """The complete lines since the last time; a torn last one waits, for good if its writer is dead."""
        offset, rest = self._read.get(path, (0, b""))
        with path.open("rb") as stream:
            stream.seek(offset)
            fresh = stream.read()
        *whole, rest = (rest + fresh).split(b"\n")
        self._read[path] = (offset + len(fresh), rest)
        for line in whole:
            yield _decoder.decode(line)

    def _pass_on(self, rank: int, incarnation: int, event: AnyEvent) -> None:
        if isinstance(event, Change) and event.what == STARTED:
            self.processes[rank, incarnation] = (event.facts.pop("pid"), event.facts.pop("since"))
            if incarnation >= self._current.get(rank, 0):
                self._current[rank] = incarnation
                self._lost.discard(rank)
        if incarnation == self._current.get(rank, incarnation):
            if isinstance(event, Fault) and event.when in ("hang", "killed"):
                self._lost.add(rank)
            self._emit_for(rank, event)
        elif isinstance(event, CallBegin):
            self._emit_for(rank, Change("old.call", {"incarnation": incarnation, "method": event.method}))

    def _emit_for(self, rank: int, event: Event) -> None:
        event.rank = rank
        self._emit(event)

    # ---- after close()

    def left_over(self) -> list[str]:
        """The processes that outlive `close()`, by address, after a moment's patience; they are ended."""
        end = time.monotonic() + GONE_WITHIN
        mine = {key: p for key, p in self.processes.items() if p[0] != os.getpid()}
        while any(map(_alive, mine.values())) and time.monotonic() < end:
            time.sleep(0.02)
        found = [key for key, process in mine.items() if _alive(process)]
        for key in found:
            with contextlib.suppress(OSError):
                os.kill(mine[key][0], signal.SIGKILL)
        return [f"rank-{rank}.{incarnation}" for rank, incarnation in sorted(found)]


def _alive(process: Process) -> bool:
    pid, since = process
    return started_at(pid) == since


def shared_memory() -> set[str]:
    """The names in shared memory that belong to this user."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(SHARED_MEMORY):
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    found.add(entry.name)
    return found


def abandoned(names: set[str]) -> list[str]:
    """Those of these names that no living process of this user has mapped or open: nobody will remove them."""
    held: set[str] = set()
    for process in Path("/proc").iterdir() if names else ():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                held |= {n for n in names if f"{SHARED_MEMORY}/{n}" in (process / "maps").read_text()}
                for fd in (process / "fd").iterdir():
                    with contextlib.suppress(OSError):
                        held |= names & {str(fd.readlink()).removeprefix(f"{SHARED_MEMORY}/")}
    return sorted(n for n in names - held if (SHARED_MEMORY / n).exists())

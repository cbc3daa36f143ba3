"""What a recording knows of the memory behind a saver or an engine, a tag at a time.

Knows which tags have been opened, and which are released by calls that returned. Does not know single allocations,
and says nothing of a tag that it has not seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from colocert.trace.events import (
    EngineAdmit,
    EngineDrain,
    EngineFlush,
    EngineRelease,
    EngineResume,
    EngineServe,
    RequestBegin,
    RequestEnd,
    SaverAlloc,
    SaverFatal,
    SaverPause,
    SaverResume,
    Send,
)

if TYPE_CHECKING:
    from colocert.live.recording import Recording

KIND_OF_TAG: Mapping[str, str] = {"grad_buffer": "grads", "param_buffer": "params"}


class SaverTags:
    """The regions of one saver, each (tag, backed up) as one allocation, named by its tag."""

    def __init__(self, recording: Recording, nbytes: Mapping[str, int]) -> None:
        self._recording, self._nbytes = recording, nbytes
        self._lock = threading.Lock()
        self.forget()

    def forget(self) -> None:
        self._regions: dict[tuple[str, bool], str] = {}
        self._of: dict[str | None, list[tuple[str, bool, str, int]]] = {}
        self._out: set[str] = set()
        self._number = 0

    def next_call(self) -> int:
        self._number += 1
        return self._number

    def opened(self, tag: str, backup: bool) -> None:
        """A region was opened: from here on the tag has memory."""
        if (tag, backup) in self._regions:
            return
        with self._lock:
            if (tag, backup) in self._regions:
                return
            name = tag if (tag, not backup) not in self._regions else f"{tag}.{'backup' if backup else 'plain'}"
            self._regions[tag, backup] = name
            self._of = {}
        if self._recording.started:
            self._recording.emit(self._alloc(tag, backup, name))

    def _alloc(self, tag: str, backup: bool, name: str) -> SaverAlloc:
        made = self._recording
        size, kind = self._nbytes.get(tag, 0), KIND_OF_TAG.get(tag, "other")
        return SaverAlloc(tag, name, size, backup, kind, rank=made.rank, owner=made.owner)

    def state(self) -> list[Any]:
        """The regions, and which of them are released, as events."""
        made, found = self._recording, list[Any]()
        for (tag, backup), name in list(self._regions.items()):
            found.append(self._alloc(tag, backup, name))
            if name in self._out:
                size = self._nbytes.get(tag, 0)
                found.append(SaverPause(tag, name, size, backup, 0, rank=made.rank, owner=made.owner))
        return found

    def moved(self, op: str, tag: str | None, number: int) -> None:
        """A release or resume returned: all of the tag, or of every tag, has been moved."""
        made, out, known = self._recording, self._out, self._of
        chosen = known.get(tag)
        if chosen is None:
            chosen = known[tag] = [
                (mine, backup, name, self._nbytes.get(mine, 0))
                for (mine, backup), name in list(self._regions.items())
                if tag in (None, mine)
            ]
        for mine, backup, name, size in chosen:
            if op == "pause" and name not in out:
                out.add(name)
                made.emit(SaverPause(mine, name, size, backup, number, rank=made.rank, owner=made.owner))
            elif op == "resume" and name in out:
                out.discard(name)
                made.emit(SaverResume(mine, name, size, backup, number, rank=made.rank, owner=made.owner))

    def ended(self, op: str, tag: str | None, number: int) -> None:
        """A release or resume ended with what is no `Exception`: as the strict saver does for the end of a process."""
        made = self._recording
        chosen = [name for (mine, _), name in self._regions.items() if tag in (None, mine)]
        wrong = [name for name in chosen if (name in self._out) is (op == "pause")]
        reason = ("double-release" if op == "pause" else "double-resume") if wrong else "ended"
        first = (wrong or chosen or ["unknown"])[0]
        partial = 0 < len(wrong) < len(chosen)
        made.emit(SaverFatal(op, tag, first, number, reason, partial, rank=made.rank, owner=made.owner))


class EngineTags:
    """One engine's tags, as its client has been told: a call that returned has been obeyed."""

    def __init__(self, recording: Recording, number: int, tags: tuple[str, ...], released: set[str]) -> None:
        self._recording, self._number = recording, number
        self._tags, self._out = tags, set(released)
        self._calls = 0

    def forget(self) -> None:
        """A forked child's client talks to the same engine."""

    def attached(self) -> None:
        """The engine's memory, as far as it was named."""
        if self._recording.started:
            for event in self.state():
                self._emit(event)

    def state(self) -> list[Any]:
        """The tags, and which of them are released, as events."""
        facts, rank, found = self._recording.config, self._number, list[Any]()
        for tag in self._tags:
            backup = tag == "weights" and bool(facts.get("engine_mirror"))
            size = int(facts.get("engine_sizes", {}).get(tag, 0))
            found.append(SaverAlloc(tag, _name(tag), size, backup, tag, rank=rank, owner="engine"))
            if tag in self._out:
                found.append(SaverPause(tag, _name(tag), size, backup, 0, rank=rank, owner="engine"))
        return found

    def events(self, call: str) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
        """What to write before a call, after it has returned, and after it has raised."""
        rank = self._number
        if call in ("release", "resume"):
            return (lambda tags: self._asked(call, tags)), self._obeyed, lambda mark, error: None
        if call == "generate":
            return (lambda _: self._request()), self._answered, self._answered
        if call == "update":
            rank, owner = self._recording.rank, self._recording.owner
            return (
                (lambda _: self._emit(Send("weights", 0, "unknown", rank=rank, owner=owner))),
                lambda mark, result: self._served(),
                lambda mark, error: None,
            )
        made = {"drain": EngineDrain, "admit": EngineAdmit, "flush": EngineFlush}[call]
        return (lambda _: None), (lambda mark, result: self._emit(made(rank=rank, owner="engine"))), lambda m, e: None

    def _served(self) -> None:
        """Only a weight sync asks when the engine took what was sent."""
        if self._recording.sees("syncs"):
            self._emit(EngineServe("", 0, 0, rank=self._number, owner="engine"))

    def _asked(self, call: str, given: list[str] | None) -> tuple[str, list[str]]:
        tags = list(self._tags) if given is None else given
        again = [t for t in tags if t in self._tags and (t in self._out) is (call == "release")]
        new = [t for t in tags if t not in again]
        kind = EngineRelease if call == "release" else EngineResume
        self._emit(kind(new, again, rank=self._number, owner="engine"))
        return call, new

    def _obeyed(self, mark: tuple[str, list[str]] | None, result: object) -> None:
        if mark is None:
            return
        call, tags = mark
        self._calls += 1
        facts, rank = self._recording.config, self._number
        for tag in tags:
            if tag not in self._tags:
                continue
            backup, size = tag == "weights" and bool(facts.get("engine_mirror")), 0
            size = int(facts.get("engine_sizes", {}).get(tag, 0))
            if call == "release":
                self._out.add(tag)
                self._emit(SaverPause(tag, _name(tag), size, backup, self._calls, rank=rank, owner="engine"))
            else:
                self._out.discard(tag)
                self._emit(SaverResume(tag, _name(tag), size, backup, self._calls, rank=rank, owner="engine"))
        self._recording.measure()

    def _request(self) -> bool:
        """A request that comes while memory is released is not one in flight: it is refused, or waits."""
        ready = not self._out
        self._emit(RequestBegin("", ready=ready, rank=self._number, owner="engine"))
        return ready

    def _answered(self, ready: bool | None, _: object) -> None:
        if ready:
            self._emit(RequestEnd("", rank=self._number, owner="engine"))

    def _emit(self, event: Any) -> None:
        self._recording.emit(event)


def _name(tag: str) -> str:
    return f"engine.{tag}"

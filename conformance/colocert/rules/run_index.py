"""The view of a whole run for many ranks: the same answers as `RunView`, each in time that ranks do not lengthen.

Knows how to keep by tag what `RunView` counts anew at every question. Knows no rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from colocert.rules.handoff_state import TransportIsCollected
from colocert.rules.run import ENGINE, Held, RunView, _drop
from colocert.rules.view import RESIDENT_KINDS
from colocert.trace.events import (
    ClaimsStated,
    Event,
    SaverAlloc,
    SaverFatal,
    SaverFree,
    SaverPause,
    SaverResume,
    SaverTouch,
)

_ABSENT = object()


class IndexedRunView(RunView):
    """A `RunView` that knows, after each event, who holds and lacks what by tag.

    What `trainer_holds` and `trainer_lacks` return is live: it changes with the next event.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_rank: dict[tuple[str, int], dict[Held, None]] = {}
        self._kept: frozenset[str] = frozenset()
        self._reset()

    def _reset(self) -> None:
        self._held: dict[Held, Any] = {}
        self._held_of: dict[str, dict[Held, None]] = {}
        self._lacked_of: dict[str, dict[Held, None]] = {}
        self._engine: dict[tuple[str, bool], int] = {}
        self._copied_bytes = {True: 0, False: 0}
        self._put: dict[Held, tuple[str, bool, int]] = {}
        for held in self.allocations:
            self._place(held)

    # ---- what rules ask

    def engine_holds(self, *tags: str) -> set[str]:
        return {tag for tag in tags if self._engine.get((tag, False))}

    def engine_has(self, tag: str) -> bool:
        return bool(self._engine.get((tag, False)))

    def engine_lacks(self, *tags: str) -> set[str]:
        return {tag for tag in tags if self._engine.get((tag, True))}

    def engine_without(self, tag: str) -> bool:
        return bool(self._engine.get((tag, True)))

    def trainer_holds(self, tag: str | None = None) -> Any:
        return self._held if tag is None else self._held_of.get(tag, {})

    def trainer_lacks(self, tag: str) -> Any:
        return self._lacked_of.get(tag, {})

    def host_bytes(self, owner: str) -> int:
        return self._copied_bytes[owner == ENGINE]

    # ---- the index

    def _place(self, held: Held) -> None:
        made, out, engine = self.allocations[held], held in self.out, held[0] == ENGINE
        copied = made.nbytes if out and made.backup else 0
        self._put[held] = (made.tag, out, copied)
        self._copied_bytes[engine] += copied
        self.by_rank.setdefault(held[:2], {})[held] = None
        if engine:
            self._engine[made.tag, out] = self._engine.get((made.tag, out), 0) + 1
        elif out:
            self._lacked_of.setdefault(made.tag, {})[held] = None
        elif held[1] not in self.dead and held not in self.transport and made.kind not in self._kept:
            self._held[held] = None
            self._held_of.setdefault(made.tag, {})[held] = None

    def _take(self, held: Held) -> None:
        put = self._put.pop(held, None)
        if put is None:
            return
        tag, out, copied = put
        engine = held[0] == ENGINE
        self._copied_bytes[engine] -= copied
        self.by_rank[held[:2]].pop(held, None)
        if engine:
            self._engine[tag, out] -= 1
        elif out:
            self._lacked_of[tag].pop(held, None)
        else:
            self._held.pop(held, None)
            self._held_of.get(tag, {}).pop(held, None)

    # ---- the fold

    def handlers(self, kind: type[Event]) -> list[Callable[[Any], None]]:
        plain = super().handlers(kind)
        if kind is SaverPause:
            return [self._paused]
        if kind is SaverResume:
            return [self._resumed]
        if kind in (SaverAlloc, SaverFree):
            return [self._placed(plain[0])]
        if kind in (SaverFatal, SaverTouch):
            return [self._died_of]
        return [*plain, lambda _: self._claimed()] if kind is ClaimsStated else plain

    def _placed(self, plain: Callable[[Any], None]) -> Callable[[Any], None]:
        def apply(event: Any) -> None:
            held = (event.owner, event.rank, event.alloc)
            self._take(held)
            plain(event)
            if held in self.allocations:
                self._place(held)

        return apply

    def _paused(self, event: SaverPause) -> None:
        held = (event.owner, event.rank, event.alloc)
        if held in self.out:
            return
        self.out.add(held)
        made = self.allocations.get(held)
        if made is None:
            return
        tag, engine = made.tag, held[0] == ENGINE
        copied = made.nbytes if made.backup else 0
        self._put[held] = (tag, True, copied)
        self._copied_bytes[engine] += copied
        if engine:
            self._engine[tag, False] -= 1
            self._engine[tag, True] = self._engine.get((tag, True), 0) + 1
            return
        if self._held.pop(held, _ABSENT) is None:
            del self._held_of[tag][held]
        self._lacked_of.setdefault(tag, {})[held] = None

    def _resumed(self, event: SaverResume) -> None:
        held = (event.owner, event.rank, event.alloc)
        if held not in self.out:
            return
        self.out.discard(held)
        made = self.allocations.get(held)
        if made is None:
            return
        tag, engine = made.tag, held[0] == ENGINE
        self._copied_bytes[engine] -= self._put[held][2]
        self._put[held] = (tag, False, 0)
        if engine:
            self._engine[tag, True] -= 1
            self._engine[tag, False] = self._engine.get((tag, False), 0) + 1
            return
        del self._lacked_of[tag][held]
        if held[1] not in self.dead and held not in self.transport and made.kind not in self._kept:
            self._held[held] = None
            self._held_of.setdefault(tag, {})[held] = None

    def _claimed(self) -> None:
        kept = frozenset(RESIDENT_KINDS[c] for c in self.claims.get("resident_while_released", ()))
        if kept != self._kept:
            self._kept = kept
            self._reset()

    def _died_of(self, event: Any) -> None:
        if event.owner:
            return
        super()._died(event)
        self._again(event.rank)

    def _again(self, rank: int) -> None:
        for held in list(self.by_rank.get(("", rank), ())):
            self._take(held)
            self._place(held)

    def replaced(self, owner: str, rank: int) -> None:
        """Another process has this place: what the one before it had is gone."""
        for held in list(self.by_rank.get((owner, rank), ())):
            self._take(held)
            for known in (self.allocations, self._engines):
                known.pop(held, None)
            self.out.discard(held)
            self.transport.discard(held)
        if not owner:
            self.dead.discard(rank)
            _drop(self.calls, rank, self.under_way)


class IndexedTransport(TransportIsCollected):
    """HO-13 over an `IndexedRunView`."""

    view: IndexedRunView

    def _resident(self, rank: int) -> dict[Held, int]:
        view = self.view
        return {h: view.allocations[h].nbytes for h in view.by_rank.get(("", rank), ()) if h not in view.out}

"""The view of a whole run for many ranks: the same answers as `RunView`, each in time that ranks do not lengthen.

Knows how to keep by tag what `RunView` counts anew at every question. Knows no rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from colocert.rules.handoff_state import TransportIsCollected
from colocert.rules.run import ENGINE, Held, RunView
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


class _Distinct(dict[Any, str]):
    """A dict whose `values()` are the distinct ones: rules only ask which there are."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[str] = Counter()

    def __setitem__(self, key: Any, value: str) -> None:
        if key in self:
            self._less(self[key])
        super().__setitem__(key, value)
        self._counts[value] += 1

    def pop(self, key: Any, default: Any = None) -> Any:
        value = super().pop(key, None)
        if value is None:
            return default
        self._less(value)
        return value

    def values(self) -> Any:
        return self._counts.keys()

    def _less(self, value: str) -> None:
        self._counts[value] -= 1
        if not self._counts[value]:
            del self._counts[value]


class IndexedRunView(RunView):
    """A `RunView` that knows, after each event, who holds and lacks what by tag.

    What `trainer_holds` and `trainer_lacks` return is live: it changes with the next event.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = _Distinct()
        self.outstanding = _Distinct()
        self.by_rank: dict[tuple[str, int], dict[Held, None]] = {}
        self._kept: frozenset[str] = frozenset()
        self._reset()

    def _reset(self) -> None:
        self._held: dict[Held, None] = {}
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

    def engine_lacks(self, *tags: str) -> set[str]:
        return {tag for tag in tags if self._engine.get((tag, True))}

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
        if kind in (SaverAlloc, SaverFree, SaverPause, SaverResume):
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

    def _claimed(self) -> None:
        kept = frozenset(RESIDENT_KINDS[c] for c in self.claims.get("resident_while_released", ()))
        if kept != self._kept:
            self._kept = kept
            self._reset()

    def _died_of(self, event: Any) -> None:
        if event.owner:
            return
        self.faults += 1
        self.dead.add(event.rank)
        self.calls.pop(event.rank, None)
        for key in [k for k in self.outstanding if k[:2] == ("", event.rank)]:
            self.outstanding.pop(key)
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
            self.calls.pop(rank, None)


class IndexedTransport(TransportIsCollected):
    """HO-13 over an `IndexedRunView`."""

    view: IndexedRunView

    def _resident(self, rank: int) -> dict[Held, int]:
        view = self.view
        return {h: view.allocations[h].nbytes for h in view.by_rank.get(("", rank), ()) if h not in view.out}

"""The view of a whole run for many ranks: the same answers as `RunView`, each in time that ranks do not lengthen.

Knows how to keep by tag what `RunView` counts anew at every question. Knows no rule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from colocert.rules.handoff_state import TransportIsCollected
from colocert.rules.run import DEFAULT, ENGINE, Held, RunView, _drop
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
from colocert.trace.ledger import Allocation


class _Spot:
    """Where the index counts an allocation: the engine's or the trainer's, under its tag, with so many copied bytes."""

    __slots__ = ("copied", "engine", "kind", "lacked", "mine", "tag")

    def __init__(self, made: Allocation, engine: bool, mine: dict[Held, None], lacked: dict[Held, None]) -> None:
        self.tag, self.kind, self.engine = made.tag, made.kind, engine
        self.copied = made.nbytes if made.backup else 0
        self.mine, self.lacked = mine, lacked


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
        self._held: dict[Held, None] = {}
        self._held_of: defaultdict[str, dict[Held, None]] = defaultdict(dict)
        self._lacked_of: defaultdict[str, dict[Held, None]] = defaultdict(dict)
        self._engine_in: defaultdict[str, int] = defaultdict(int)
        self._engine_out: defaultdict[str, int] = defaultdict(int)
        self._trainer_copied = self._engine_copied = 0
        self._spots: dict[Held, _Spot] = {}
        for held in self.allocations:
            self._place(held)

    # ---- what rules ask

    def engine_holds(self, *tags: str) -> set[str]:
        return {tag for tag in tags if self._engine_in.get(tag)}

    def engine_has(self, tag: str) -> bool:
        return self._engine_in.get(tag, 0) > 0

    def engine_lacks(self, *tags: str) -> set[str]:
        return {tag for tag in tags if self._engine_out.get(tag)}

    def engine_without(self, tag: str) -> bool:
        return self._engine_out.get(tag, 0) > 0

    def trainer_holds(self, tag: str | None = None) -> Any:
        return self._held if tag is None else self._held_of.get(tag, {})

    def trainer_lacks(self, tag: str) -> Any:
        return self._lacked_of.get(tag, {})

    def lacks_trainer_default(self) -> bool:
        return bool(self._lacked_of.get(DEFAULT))

    def host_bytes(self, owner: str) -> int:
        return self._engine_copied if owner == ENGINE else self._trainer_copied

    # ---- the index

    def _place(self, held: Held) -> None:
        made, engine = self.allocations[held], held[0] == ENGINE
        spot = _Spot(made, engine, self._held_of[made.tag], self._lacked_of[made.tag])
        self._spots[held] = spot
        self.by_rank.setdefault(held[:2], {})[held] = None
        if held in self.out:
            self._count_out(held, spot)
        else:
            self._count_in(held, spot)

    def _take(self, held: Held) -> None:
        spot = self._spots.pop(held, None)
        if spot is None:
            return
        self.by_rank[held[:2]].pop(held, None)
        if held in self.out:
            self._leave_out(held, spot)
        else:
            self._leave_in(held, spot)

    def _count_in(self, held: Held, spot: _Spot) -> None:
        if spot.engine:
            self._engine_in[spot.tag] += 1
        elif held[1] not in self.dead and held not in self.transport and spot.kind not in self._kept:
            self._held[held] = None
            spot.mine[held] = None

    def _leave_in(self, held: Held, spot: _Spot) -> None:
        if spot.engine:
            self._engine_in[spot.tag] -= 1
        elif held in self._held:
            del self._held[held]
            del spot.mine[held]

    def _count_out(self, held: Held, spot: _Spot) -> None:
        if spot.engine:
            self._engine_out[spot.tag] += 1
            self._engine_copied += spot.copied
        else:
            spot.lacked[held] = None
            self._trainer_copied += spot.copied

    def _leave_out(self, held: Held, spot: _Spot) -> None:
        if spot.engine:
            self._engine_out[spot.tag] -= 1
            self._engine_copied -= spot.copied
        else:
            del spot.lacked[held]
            self._trainer_copied -= spot.copied

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
        spot = self._spots.get(held)
        if spot is None:
            return
        if spot.engine:  # `_leave_in` and `_count_out`, written out: every second event of a hand-off comes here
            self._engine_in[spot.tag] -= 1
            self._engine_out[spot.tag] += 1
            self._engine_copied += spot.copied
            return
        if held in self._held:
            del self._held[held]
            del spot.mine[held]
        spot.lacked[held] = None
        self._trainer_copied += spot.copied

    def _resumed(self, event: SaverResume) -> None:
        held = (event.owner, event.rank, event.alloc)
        if held not in self.out:
            return
        self.out.remove(held)
        spot = self._spots.get(held)
        if spot is None:
            return
        if spot.engine:
            self._engine_out[spot.tag] -= 1
            self._engine_in[spot.tag] += 1
            self._engine_copied -= spot.copied
            return
        del spot.lacked[held]
        self._trainer_copied -= spot.copied
        if held[1] not in self.dead and held not in self.transport and spot.kind not in self._kept:
            self._held[held] = None
            spot.mine[held] = None

    def _claimed(self) -> None:
        kept = frozenset(RESIDENT_KINDS[c] for c in self.claims.get("resident_while_released", ()))
        if kept != self._kept:
            self._kept = kept
            self._reset()

    def _died_of(self, event: Any) -> None:
        """The rank's places are counted anew: what a dead rank holds is not held."""
        mine = [] if event.owner else list(self.by_rank.get(("", event.rank), ()))
        for held in mine:
            self._take(held)
        super()._died(event)
        for held in mine:
            self._place(held)

    def replaced(self, owner: str, rank: int) -> None:
        """Another process has this place: what the one before it had is gone."""
        for held in list(self.by_rank.get((owner, rank), ())):
            self._take(held)
            self._gone(held)
        if not owner:
            self.dead.discard(rank)
            _drop(self.calls, rank, self.under_way)


class IndexedTransport(TransportIsCollected):
    """HO-13 over an `IndexedRunView`."""

    view: IndexedRunView

    def _resident(self, rank: int) -> dict[Held, int]:
        view = self.view
        return {h: view.allocations[h].nbytes for h in view.by_rank.get(("", rank), ()) if h not in view.out}

"""Rules of weight syncs, groups, engines and frozen weights on a merged stream: each has a state of its own.

Knows which events are theirs alone, and which of the others they look at. Does not know rules or files. Nothing is
built before the first event that is theirs; a run without any costs a look at each event.

A group begins with what the trainers hold by then, an engine with what it holds. What is kept is bounded by roles,
kinds, ranks, tags and names of adapters; nothing grows with events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from colocert.rules.catalogue import FOLDS, Rule
from colocert.rules.fold import BaseFold, RunFold
from colocert.rules.run import ENGINE, RunView
from colocert.trace.events import (
    AnyEvent,
    CallBegin,
    CallEnd,
    CallRaise,
    ClaimsStated,
    Config,
    Data,
    EngineAsked,
    EngineToken,
    FolderSeen,
    MemorySeen,
    ModuleSeen,
    Move,
    ProcessEnded,
    SaverAlloc,
    SaverPause,
    SaverTouch,
    TensorsSeen,
)

SYNC, GROUP, SERVING, FROZEN = "adapter-sync", "group", "engine", "frozen-offload"
PROFILES = (SYNC, GROUP, SERVING, FROZEN)
SIDES = frozenset({"", ENGINE, "driver"})
"""Owners of events that the lifecycle and the hand-off look at; any other is a role of a weight sync."""

ACTORS = {"weight_sync": SYNC, "group": GROUP, "engine": SERVING, "offloader": FROZEN}
CALLS = frozenset({CallBegin, CallEnd, CallRaise})
STATED = frozenset({Config, ClaimsStated})
KINDS = {
    Move: SYNC,
    EngineAsked: SERVING,
    EngineToken: SERVING,
    FolderSeen: FROZEN,
    MemorySeen: FROZEN,
    ModuleSeen: FROZEN,
    ProcessEnded: FROZEN,
    TensorsSeen: FROZEN,
}
LOOKED_AT = frozenset(KINDS) | STATED
_OF_A_ROLE = frozenset({SaverAlloc, Data, SaverTouch})


class OutOfPlace(Exception):
    """An event cannot follow what came before it: what it lacks."""


class Apart:
    """The folds of these rules. `takes` every event that may concern them; `open` once there is something to judge."""

    def __init__(self, rules: Iterable[Rule], made: Callable[[type[BaseFold], Any], BaseFold], memory: RunView) -> None:
        self._kinds: dict[str, list[type[BaseFold]]] = {}
        for rule in rules:
            self._kinds.setdefault(rule.profile, []).append(FOLDS[rule.id])
        self._made, self._memory = made, memory
        self._view = RunView()
        self._panels: dict[tuple[str, int], list[BaseFold]] = {}
        self.open = False

    @property
    def profiles(self) -> list[str]:
        """The profiles of which something has been seen."""
        return sorted({profile for profile, _ in self._panels})

    @property
    def folds(self) -> Iterator[BaseFold]:
        for folds in self._panels.values():
            yield from folds

    def takes(self, event: AnyEvent) -> bool:
        """Moves the folds past one event, and returns whether it is nobody else's.

        Raises `OutOfPlace` where it does not fit what came before.
        """
        if isinstance(event, (Config, ClaimsStated)):
            event = self._merged(event)
        profile = _whose(event)
        if profile in self._kinds:
            self._panel(profile, event)
        for (mine, rank), folds in self._panels.items():
            if _concerns(mine, rank, event):
                self._feed(folds, event)
        return profile != ""

    def _feed(self, folds: list[BaseFold], event: AnyEvent) -> None:
        kind = event.__class__
        try:
            for fold in folds:
                if kind in fold.sees:
                    fold.on(event)
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise OutOfPlace(
                f"a {kind.__name__} event must follow the ones that {folds[0].rule} and its like need (got {error!r})"
            ) from error

    def _merged(self, event: Config | ClaimsStated) -> AnyEvent:
        """What all files together state, so far."""
        before = self._view.config if isinstance(event, Config) else self._view.claims
        event = type(event)({**event.facts, **before})
        self._view.apply(event)
        return event

    def _panel(self, profile: str, event: AnyEvent) -> None:
        key = profile, event.rank if profile == SERVING else 0
        if key in self._panels:
            return
        self.open = True
        folds = self._panels[key] = [self._made(kind, self._view) for kind in self._kinds[profile]]
        stated: list[AnyEvent] = [Config(self._view.config), ClaimsStated(self._view.claims)]
        for known in [*stated, *self._held(*key)]:
            self._feed(folds, known)

    def _held(self, profile: str, rank: int) -> Iterator[AnyEvent]:
        """What the trainers or that engine hold by now, as events."""
        side = {GROUP: "", SERVING: ENGINE}.get(profile)
        for held, a in self._memory.allocations.items():
            if held[0] == side and (profile == GROUP or held[1] == rank):
                place: Any = {"rank": held[1], "owner": held[0]}
                yield SaverAlloc(a.tag, a.name, a.nbytes, a.backup, a.kind, **place)
                if held in self._memory.out:
                    yield SaverPause(a.tag, a.name, a.nbytes, a.backup, 0, **place)


def _whose(event: AnyEvent) -> str:
    """The profile that alone looks at this event; empty where others do too."""
    kind = event.__class__
    if kind in KINDS:
        return KINDS[kind]
    if kind in CALLS and (actor := event.actor) in ACTORS:  # type: ignore[union-attr]
        return ACTORS[actor]
    return "" if event.owner in SIDES else SYNC


def _concerns(profile: str, rank: int, event: AnyEvent) -> bool:
    """Whether the rules of a profile look at this event, if they see its kind at all."""
    kind = event.__class__
    if kind in STATED:
        return True
    if kind in CALLS:
        actor = event.actor  # type: ignore[union-attr]
        if profile == GROUP:
            return actor == GROUP or (actor not in ACTORS and actor not in ("driver", "critic"))
        return ACTORS.get(actor) == profile and (profile != SERVING or event.rank == rank)
    if profile == SERVING:
        return event.owner == ENGINE and event.rank == rank
    if profile == SYNC:
        return kind not in _OF_A_ROLE or event.owner not in SIDES
    return event.owner == ""


def folds_of(rules: Iterable[Rule]) -> list[Rule]:
    """Those of these rules that are judged here."""
    return [rule for rule in rules if rule.profile in PROFILES and issubclass(FOLDS[rule.id], RunFold)]


__all__ = ["PROFILES", "Apart", "OutOfPlace", "folds_of"]

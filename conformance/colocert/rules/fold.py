"""What a rule is: a fold over events that collects findings and counts how often its condition occurred.

Knows the shape of a fold and of a finding, and how a fold's state is copied and compared (exploration shares prefixes
of sequences). Does not know any rule, scenario or double.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import msgspec

from colocert.rules.run import RunView
from colocert.rules.view import View
from colocert.trace.events import AnyEvent, CallBegin, CallEnd, CallRaise, ClaimsStated, Config, Event

Self = TypeVar("Self", bound="BaseFold")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One violation: the rule, the code of how it was broken, the offending event, what was expected and observed."""

    rule: str
    code: str
    rank: int
    seq: int
    expected: str
    observed: str


class BaseFold:
    """One rule over one trace: of one rank (`Fold`) or of a whole run (`RunFold`).

    Timeline: built with the trace's view; `on(event)` for each event, after the view has moved past it; `end()` once.
    A subclass reports with `found` and counts with `met`, and names the events it `sees`, or with `by_kind` the method
    for each of them. Its state is plain attributes that hold immutable values or containers of such, because
    exploration copies and compares them; `within_call` names those that every `call.begin` sets anew, so that they do
    not tell states apart between calls. Of calls it sees only those of its `actors`, if it names some.
    """

    rule: ClassVar[str]
    sees: ClassVar[tuple[type[Event], ...]]
    by_kind: ClassVar[Mapping[type[Event], str]] = MappingProxyType({})
    within_call: ClassVar[frozenset[str]] = frozenset()
    actors: ClassVar[frozenset[str] | None] = None
    _apart = frozenset({"view", "findings", "exercised"})
    view: Any

    def __init_subclass__(cls) -> None:
        if "by_kind" in cls.__dict__:
            cls.sees = tuple(cls.by_kind)

    def __init__(self, view: Any) -> None:
        self.view = view
        self.findings: list[Finding] = []
        self.exercised: dict[str, int] = {}

    def on(self, event: AnyEvent) -> None:
        """Sees one event."""
        self.seeing(type(event))(event)

    def seeing(self, kind: type[Event]) -> Callable[[Any], None]:
        """What sees an event of this type."""
        if type(self).on is not BaseFold.on:
            return self.on
        if kind not in self.by_kind:
            raise NotImplementedError(f"{type(self).__name__} must define on(), or name in by_kind what sees {kind}")
        own: Callable[[Any], None] = getattr(self, self.by_kind[kind])
        return own

    def end(self) -> None:
        """Sees the end of the trace. Most rules have nothing to add."""

    def idle(self) -> bool:
        """Whether the configuration and the claims as they are leave this rule nothing to look at."""
        return False

    def unsaid(self) -> bool:
        """Whether `end` may have something to say, of an event that was seen."""
        return type(self).end is not BaseFold.end

    def met(self, code: str) -> None:
        """The condition under which `code` could be found has occurred."""
        self.exercised[code] = self.exercised.get(code, 0) + 1

    def found(self, event: AnyEvent, code: str, expected: str, observed: str) -> None:
        """A violation at `event`, which is an occurrence of the condition even if none was counted."""
        self.exercised.setdefault(code, 1)
        self.findings.append(
            Finding(rule=self.rule, code=code, rank=event.rank, seq=event.seq, expected=expected, observed=observed)
        )

    def clone(self: Self, view: Any) -> Self:
        """A copy with the same state over a copy of the view; findings and counts start anew."""
        new = object.__new__(type(self))
        state = new.__dict__
        for name, value in self.__dict__.items():
            state[name] = value.copy() if isinstance(value, (dict, set, list)) else value
        new.view, new.findings, new.exercised = view, [], {}
        return new

    def key(self) -> tuple[Any, ...]:
        """The state as a hashable value: what later findings can depend on."""
        apart = self._apart | self.within_call
        return tuple(_frozen(v) for k, v in sorted(self.__dict__.items()) if k not in apart)


class Fold(BaseFold):
    """One rule over one rank."""

    view: View

    def __init__(self, view: View) -> None:
        super().__init__(view)


class RunFold(BaseFold):
    """One rule over a whole run: every rank and engine, in the order in which things happened."""

    view: RunView

    def __init__(self, view: RunView) -> None:
        super().__init__(view)


Handlers = tuple[Callable[[Any], None], ...]
_CALLS = frozenset({CallBegin, CallEnd, CallRaise})
_CONFIGURES = frozenset({Config, ClaimsStated})
_ACTORS = 64
"""Actors that are told apart; a run has four."""


class Panel:
    """Several folds over one view; an event goes to those that see its type and are not idle.

    `table` holds, by type, what an event is given to; of calls by actor.
    """

    __slots__ = ("_idle", "folds", "table", "view")

    def __init__(self, view: View | RunView, folds: Sequence[BaseFold]) -> None:
        self.view, self.folds = view, list(folds)
        self.table: dict[type[Event], Handlers | dict[str, Handlers]] = {}
        self._idle = [fold.idle() for fold in self.folds]

    def feed(self, event: AnyEvent) -> None:
        """Moves the view and then the folds past one event."""
        calls: Any = self.table.get(event.__class__)
        if calls.__class__ is dict:
            calls = calls.get(event.actor)  # type: ignore[union-attr]
        for call in self.handlers(event) if calls is None else calls:
            call(event)

    def handlers(self, event: AnyEvent) -> Handlers:
        """What an event like this one is given to."""
        kind = event.__class__
        known = self.table.get(kind)
        if isinstance(known, dict):
            calls = known.get(event.actor)  # type: ignore[union-attr]
            return self._called(known, event) if calls is None else calls
        if known is None and kind in _CALLS and any(fold.actors for fold in self.folds):
            by_actor: dict[str, Handlers] = {}
            self.table[kind] = by_actor
            return self._called(by_actor, event)
        if known is None:
            known = self.table[kind] = self._made(kind, None)
        return known

    def _called(self, known: dict[str, Handlers], event: Any) -> Handlers:
        calls = self._made(event.__class__, event.actor)
        if len(known) < _ACTORS:
            known[event.actor] = calls
        return calls

    def _made(self, kind: type[Event], actor: str | None) -> Handlers:
        seeing = [
            fold.seeing(kind)
            for fold, idle in zip(self.folds, self._idle, strict=True)
            if kind in fold.sees and not idle and (actor is None or fold.actors is None or actor in fold.actors)
        ]
        configured = [self._configured] if kind in _CONFIGURES else []
        return (*self.view.handlers(kind), *configured, *seeing)

    def _configured(self, event: AnyEvent) -> None:
        """Folds may be idle from here on, or may be no longer."""
        idle = [fold.idle() for fold in self.folds]
        if idle != self._idle:
            self._idle = idle
            self.table.clear()

    def clone(self) -> Panel:
        """A copy between two calls, of one rank's panel."""
        assert isinstance(self.view, View)
        view = self.view.clone()
        return Panel(view, [fold.clone(view) for fold in self.folds])

    def key(self) -> tuple[Any, ...]:
        """The state of the view and of every fold."""
        assert isinstance(self.view, View)
        return (self.view.key(), *(fold.key() for fold in self.folds))


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(sorted(value.items()))
    if isinstance(value, set):
        return tuple(sorted(value))
    return tuple(value) if isinstance(value, list) else value

"""What a rule is: a fold over events that collects findings and counts how often its condition occurred.

Knows the shape of a fold and of a finding, and how a fold's state is copied and compared (exploration shares prefixes
of sequences). Does not know any rule, scenario or double.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec

from colocert.rules.run import RunView
from colocert.rules.view import View
from colocert.trace.events import AnyEvent, Event

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
    A subclass reports with `found` and counts with `met`, and names the events it `sees`. Its state is plain
    attributes that hold immutable values or containers of such, because exploration copies and compares them;
    `within_call` names those that every `call.begin` sets anew, so that they do not tell states apart between calls.
    """

    rule: ClassVar[str]
    sees: ClassVar[tuple[type[Event], ...]]
    within_call: ClassVar[frozenset[str]] = frozenset()
    _apart = frozenset({"view", "findings", "exercised"})
    view: Any

    def __init__(self, view: Any) -> None:
        self.view = view
        self.findings: list[Finding] = []
        self.exercised: dict[str, int] = {}

    def on(self, event: AnyEvent) -> None:
        """Sees one event."""
        raise NotImplementedError(f"{type(self).__name__} must define on()")

    def end(self) -> None:
        """Sees the end of the trace. Most rules have nothing to add."""

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


class Panel:
    """Several folds over one view; an event goes to those that see its type."""

    __slots__ = ("_by_type", "folds", "view")

    def __init__(self, view: View | RunView, folds: Sequence[BaseFold]) -> None:
        self.view, self.folds = view, list(folds)
        self._by_type: dict[type[Event], tuple[Callable[[Any], None], ...]] = {}

    def feed(self, event: AnyEvent) -> None:
        """Moves the view and then the folds past one event."""
        kind = event.__class__
        calls = self._by_type.get(kind)
        if calls is None:
            seeing = [fold.on for fold in self.folds if kind in fold.sees]
            calls = self._by_type[kind] = (*self.view.handlers(kind), *seeing)
        for call in calls:
            call(event)

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

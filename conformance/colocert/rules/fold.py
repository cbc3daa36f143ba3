"""What a rule is: a fold over events that collects findings and counts how often its condition occurred.

Knows the shape of a fold and of a finding, and how a fold's state is copied and compared (exploration shares prefixes
of sequences). Does not know any rule, scenario or double.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar, TypeVar

import msgspec

from colocert.rules.view import View
from colocert.trace.events import AnyEvent

Self = TypeVar("Self", bound="Fold")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One violation: the rule, the code of how it was broken, the offending event, what was expected and observed."""

    rule: str
    code: str
    rank: int
    seq: int
    expected: str
    observed: str


class Fold:
    """One rule over one trace.

    Timeline: built with the trace's view; `on(event)` for each event, after the view has moved past it; `end()` once.
    A subclass reports with `found` and counts with `met`. Its state is plain attributes that hold immutable values or
    containers of such, because exploration copies and compares them.
    """

    rule: ClassVar[str]
    _apart = frozenset({"view", "findings", "exercised"})

    def __init__(self, view: View) -> None:
        self.view = view
        self.findings: list[Finding] = []
        self.exercised: Counter[str] = Counter()

    def on(self, event: AnyEvent) -> None:
        """Sees one event."""
        raise NotImplementedError

    def end(self) -> None:
        """Sees the end of the trace. Most rules have nothing to add."""

    def met(self, code: str) -> None:
        """The condition under which `code` could be found has occurred."""
        self.exercised[code] += 1

    def found(self, event: AnyEvent, code: str, expected: str, observed: str) -> None:
        """A violation at `event`."""
        self.exercised[code] += 1
        self.findings.append(
            Finding(rule=self.rule, code=code, rank=event.rank, seq=event.seq, expected=expected, observed=observed)
        )

    def clone(self: Self, view: View) -> Self:
        """A copy with the same state over a copy of the view; findings and counts start anew."""
        new = type(self)(view)
        for name, value in vars(self).items():
            if name not in self._apart:
                setattr(new, name, value.copy() if isinstance(value, (dict, set, list)) else value)
        return new

    def key(self) -> tuple[Any, ...]:
        """The state as a hashable value: what later findings can depend on."""
        return tuple(_frozen(v) for k, v in sorted(vars(self).items()) if k not in self._apart)


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(sorted(value.items()))
    if isinstance(value, set):
        return frozenset(value)
    return tuple(value) if isinstance(value, list) else value

"""The state of a rank's view and folds as a whole: copied, compared, and with its contents renamed.

Knows what such a state is made of: plain values and containers of them, a ledger, a call. Does not know any rule, nor
what a state is good for.
"""

from __future__ import annotations

from typing import Any

from colocert.rules.fold import Panel
from colocert.rules.view import Call
from colocert.trace.ledger import Ledger

_ATOMS = frozenset({str, int, bool, float, bytes, type(None)})


class Token(str):
    """The name of a content within the kept states."""

    __slots__ = ()


def twin(panel: Panel) -> Panel:
    """A copy that stands where the panel stands, within a call or not."""
    view = _copied(panel.view, None)
    return Panel(view, [_copied(fold, view) for fold in panel.folds])


def _copied(holder: Any, view: Any) -> Any:
    new = object.__new__(type(holder))
    for name, value in holder.__dict__.items():
        new.__dict__[name] = _copy(value)
    if view is not None:
        new.view, new.findings, new.exercised = view, [], {}
    return new


def _copy(value: Any) -> Any:
    if isinstance(value, (dict, set, list)):
        return value.copy()
    if isinstance(value, (Ledger, Call)):
        new = object.__new__(type(value))
        for name in value.__slots__:
            setattr(new, name, _copy(getattr(value, name)))
        return new
    return value


def frozen(panel: Panel, names: dict[Token, int]) -> Any:
    """The state as a hashable value, contents numbered in the order in which they come up."""
    folds = (
        tuple(_value(v, names) for k, v in fold.__dict__.items() if k not in ("view", "findings", "exercised"))
        for fold in panel.folds
    )
    return (tuple(_value(v, names) for v in panel.view.__dict__.values()), *folds)


def _value(value: Any, names: dict[Token, int]) -> Any:
    if value.__class__ in _ATOMS:
        return value
    if value.__class__ is Token:
        return (names.setdefault(value, len(names)),)
    if isinstance(value, dict):
        return tuple((_value(k, names), _value(v, names)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_value(v, names) for v in value)
    if isinstance(value, (set, frozenset)):
        return frozenset(value)
    if isinstance(value, Call):
        first = min((number for _, number in (*value.paused, *value.resumed)), default=0)
        moves = [tuple((name, number - first) for name, number in m) for m in (value.paused, value.resumed)]
        rest = (_value(getattr(value, n), names) for n in Call.__slots__ if n not in ("paused", "resumed"))
        return (*moves, *rest)
    if isinstance(value, Ledger):
        return tuple(_value(getattr(value, n), names) for n in Ledger.__slots__ if not n.startswith("peak"))
    raise TypeError(f"a fold's state must be of plain values and containers (got {type(value).__name__})")


def renamed(value: Any, names: dict[Token, str]) -> Any:
    """A value with its contents under their own names."""
    if isinstance(value, Token):
        return names[value]
    if isinstance(value, dict):
        return {k: renamed(v, names) for k, v in value.items()}
    return [renamed(v, names) for v in value] if isinstance(value, list) else value

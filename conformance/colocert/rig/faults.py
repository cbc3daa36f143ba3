"""Fault points: named places where the suite can make the world fail, before or after an effect.

Knows which points were passed and which one is armed. Does not know what a fault is good for.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from colocert.trace.events import Event, Fault


class InjectedFault(RuntimeError):
    """An error that the suite injected at a fault point."""


class SaverRefused(RuntimeError):
    """The saver raised before it moved anything: a fault of the kind *refused*."""


class Faults:
    """The plan of one scenario: at most one armed fault, which goes off once.

    `passed` lists the points in the order they were passed, each with the ways it can fail.
    """

    __slots__ = ("_emit", "_nth", "_point", "_when", "passed")

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._point, self._when, self._nth = "", "", 0
        self.passed: list[tuple[str, tuple[str, ...]]] = []

    def arm(self, point: str, when: str, nth: int = 1) -> None:
        """The nth time from now that `point` is passed it fails: `before` or `after` its effect, or `refused`.

        `saver.pause` stands for every tag's `saver.pause.TAG`, and so on: a point or any dotted part of its beginning;
        `*` stands for every point.
        """
        self._point, self._when, self._nth = point, when, nth

    def disarm(self) -> bool:
        """Takes back a fault that did not go off; returns whether there was one."""
        waiting, self._point = bool(self._point), ""
        return waiting

    def refuse(self, point: str, refusal: Event) -> None:
        """A point of the saver: writes `refusal` and raises `SaverRefused` if it is armed."""
        self.passed.append((point, ("refused",)))
        if self._armed(point) and self._due("refused", point):
            self._emit(refusal)
            raise SaverRefused(f"{point} refused by the suite; nothing was moved")

    def point(self, name: str) -> _Point:
        """A context manager around an effect: raises `InjectedFault` before or after it if armed."""
        self.passed.append((name, ("before", "after")))
        return _Point(self, name)

    def _armed(self, point: str) -> bool:
        return bool(self._point) and (self._point in (point, "*") or point.startswith(self._point + "."))

    def _due(self, when: str, point: str) -> bool:
        if self._when != when:
            return False
        self._nth -= 1
        if self._nth:
            return False
        self._emit(Fault(point=point, when=when))
        self._point = ""
        return True


class _Point:
    __slots__ = ("_faults", "_name")

    def __init__(self, faults: Faults, name: str) -> None:
        self._faults, self._name = faults, name

    def __enter__(self) -> None:
        if self._faults._armed(self._name) and self._faults._due("before", self._name):
            raise InjectedFault(f"{self._name}: injected before its effect")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._faults._armed(self._name) and self._faults._due("after", self._name):
            raise InjectedFault(f"{self._name}: injected after its effect")

"""Issuing, performing and acknowledging a call: what trainer handles and engines have in common as callees.

Knows the three events of a call that a driver issues. Does not know what a call does.
"""

from __future__ import annotations

import abc
import itertools
from typing import Any

from colocert.trace.events import Ack, CallIssue, Event


class Callee(abc.ABC):
    """Something that a driver calls. A plain call is issued, performed and acknowledged at once."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    @abc.abstractmethod
    def emit(self, event: Event) -> None:
        """Writes an event of this callee."""

    def issue(self, method: str) -> int:
        """The call was issued; returns its number."""
        number = next(self._numbers)
        self.emit(CallIssue(method, number))
        return number

    def perform(self, method: str, call: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call takes effect."""
        return getattr(self, method)(*args, **kwargs)

    def acknowledge(self, call: int) -> None:
        """The caller may know that the call is done."""
        self.emit(Ack(call))

"""Named checks: what was expected, what was got, how far apart they may lie.

A red row says which of its checks are red and with what numbers; a seeded fault is caught by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """One statement about what was measured. `tolerance` is for numbers; anything else has to be equal."""

    name: str
    expected: Any
    got: Any
    tolerance: float = 0

    @property
    def green(self) -> bool:
        if self.tolerance and _number(self.expected) and _number(self.got):
            return bool(abs(self.got - self.expected) <= self.tolerance)
        return bool(self.got == self.expected)

    def json(self) -> dict[str, Any]:
        return {**asdict(self), "green": self.green}

    def __str__(self) -> str:
        within = f" within {self.tolerance}" if self.tolerance else ""
        return f"{self.name}: must be {self.expected!r}{within} (got {self.got!r})"


class RowRed(AssertionError):
    """A row whose checks did not all hold. `red` holds those that did not; `words` what children said in the end."""

    def __init__(self, row: str, red: list[Check], words: Sequence[str] = ()) -> None:
        super().__init__("\n".join([f"{row} is red:", *(f"  {check}" for check in red), *words]))
        self.row, self.red = row, red

    @property
    def names(self) -> set[str]:
        return {check.name for check in self.red}


def check(name: str, expected: Any, got: Any, tolerance: float = 0) -> Check:
    """A value, compared with what it must be."""
    return Check(name, expected, got, tolerance)


def at_most(name: str, limit: float, got: float) -> Check:
    """A number with an upper bound."""
    return Check(name, f"at most {limit}", f"at most {limit}" if got <= limit else got)


def bytes_moved(name: str, expected: int | None, moved: dict[str, Any] | None) -> Check:
    """Bytes that an operation freed (or took, as a negative number), by instruments of which two must agree.

    `moved` is what `Port.moved` measured in the child. Where no two instruments agree, that is what is got.
    """
    if not moved:
        return Check(name, expected, "nothing was measured")
    if moved["bytes"] is None:
        seen = {name: moved[name] for name in ("free", "own", "ledger")}
        return Check(name, expected, f"no two instruments agree: {seen}")
    return Check(name, expected, moved["bytes"], moved["tolerance"])


def bytes_taken(name: str, expected: int | None, moved: dict[str, Any] | None) -> Check:
    """The same of an operation that must take `expected` bytes."""
    return bytes_moved(name, None if expected is None else -expected, moved)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

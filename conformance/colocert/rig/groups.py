"""The process-group double: which groups exist, with what they were created, and whether a use finds one.

Knows groups by name and their arguments. Does not know collectives, ranks' processes or any backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from colocert.rig.faults import Faults
from colocert.trace.events import Change, Event, GroupCreate, GroupDestroy, GroupUse

STANDARD_GROUPS: Mapping[str, Mapping[str, Any]] = {
    "world": {"ranks": [0, 1, 2, 3], "backend": "nccl", "timeout": 1800, "options": {}},
    "data": {"ranks": [0, 2], "backend": "nccl", "timeout": 900, "options": {"is_high_priority_stream": True}},
    "control": {"ranks": [0, 1, 2, 3], "backend": "gloo", "timeout": 7200, "options": {}},
}
"""What exists before the factory runs where `rig.config.groups` is "present"; they differ in every argument. Timeouts
are seconds."""


class GroupGone(RuntimeError):
    """A group that does not exist was used or torn down."""


class ProcessGroups:
    """Groups by name. `create` and `destroy` are fault points `groups.create` and `groups.destroy`."""

    def __init__(self, emit: Callable[[Event], None], faults: Faults) -> None:
        self._emit, self._faults = emit, faults
        self.alive: dict[str, dict[str, Any]] = {}

    def create(
        self,
        name: str,
        *,
        ranks: list[int],
        backend: str,
        timeout: int,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Creates a group; `timeout` in seconds. Raises `ValueError` if one of that name exists."""
        if name in self.alive:
            raise ValueError(f"group {name} already exists")
        args = {"ranks": list(ranks), "backend": backend, "timeout": timeout, "options": dict(options or {})}
        with self._faults.point("groups.create"):
            self.alive[name] = args
            self._emit(GroupCreate(name, args))

    def destroy(self, name: str) -> None:
        """Tears a group down. Raises `GroupGone` if there is none of that name."""
        if name not in self.alive:
            raise GroupGone(f"group {name} does not exist: it was never created or is already torn down")
        with self._faults.point("groups.destroy"):
            del self.alive[name]
            self._emit(GroupDestroy(name))

    def arguments(self) -> dict[str, dict[str, Any]]:
        """The groups that exist now, each with the arguments it was created with; yours to keep."""
        return {name: {**args, "ranks": list(args["ranks"])} for name, args in self.alive.items()}

    def use(self, name: str) -> None:
        """Runs a collective on a group. Raises `GroupGone` if there is none of that name."""
        self._emit(GroupUse(name, name in self.alive))
        if name not in self.alive:
            raise GroupGone(f"a collective ran on group {name}, which does not exist")

    def take_away(self) -> None:
        """The suite removes every group behind the implementation's back, as a crashed peer does."""
        self._emit(Change("groups.gone", {"groups": sorted(self.alive)}))
        self.alive.clear()

    def fingerprint(self) -> tuple[object, ...]:
        """The groups that exist, as a hashable value."""
        return tuple((name, repr(sorted(args.items()))) for name, args in sorted(self.alive.items()))

"""What a row's test is given: children on one device, a note book, and one call that judges.

A row ends with `judge(...)`. It holds every check, that of the device being the row's alone included, and raises
`RowRed` with those that are red. A row that never judges is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from colocert.device import Child, Machine, Outcome
from colocert.device.machine import DeviceName
from gpu_tests import calibrate
from gpu_tests.harness import child
from gpu_tests.harness.ballast import Ballast
from gpu_tests.harness.checks import Check, RowRed, check
from gpu_tests.harness.exclusive import foreign

PACE = {"host": 1, "cuda": 2}
"""How much longer a child may take: a GPU's needs ten seconds to its first line, more on a cold file system."""

ALONE = "the device is the row's alone"


class Row:
    """One run of one row. `fault` names the seeded fault that it runs with; None is the correct code."""

    patience = 10.0
    """Seconds in which the memory of ended processes has to be gone."""

    def __init__(self, name: str, device: DeviceName, folder: Path, fault: str | None = None) -> None:
        self.name, self.device, self.folder, self.fault = name, device, folder, fault
        self.machine = Machine(device=device, ledger=folder / "ledger")
        self.properties: list[tuple[str, Any]] = []
        self._judged = False
        self._defaults: list[str] = []
        self._words: list[str] = []
        self._children: list[Child | Ballast] = []
        self._before = foreign(self.machine, patience=0.0 if device == "host" else self.patience)

    @property
    def on_host(self) -> bool:
        return self.device == "host"

    def shaped(self, **shape: Any) -> Machine:
        """The row's device with other properties; on `cuda` they mean nothing. One capacity a row."""
        self.machine = replace(self.machine, **shape)
        return self.machine

    def start(
        self,
        scenario: Callable[..., Any],
        /,
        *,
        machine: Machine | None = None,
        env: Mapping[str, str] | None = None,
        deadline: float = child.DEADLINE,
        **arguments: Any,
    ) -> Child:
        """A function of a scenario in a child process; it ends with the row at the latest."""
        on = machine or self.machine
        left = deadline * PACE[self.device]
        begun = child.begin(scenario, machine=on, fault=self.fault, env=env, deadline=left, **arguments)
        self._children.append(begun)
        return begun

    def run(self, scenario: Callable[..., Any], /, **arguments: Any) -> Any:
        """What a scenario's function returned; an error where its child did not end well."""
        return self.start(scenario, **arguments).wait().expect()

    def end(self, scenario: Callable[..., Any], /, **arguments: Any) -> tuple[str, Outcome | None]:
        """How the child of a scenario's function ended, whatever the way."""
        return child.ended(self.start(scenario, **arguments))

    def ballast(self, free: int) -> Ballast:
        """Memory outside the hook, taken until `free` bytes are left; held to the row's end."""
        held = Ballast(self.machine, free)
        self._children.append(held)
        return held

    def record(self, name: str, value: Any) -> None:
        """A measurement for the report; nothing is asserted of it."""
        self.properties.append((name, value))

    def calibrated(self, name: str) -> Any:
        """What was pinned for this kind of GPU; else the wide default, and the report names it."""
        if calibrate.value(name) is None:
            self._defaults.append(name)
        return calibrate.value_or_default(name)

    def judge(self, *checks: Check) -> None:
        """Holds all checks and says which are red."""
        self._judged = True
        self._end_children()
        alone = check(ALONE, "", self._before or foreign(self.machine, self.patience))
        if not self.on_host:
            self.calibrated("page tables")  # every tolerance of bytes holds it
        if self._defaults:
            self.record("wide_defaults", sorted(set(self._defaults)))
        self.record("checks", [one.json() for one in (*checks, alone)])
        if red := [one for one in (*checks, alone) if not one.green]:
            raise RowRed(self.name, red, self._words)

    def __enter__(self) -> Row:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._end_children()
        if self._words and not self._judged:  # a test that ended before its verdict: here is why, perhaps
            print(*self._words, sep="\n", file=sys.stderr)

    @property
    def judged(self) -> bool:
        """Whether the row has a verdict, green or red."""
        return self._judged

    def _end_children(self) -> None:
        for running in self._children:
            if isinstance(running, Child) and running.gone(0.0 if self._judged else 0.3):
                how, _ = child.ended(running)
                if how != "ok" and (said := child.last_words(running)):
                    self._words.append(f"a child ended with {how}: {said}")
            running.__exit__()
        self._children.clear()

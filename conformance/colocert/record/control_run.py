"""The controls of one recording: their child, and when they run.

Knows when a run's controls may run beside its recording. Does not know what a control is (`controls`).

Their child never imports the implementation under test. It starts with the recording, so that its imports cost no time
of their own. Controls of profiles that need nothing but their process run beside the recording; where processes, disks
or devices are measured they wait until it is over, since each would be measured with the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from colocert.record import process
from colocert.record.jobs import Job
from colocert.record.manifest import ControlRecord
from colocert.record.registry import PATIENCE

APART = frozenset({"live", "group", "frozen-offload"})
"""Profiles whose scenarios have processes, a disk or a device that controls would share."""


class ControlRun:
    """One child for the controls: `start` or nothing, then `result`, then `close`."""

    def __init__(self, log: Path) -> None:
        self._child = process.ChildProcess(log)
        self._rules: tuple[str, ...] = ()
        self._profiles: tuple[str, ...] = ()
        self._thread: threading.Thread | None = None
        self._controls: tuple[ControlRecord, ...] = ()

    def start(self, rules: Iterable[str], profiles: Iterable[str]) -> None:
        """Says which rules have controls to run, of these profiles; begins, if that can be beside the recording."""
        self._rules, self._profiles = tuple(rules), tuple(profiles)
        if self._rules and not APART & set(self._profiles):
            self._thread = threading.Thread(target=self._ask, daemon=True)
            self._thread.start()

    def result(self, say: Callable[[str], None]) -> tuple[ControlRecord, ...]:
        """Waits for the controls, which are run now if they have not been."""
        if self._rules:
            say("running the controls")
            if self._thread is None:
                self._ask()
            else:
                self._thread.join()
        return self._controls

    def _ask(self) -> None:
        """The child answers once; of profiles whose scenarios take longer it gets more time."""
        patience = max(1.0, sum(PATIENCE.get(profile, 1.0) - 1.0 for profile in self._profiles) / 4)
        try:
            answer = self._child.ask(Job("controls", rules=self._rules), process.IMPORT_DEADLINE * patience)
        except process.Lost as lost:
            self._controls = (
                ControlRecord("controls", "", "", "green", f"the controls did not finish: {lost.detail}"),
            )
        else:
            self._controls = msgspec.convert(answer.body["controls"], tuple[ControlRecord, ...])

    def close(self) -> None:
        """Ends the child, wherever it is."""
        self._child.interrupt()
        if self._thread is not None:
            self._thread.join()
        self._child.kill()

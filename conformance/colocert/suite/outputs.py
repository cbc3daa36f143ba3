"""What `colocert certify` wants beside the certificate: a Markdown page, a badge, and progress that a log can hold.

Knows which files there are. Does not know what a verdict means. Handed to pytest as a plugin object, on the controller
only; `Run` finds it by its type.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from colocert.report.badge import badge_paths, endpoint, svg
from colocert.report.summary import page, problem_page

_EVERY = 10.0
"""Seconds between two lines about the same stage where nobody watches."""


class Outputs:
    """The files of one `certify`. `summary` is the Markdown page, if one was asked for."""

    def __init__(self, summary: Path | None = None) -> None:
        self.summary = summary

    def clear(self, certificate: Path | None) -> None:
        """Removes what an earlier run left: it must not stand for this one."""
        if self.summary is not None:
            self.summary.parent.mkdir(parents=True, exist_ok=True)
            self.summary.unlink(missing_ok=True)
        for path in badge_paths(certificate) if certificate is not None else ():
            path.unlink(missing_ok=True)

    def write(self, made: Mapping[str, Any], certificate: Path | None) -> None:
        """Writes the page and the badge of a certificate."""
        if self.summary is not None:
            self.summary.write_text(page(made), encoding="utf-8")
        if certificate is not None:
            picture, facts = badge_paths(certificate)
            picture.write_text(svg(made), encoding="utf-8")
            facts.write_text(endpoint(made), encoding="utf-8")

    def write_problem(self, verdict: str, message: str) -> None:
        """Writes the page of a run that has no certificate."""
        if self.summary is not None:
            with contextlib.suppress(OSError):
                self.summary.write_text(problem_page(verdict, message), encoding="utf-8")


@contextlib.contextmanager
def progress(*, log: bool) -> Iterator[Callable[[str], None] | None]:
    """What is being done, on standard error: one line that is written over, or in a log a line a stage."""
    if not sys.stderr.isatty():
        yield _logged() if log else None
        return
    width = shutil.get_terminal_size().columns - 1

    def say(doing: str) -> None:
        sys.stderr.write("\r" + f"colocert: {doing}"[:width].ljust(width))
        sys.stderr.flush()

    try:
        yield say
    finally:
        sys.stderr.write("\r" + " " * width + "\r")
        sys.stderr.flush()


def _logged() -> Callable[[str], None]:
    stages: set[str] = set()
    last = 0.0

    def say(doing: str) -> None:
        nonlocal last
        stage = doing.partition(" ")[0]
        if stage in stages and time.monotonic() - last < _EVERY:
            return
        stages.add(stage)
        last = time.monotonic()
        print(f"colocert: {doing}", file=sys.stderr, flush=True)

    return say

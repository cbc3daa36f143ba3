"""`colocert diff A B`: how two recordings differ, scenario by scenario.

Knows the command's arguments, exit codes and how a difference is laid out in a terminal. Does not know how it is found.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

SAME, DIFFERENT, USAGE = 0, 1, 4


def register(commands: Any) -> None:
    """Adds the command to those of `colocert`."""
    command = commands.add_parser("diff", help="how the transcripts of two recordings differ: 0 equal, 1 different")
    for name in ("a", "b"):
        command.add_argument(name, metavar=name.upper(), help="an evidence folder, or a certificate that names one")
    command.add_argument("--profile", default="", metavar="A,B", help="only these profiles (default: all)")
    command.add_argument("--stat", action="store_true", help="only which scenarios differ, and by how many lines")
    command.add_argument("--html", type=Path, metavar="FILE", help="write a page too; needs jinja2")
    command.set_defaults(run=_diff)


def _diff(arguments: argparse.Namespace) -> int:
    from colocert.record.manifest import EvidenceError
    from colocert.report import diff
    from colocert.report.pages import MissingExtra, check_extra, write_page
    from colocert.rules.catalogue import PROFILES
    from colocert.trace import TraceError

    profiles = tuple(p.strip() for p in arguments.profile.split(",") if p.strip())
    try:
        if unknown := [p for p in profiles if p not in PROFILES]:
            raise EvidenceError(f"--profile names profiles of {', '.join(PROFILES)} (got {', '.join(unknown)})")
        if arguments.html is not None:
            check_extra("--html")
        found = diff.compare(diff.side(arguments.a), diff.side(arguments.b), profiles)
        if arguments.html is not None:
            write_page(arguments.html, diff.page(found))
    except (EvidenceError, TraceError, MissingExtra, OSError) as error:
        print("colocert: " + " ".join(str(error).split()), file=sys.stderr)
        return USAGE
    _show(found, stat=arguments.stat)
    if arguments.html is not None:
        print(f"wrote {arguments.html}")
    return SAME if found.equal else DIFFERENT


def _show(found: Any, *, stat: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    from colocert.report.diff import DIFFERS, EQUAL, ONLY_A, ONLY_B

    console = Console(highlight=False, soft_wrap=True)

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style=style))

    say(f"A: {found.a.name} ({found.a.given})")
    say(f"B: {found.b.name} ({found.b.given})")
    for name, mine, theirs in found.claims:
        say(f"claim {name}: {mine} in A, {theirs} in B", "yellow")
    for change in found.changes:
        if change.status == EQUAL:
            continue
        what = f"{change.profile}/{change.scenario}: {change.status}"
        if change.status == DIFFERS:
            what += f", {change.minus} lines of A and {change.plus} lines of B"
        say(what, "bold")
        for line in () if stat else change.lines:
            say("  " + line, {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], ""))
    counts = ", ".join(f"{found.count(s)} {s}" for s in (EQUAL, DIFFERS, ONLY_A, ONLY_B) if found.count(s))
    say(f"colocert: {len(found.changes)} scenarios: {counts or 'none'}", "green" if found.equal else "red")

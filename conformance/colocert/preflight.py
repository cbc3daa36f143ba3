"""`python -m colocert.preflight --kind KIND --world N`: may the rows run on this machine?

Prints a line a check, and what it saw as JSON where asked; 0 where every check holds, else 1. Judges by
colocert.device.preflight.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from colocert.device.kinds import HOST, NAMES
from colocert.device.preflight import Report, inspect


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m colocert.preflight", description="Checks that a machine is what the rows of gpu_tests need."
    )
    parser.add_argument("--kind", required=True, choices=NAMES)
    parser.add_argument("--world", type=int, default=1, metavar="N", help="devices that must be there (default: 1)")
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write what was seen here; `-`: to standard output, without the lines (default: a file in "
        "$COLOCERT_REPORT_DIR, where that is set)",
    )
    given = parser.parse_args(arguments)
    if given.world < 1:
        parser.error(f"--world must be 1 or more, got {given.world}")
    report = inspect(given.kind, given.world)
    folder = os.environ.get("COLOCERT_REPORT_DIR")
    file = given.json or (str(Path(folder) / f"preflight-{given.kind}-w{given.world}.json") if folder else "")
    text = json.dumps(report.to_json(), indent=2, sort_keys=True, ensure_ascii=False)
    if file == "-":
        print(text)
    else:
        _show(report)
        if file:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text(text + "\n")
    if not report.ok:
        print(f"preflight: {report.line}", file=sys.stderr)
    return 0 if report.ok else 1


def _show(report: Report) -> None:
    world = "" if report.kind == HOST else f", world {report.world}"
    print(f"preflight for {report.kind}{world}")
    for check in report.checks:
        print(f"  {'ok  ' if check.ok else 'FAIL'} {check.line}")


if __name__ == "__main__":
    sys.exit(main())

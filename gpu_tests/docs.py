"""Writes the tables of docs/gpu.md from what they are true of: the kinds, rows.toml and the seeded faults.

python -m gpu_tests.docs            writes them
python -m gpu_tests.docs --check    1 where they are not current
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from colocert.device.kinds import KINDS

from .harness.faults import all_seeded
from .table import HOST, Row, load

PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"
TORCH = {"h200": "2.11.0"}
NEWEST = "2.14.1"


def kinds() -> str:
    """What tells the kinds apart, and where each runs."""
    lines = [
        "| kind | name of the device | capability | GiB | host | torch | environments |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS.values():
        low, high = kind.memory
        prefix, worlds = ("grace", (1, 2, 4)) if kind.arch == "aarch64" else ("gpu", (1, 2, 4, 8))
        names = f"`{prefix}-{kind.name}-w{worlds[0]}` " + " ".join(f"`-w{world}`" for world in worlds[1:])
        pattern = kind.pattern.replace(r"\b.*", " …")
        capability = ".".join(str(part) for part in kind.capability)
        torch = TORCH.get(kind.name, NEWEST)
        lines.append(
            f"| {kind.name} | {pattern} | {capability} | {low:g}–{high:g} | {kind.arch} | {torch} cu130 | {names} |"
        )
    return "\n".join(lines)


def rows() -> str:
    """What each row proves, on how many devices, what of it the stand-in shows, and what turns it red."""
    faults: dict[str, list[str]] = {}
    for one in all_seeded():
        faults.setdefault(one.row, []).append(one.fault)
    lines = ["| row | proves | devices | on the stand-in | red by |", "|---|---|---|---|---|"]
    for row in load().values():
        red = ", ".join(f"`{fault}`" for fault in faults.get(row.id, ())) or f"none: {row.unseeded}"
        lines.append(f"| {row.id} | {row.proves} | {_devices(row)} | {_standin(row)} | {red} |")
    return "\n".join(lines)


def _devices(row: Row) -> str:
    others = [f"{world} on {kind}" for kind, world in row.worlds.items() if kind != HOST]
    return ", ".join([str(row.world), *others])


def _standin(row: Row) -> str:
    shown = {"full": "full", "none": "no", "reduced": f"reduced: {row.loses}"}[row.host]
    return shown + (f" ({row.worlds[HOST]} ranks)" if HOST in row.worlds else "")


def renewed(page: str) -> str:
    """The page with its tables written anew."""
    for name, table in (("kinds", kinds()), ("rows", rows())):
        begin, end = f"<!-- {name}: written by `python -m gpu_tests.docs` -->", f"<!-- end of {name} -->"
        pattern = f"{re.escape(begin)}.*?{re.escape(end)}"
        assert re.search(pattern, page, flags=re.S), f"{PAGE} must hold {begin} and {end}"
        page = re.sub(pattern, lambda _, text=f"{begin}\n\n{table}\n\n{end}": text, page, flags=re.S)  # type: ignore[misc]
    return page


def main(arguments: list[str]) -> int:
    """The command."""
    page = PAGE.read_text()
    current = renewed(page)
    if "--check" in arguments:
        if current != page:
            print("docs/gpu.md is not current: run `python -m gpu_tests.docs`", file=sys.stderr)
        return int(current != page)
    PAGE.write_text(current)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What a first machine of a kind measured, and the tolerances that follow; wide defaults where there was none yet.

    pytest gpu_tests --require-gpu=b300 --calibrate                      writes build/gpu/calibration-b300.json
    python gpu_tests/calibration.py pin build/gpu/calibration-b300.json  writes gpu_tests/calibration/b300.toml

The table is under version control, so that a change of a driver shows as a change of a file. A row that had to do with
a default says so in its result.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent / "calibration"
MIB = 1 << 20
DEFAULTS = {"page_tables": 8 * MIB, "group_spread": 16 * MIB, "disabled_left": 10 * MIB}
"""The wide default of each tolerance, in bytes. A calibrated value is never wider."""


def tolerance(name: str, kind: str | None = None) -> int:
    """The calibrated tolerance of the kind that this run is on, else the wide default."""
    return _table(kind or os.environ.get("COLOCERT_KIND", "host")).get(name, DEFAULTS[name])


def wide(kind: str) -> list[str]:
    """The tolerances for which that kind has no calibrated value."""
    return sorted(set(DEFAULTS) - set(_table(kind)))


def _table(kind: str, folder: Path = FOLDER) -> dict[str, int]:
    path = folder / f"{kind}.toml"
    found: dict[str, int] = tomllib.loads(path.read_text())["tolerances"] if path.exists() else {}
    return found


def derived(measured: dict[str, Any]) -> dict[str, int]:
    """Tolerances from measurements: twice what was seen, in whole MiB, and no wider than the default."""
    seen = {
        "page_tables": measured.get("page-table leftovers", {}).get("bytes"),
        "group_spread": measured.get("groups", {}).get("spread"),
        "disabled_left": measured.get("disabled block", {}).get("left"),
    }
    return {
        name: min(DEFAULTS[name], -(-2 * max(0, nbytes) // MIB) * MIB)
        for name, nbytes in seen.items()
        if nbytes is not None
    }


def pin(found: dict[str, Any], folder: Path = FOLDER, today: str = "") -> Path:
    """Writes the table of a kind from its measurements; the path."""
    kind, measured = found["kind"], found["measured"]
    facts = found.get("preflight", {}).get("facts", {})
    cards = sorted({card["name"] for card in facts.get("cards", [])})
    versions = {
        "device": ", ".join(cards) or "the stand-in",
        "driver": (facts.get("driver") or {}).get("version", ""),
        "torch": (facts.get("torch") or {}).get("version", ""),
        "torch_memory_saver": (facts.get("saver") or {}).get("version", ""),
    }
    lines = [f"# Written by gpu_tests/calibration.py on {today or datetime.date.today()}: what this kind measured.", ""]
    lines += ["[machine]", *(f"{name} = {json.dumps(value)}" for name, value in versions.items()), ""]
    lines += [
        "# bytes",
        "[tolerances]",
        *(f"{name} = {value}" for name, value in sorted(derived(measured).items())),
        "",
    ]
    for name, values in sorted(measured.items()):
        lines += [f'[measured."{name}"]', *(f"{key} = {_toml(value)}" for key, value in sorted(values.items())), ""]
    folder.mkdir(exist_ok=True)
    path = folder / f"{kind}.toml"
    path.write_text("\n".join(lines))
    return path


def _toml(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="calibration.py", description="Pins what --calibrate measured.")
    parser.add_argument("command", choices=["pin"])
    parser.add_argument("file", type=Path)
    given = parser.parse_args(arguments)
    print(f"wrote {pin(json.loads(given.file.read_text()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a first machine of a kind measured, and what rows go by in consequence; wide defaults where there was none yet.

    pytest gpu_tests --require-gpu=b300 --calibrate                      writes build/gpu/calibration-b300.json
    python -m gpu_tests.calibrate pin build/gpu/calibration-b300.json writes gpu_tests/calibration/b300.toml

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
DEFAULTS: dict[str, Any] = {
    "page tables": 8 * MIB,
    "spread of groups": 16 * MIB,
    "left of a disabled block": 10 * MIB,
    "pinned host memory after a wake": None,
}
"""What a row goes by where its kind has no value: tolerances in bytes, and None where it then only records."""


def value(name: str, kind: str | None = None, folder: Path = FOLDER) -> Any:
    """The value that was pinned for a kind (default: that of this run); None where there is none."""
    assert name in DEFAULTS, f"{name!r} is not one of {sorted(DEFAULTS)}"
    path = folder / f"{kind or os.environ.get('COLOCERT_KIND') or 'any'}.toml"
    return tomllib.loads(path.read_text())["values"].get(name) if path.exists() else None


def value_or_default(name: str) -> Any:
    """The same for this run, or the wide default."""
    found = value(name)
    return DEFAULTS[name] if found is None else found


def derived(measured: dict[str, Any]) -> dict[str, Any]:
    """Values from measurements. A tolerance is twice what was seen, in whole MiB, and no wider than its default."""
    seen = {
        "page tables": measured.get("page-table leftovers", {}).get("bytes"),
        "spread of groups": measured.get("groups", {}).get("spread"),
        "left of a disabled block": measured.get("disabled block", {}).get("left"),
    }
    found: dict[str, Any] = {
        name: min(DEFAULTS[name], -(-2 * max(0, nbytes) // MIB) * MIB)
        for name, nbytes in seen.items()
        if nbytes is not None
    }
    if "pinned" in measured:
        found["pinned host memory after a wake"] = measured["pinned"]["class"]
    return found


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
    lines = [f"# Written by gpu_tests/calibrate.py on {today or datetime.date.today()}: what this kind measured.", ""]
    lines += ["[machine]", *(f"{name} = {json.dumps(one)}" for name, one in versions.items()), ""]
    lines += ["# Tolerances are in bytes.", "[values]"]
    lines += [*(f"{json.dumps(name)} = {_toml(one)}" for name, one in sorted(derived(measured).items())), ""]
    for name, values in sorted(measured.items()):
        lines += [f"[measured.{json.dumps(name)}]"]
        lines += [*(f"{json.dumps(key)} = {_toml(one)}" for key, one in sorted(values.items())), ""]
    folder.mkdir(exist_ok=True)
    path = folder / f"{kind}.toml"
    path.write_text("\n".join(lines))
    return path


def _toml(one: Any) -> str:
    return f"{one:.3f}" if isinstance(one, float) else json.dumps(one, ensure_ascii=False)


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m gpu_tests.calibrate", description="Pins what --calibrate measured."
    )
    parser.add_argument("command", choices=["pin"])
    parser.add_argument("file", type=Path)
    given = parser.parse_args(arguments)
    print(f"wrote {pin(json.loads(given.file.read_text()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

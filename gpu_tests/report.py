"""The result of a run as a file, and its comparison with the table of rows.

    python -m gpu_tests.report check build/gpu/b300-w8.json --kind b300 --world 8

is the last step of a CI job: it fails unless the files together hold a passing verdict on every row of the table that
this kind and world must run, and on no other. A job that was green because it ran something else ends here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import platform
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .table import HOST, load, split

SCHEMA = 1
PACKAGES = ("colocert", "numpy", "nvidia-ml-py", "pytest", "torch", "torch_memory_saver")
CHECKS = "checks"
"""The property under which a row lists its named checks."""

DEFAULTS = "wide_defaults"
"""The property under which a row lists the calibrated values that it had none of."""
_UUID = re.compile(r"\b(GPU-|MIG-)?[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE)


@dataclass
class Watch:
    """The rows of a session, as their tests report: outcome, seconds and what they measured."""

    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, row: str, when: str, outcome: str, seconds: float, noted: list[tuple[str, Any]]) -> None:
        """One phase of one test of a row, with what the test noted. A row passes where every test of it did."""
        entry = self.rows.setdefault(row, {"outcome": "", "seconds": 0.0, "measured": {}, "checks": []})
        entry["seconds"] = round(entry["seconds"] + seconds, 3)
        if when == "call":
            entry["measured"].update({name: value for name, value in noted if name != CHECKS})
            entry["checks"] += [one for name, value in noted if name == CHECKS for one in value]
        if outcome == "failed":
            entry["outcome"] = "failed"
        elif when == "call" and outcome == "passed" and entry["outcome"] != "failed":
            entry["outcome"] = "passed"
        elif outcome == "skipped" and not entry["outcome"]:
            entry["outcome"] = "skipped"

    def outcome(self, row: str) -> str:
        """`passed` or `failed`; nothing where the row has no verdict, and a skip is none."""
        found = self.rows.get(row, {}).get("outcome", "")
        return "" if found == "skipped" else found

    def defaults(self) -> dict[str, list[str]]:
        """Rows that used the wide default of a value that is not calibrated for this kind, and which values."""
        named = {row: entry["measured"].get(DEFAULTS) for row, entry in self.rows.items()}
        return {row: sorted(names) for row, names in named.items() if names}


def result(**facts: Any) -> dict[str, Any]:
    """A result, without anything that identifies a single device."""
    text = json.dumps({"schema": SCHEMA, **facts}, default=str)
    loaded: dict[str, Any] = json.loads(_UUID.sub("…", text))
    return loaded


def versions() -> dict[str, str]:
    """The packages that a result depends on, as they are installed here."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return {**found, "python": platform.python_version()}


def write(found: dict[str, Any], folder: Path) -> Path:
    """Writes a result under its kind, world and shard; the path."""
    shard = "" if found["shard"] == "1/1" else f"-{found['shard'].replace('/', 'of')}"
    return save(found, folder / f"{found['kind']}-w{found['world']}{shard}.json")


def save(found: dict[str, Any], path: Path) -> Path:
    """Writes a result there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
    return path


def differences(results: list[dict[str, Any]], required: set[str], kind: str, world: int) -> list[str]:
    """What keeps these results from being one complete run; nothing where they are."""
    found = []
    for one in results:
        for name, wanted in (("schema", SCHEMA), ("kind", kind), ("world", world), ("required", True)):
            if one.get(name) != wanted:
                found.append(f"`{name}` must be {wanted!r}, got {one.get(name)!r}")
        if not one.get("preflight", {}).get("ok"):
            found.append(f"the preflight must have passed, got {one.get('preflight', {}).get('line', 'no report')}")
    outcomes = {row: entry["outcome"] for one in results for row, entry in one.get("rows", {}).items()}
    twice = [row for row in outcomes if sum(row in one.get("rows", {}) for one in results) > 1]
    found += [f"{row} must be judged once, got {sum(row in one['rows'] for one in results)} times" for row in twice]
    found += [f"{row} must have a verdict, got none" for row in sorted(required - set(outcomes))]
    found += [f"{row} is not in the table for this kind and world" for row in sorted(set(outcomes) - required)]
    found += [f"{row} must be passed, got {got}" for row, got in sorted(outcomes.items()) if got != "passed"]
    return list(dict.fromkeys(found))


def main(arguments: list[str] | None = None) -> int:
    """The command; 0 where the results are complete, else 1 with a line a difference."""
    parser = argparse.ArgumentParser(
        prog="python -m gpu_tests.report", description="Compares results of gpu_tests with rows.toml."
    )
    parser.add_argument("command", choices=["check"])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="one result, or one a shard")
    parser.add_argument("--kind", required=True)
    parser.add_argument("--world", required=True, type=int)
    given = parser.parse_args(arguments)
    device = HOST if given.kind == HOST else "cuda"
    wanted = split(load().values(), device=device, kind=given.kind, world=given.world)
    required = {row.id for row in wanted.required}
    try:
        results = [json.loads(path.read_text()) for path in given.files]
    except (OSError, ValueError) as error:
        print(f"report: a result must be a readable JSON file; got {error}")
        return 1
    found = differences(results, required, given.kind, given.world)
    for line in found:
        print(f"report: {line}")
    if not found:
        print(f"report: all {len(required)} rows of {given.kind}, world {given.world}, passed")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""The table of rows, rows.toml, and what of it a run must give a verdict on.

Knows rows, worlds, devices and shards. Does not know pytest, nor what a row does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
TABLE = HERE / "rows.toml"
HOST = "host"
_KEYS = frozenset({"proves", "world", "world_host", "world_gb300", "host", "loses", "seconds", "torch", "unseeded"})


@dataclass(frozen=True)
class Row:
    """One row. `worlds` overrides `world` for a kind or for the host."""

    id: str
    proves: str
    world: int
    worlds: dict[str, int]
    host: Literal["full", "reduced", "none"]
    loses: str
    seconds: int
    unseeded: str
    torch: bool

    def least_world(self, kind: str) -> int:
        """The least number of devices on that kind, or of ranks on the host."""
        return self.worlds.get(kind, self.world)


@dataclass(frozen=True)
class Shard:
    """The `index`-th of `of` parts of the rows."""

    index: int = 1
    of: int = 1

    def __str__(self) -> str:
        return f"{self.index}/{self.of}"

    @classmethod
    def parse(cls, text: str) -> Shard:
        """`1/2`; nothing is the whole. `ValueError` for anything else."""
        if not text:
            return cls()
        index, slash, of = text.partition("/")
        if not (slash and index.isdecimal() and of.isdecimal() and 1 <= int(index) <= int(of)):
            raise ValueError(f"COLOCERT_SHARD must be INDEX/COUNT with 1 <= INDEX <= COUNT, got {text!r}: e.g. 1/2")
        return cls(int(index), int(of))


@dataclass(frozen=True)
class Split:
    """What a run takes of the table: the rows that it must judge, and for every other one the reason."""

    required: tuple[Row, ...]
    left_out: dict[str, str]


def load(path: Path = TABLE) -> dict[str, Row]:
    """The table, by id. `ValueError` where it is not one."""
    return {name: _row(name, entry, path) for name, entry in tomllib.loads(path.read_text()).items()}


def _row(name: str, entry: dict[str, Any], path: Path) -> Row:
    unknown = sorted(set(entry) - _KEYS)
    if unknown:
        raise ValueError(f"{path}: row {name} has the unknown keys {unknown}; known are {sorted(_KEYS)}")
    if entry["host"] not in ("full", "reduced", "none"):
        raise ValueError(f"{path}: `host` of {name} must be full, reduced or none, got {entry['host']!r}")
    if (entry["host"] == "reduced") != bool(entry.get("loses")):
        raise ValueError(
            f"{path}: {name} must say with `loses` what the host cannot show if, and only if, it is reduced"
        )
    worlds = {key.removeprefix("world_"): value for key, value in entry.items() if key.startswith("world_")}
    return Row(
        name,
        entry["proves"],
        entry["world"],
        worlds,
        entry["host"],
        entry.get("loses", ""),
        entry["seconds"],
        entry.get("unseeded", ""),
        entry.get("torch", False),
    )


def split(
    rows: Iterable[Row], *, device: str, kind: str, world: int, shard: Shard = Shard(), torch: bool = True
) -> Split:
    """What a run on this device, kind and world takes, of that shard; `torch` says whether there is one."""
    left_out: dict[str, str] = {}
    runnable = []
    for row in rows:
        least = row.least_world(HOST if device == HOST else kind)
        if device == HOST and row.host == "none":
            left_out[row.id] = "needs a GPU"
        elif row.torch and not torch:
            left_out[row.id] = "needs torch, which is not installed here"
        elif least > world:
            left_out[row.id] = f"needs {least} {'ranks' if device == HOST else 'devices'}, this run has {world}"
        else:
            runnable.append(row)
    part = _parts(runnable, shard.of)[shard.index - 1]
    left_out |= {row.id: f"is not in shard {shard}" for row in runnable if row not in part}
    return Split(tuple(row for row in runnable if row in part), left_out)


def _parts(rows: list[Row], count: int) -> list[list[Row]]:
    """Cuts rows into parts of about equal time: the longest first, each into the part with the least."""
    parts: list[list[Row]] = [[] for _ in range(count)]
    for row in sorted(rows, key=lambda row: (-row.seconds, row.id)):
        min(parts, key=lambda part: sum(row.seconds for row in part)).append(row)
    return parts

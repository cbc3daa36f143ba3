"""What a first machine of a kind has to find out, one measurement a test; runs with --calibrate only.

Nothing is asserted of a figure, only that it could be taken. What needs a GPU, or two, is not collected without.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from colocert.device.machine import DeviceName
from gpu_tests.harness.row import Row
from gpu_tests.scenarios import g14, g22, g23, measures

Measure = Callable[[Row], dict[str, Any]]


def release(row: Row) -> dict[str, Any]:
    """By how much the bytes of a release are off, and how late they come."""
    return dict(row.run(measures.release))


def disabled_block(row: Row) -> dict[str, Any]:
    return {"left": row.run(g22.disabled)["left"]}


def touch(row: Row) -> dict[str, Any]:
    """How a process ends that touches released memory."""
    how, outcome = row.end(measures.touch)
    return {"ends as": how, "said": (outcome.traceback.strip().splitlines() or [""])[-1] if outcome else ""}


def groups(row: Row) -> dict[str, Any]:
    """Device bytes of an NCCL group, what a destroy leaves, and how far rounds lie apart; two ranks."""
    children = [
        row.start(
            g14.rank, env={"LOCAL_RANK": str(n)}, deadline=180, number=n, count=2, folder=str(row.folder), late=None
        )
        for n in range(2)
    ]
    seen = [child.wait().expect() for child in children]
    # Round by round on one device: two devices differ by what else is on them.
    rounds = [one[name][1:] for one in seen for name in ("down", "up")]
    return {
        "bytes": max(d - u for one in seen for d, u in zip(one["down"][1:], one["up"][1:], strict=True)),
        "leftover": max(one["start"] - one["down"][-1] for one in seen),
        "spread": max(max(free) - min(free) for free in rounds),
    }


def ipc_refusal(row: Row) -> dict[str, Any]:
    return {"said": row.run(measures.ipc_refusal)}


def graph_pool(row: Row) -> dict[str, Any]:
    return {"bytes": row.run(g23.graph)["pool"]}


ANYWHERE: dict[str, Measure] = {
    "page-table leftovers": release,
    "context": lambda row: dict(row.run(measures.context)),
    "pinned": lambda row: dict(row.run(measures.pinned)),
    "pinning": lambda row: dict(row.run(measures.pinning, deadline=300)),
    "disabled block": disabled_block,
    "touch of released memory": touch,
}
ON_A_GPU: dict[str, Measure] = {
    "segments": lambda row: dict(row.run(measures.segments)),
    "refusal of CUDA IPC": ipc_refusal,
    "graph pool": graph_pool,
}
ON_TWO_GPUS: dict[str, Measure] = {"groups": groups}


def measurements() -> dict[str, Measure]:
    """Those that this run's device and world can take."""
    if os.environ.get("COLOCERT_KIND", "host") == "host":
        return ANYWHERE
    return {**ANYWHERE, **ON_A_GPU, **(ON_TWO_GPUS if int(os.environ["COLOCERT_WORLD"]) >= 2 else {})}


@pytest.mark.calibration
@pytest.mark.parametrize("name", measurements())
def test_measure(
    name: str, device_name: DeviceName, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    with Row(name, device_name, tmp_path) as row:
        record_property("measured", measurements()[name](row))

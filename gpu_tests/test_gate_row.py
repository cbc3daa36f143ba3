"""The gate as a row: this machine passes the preflight, and its hook moves what it is told to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from colocert.device.machine import find_preload
from gpu_tests.harness.checks import check
from gpu_tests.harness.faults import seeded
from gpu_tests.harness.row import Row
from gpu_tests.scenarios import g00, g01


@pytest.mark.row("G00")
@seeded({"no-preload": "hook", "late-preload": "hook", "expandable-with-a-blank": "preflight"})
def test_the_gate_lets_this_machine_through(row: Row) -> None:
    """Every check of the preflight holds, and a pause of 64 MiB frees 64 to 66."""
    env = {"PYTORCH_ALLOC_CONF": "expandable_segments: True"} if row.fault == "expandable-with-a-blank" else {}
    machine, extra = row.machine, {}
    if row.fault in ("no-preload", "late-preload"):
        machine = replace(machine, preload="none")
    if row.fault == "late-preload":
        extra = {"PYTHONPATH": str(g01.SITE), "COLOCERT_TEST_LATE_PRELOAD": str(find_preload())}
    found = _preflight(row, env)
    ended, outcome = row.end(g00.pauses, machine=machine, env=extra)
    freed = outcome.value["freed"] if outcome and ended == "ok" else 0
    row.record("preflight", [one["line"] for one in found["checks"]])
    row.judge(
        check("preflight", [], [one["line"] for one in found["checks"] if not one["ok"]]),
        check("hook", "ok", ended),
        check("freed", 65 << 20, freed, tolerance=1 << 20),
    )


def _preflight(row: Row, env: dict[str, str]) -> dict[str, list[dict[str, object]]]:
    kind = "host" if row.on_host else os.environ.get("COLOCERT_KIND", "any")
    command = [sys.executable, "-m", "colocert.preflight", "--kind", kind, "--json", "-"]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=600)
    assert done.stdout, f"the preflight must report (got {done.stderr})"
    found: dict[str, list[dict[str, object]]] = json.loads(done.stdout)
    return found

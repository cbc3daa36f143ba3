"""What a start is worth: a hook that is not live has a name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from colocert.device.machine import find_preload
from gpu_tests.harness.checks import check
from gpu_tests.harness.faults import seeded
from gpu_tests.harness.row import Row
from gpu_tests.scenarios import g01


@pytest.mark.row("G01")
@seeded({"no-probe": "no preload"})
def test_a_broken_start_has_a_name(row: Row) -> None:
    """No preload, a late one, a wrong path and a missing libcudart each end with an error of their own name."""
    site = {"PYTHONPATH": str(g01.SITE)}
    if row.fault == "no-probe":
        site["COLOCERT_TEST_NO_PROBE"] = "1"
    late = {**site, "COLOCERT_TEST_LATE_PRELOAD": str(find_preload())}
    without = replace(row.machine, preload="none")
    wrong = replace(row.machine, preload=row.folder / "elsewhere" / find_preload().name)
    (row.folder / "needy").mkdir()
    missing = replace(row.machine, preload=g01.library_that_misses_its_runtime(row.folder / "needy"))
    ends = {
        "no preload": row.end(g01.frees, machine=without, env=site)[0],
        "late preload": row.end(g01.frees, machine=without, env=late)[0],
        "wrong path": row.end(g01.frees, machine=wrong, env=site)[0],
        "missing libcudart": row.end(g01.frees, machine=missing, env=site)[0],
    }
    healthy, outcome = row.end(g01.frees, env=site)
    row.judge(
        check("no preload", "NoPreload", ends["no preload"]),
        check("late preload", "LatePreload", ends["late preload"]),
        check("wrong path", "PreloadNotFound", ends["wrong path"]),
        check("missing libcudart", "LibraryNotFound", ends["missing libcudart"]),
        check("a good start", ("ok", True), (healthy, bool(outcome and outcome.value["bytes"]))),
    )

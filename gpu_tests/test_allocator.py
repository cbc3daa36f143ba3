"""What only torch's caching allocator and CUDA graphs can show: these rows need a GPU, and have not run on one."""

from __future__ import annotations

import pytest

from gpu_tests.harness.checks import bytes_moved, check
from gpu_tests.harness.row import Row
from gpu_tests.scenarios import g21, g23

GRANULE = 2 << 20


@pytest.mark.torch
@pytest.mark.row("G21")
def test_tags_of_reused_blocks_in_whole_process_mode(row: Row) -> None:
    """A block that is reused under a second tag stays with the first: mixed, as is known of the installed version."""
    seen = row.run(g21.reuse, env={"TMS_INIT_ENABLE": "1"})
    row.record("finding", seen)
    row.judge(
        check("the whole process is hooked", True, seen["hooked"]),
        check("tags", g21.KNOWN.get(seen["version"], "apart"), seen["tags"]),
    )


@pytest.mark.torch
@pytest.mark.row("G23")
def test_a_graph_replays_after_a_wake(row: Row) -> None:
    """A captured graph gives its pool back when its tag is released, and replays to the integer after the wake."""
    seen = row.run(g23.graph)
    row.record("graph pool", seen["pool"])
    row.judge(
        check("replays before", seen["wanted"], seen["before"]),
        check("the pool holds bytes", True, seen["pool"] > 0),
        bytes_moved("released", seen["pool"], seen["released"]),
        bytes_moved("taken", -seen["pool"], seen["taken"]),
        check("replays after", seen["wanted"], seen["after"]),
    )

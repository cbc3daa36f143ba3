"""What a trainer that is killed in the middle of a hand-off leaves to the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from colocert.device import Child
from gpu_tests.harness.checks import check
from gpu_tests.harness.faults import seeded
from gpu_tests.harness.row import Row
from gpu_tests.scenarios import g18

MIB = 1 << 20


@pytest.mark.row("G18")
@seeded({"wipes-at-exit-only": "stale files after the next start"})
def test_a_killed_trainer_leaves_its_memory_and_no_files(row: Row) -> None:
    """After a kill at any point of a hand-off its bytes return, the engine goes on, the next start wipes its files."""
    row.shaped(capacity=256 * MIB)
    home = row.folder / "disk"
    engine = row.start(g18.engine, deadline=180)
    tokens = engine.listen()["tokens"]
    tolerance = 0 if row.on_host else 16 * MIB
    checks = []
    for point in g18.POINTS:
        before = _ask(engine, call="sleep")["free"]
        trainer = row.start(g18.trainer, env={"TMS_DISK_BACKUP_CHUNK_MB": "1"}, home=str(home), until=point)
        trainer.listen()
        trainer.kill()
        died = trainer.wait().signal
        after = _ask(engine, call="until free", bytes=before - tolerance, seconds=10)
        row.record(f"lag after a kill at {point}", after["lag"])
        checks += [
            check(f"killed: {point}", "SIGKILL", died),
            check(f"device bytes: {point}", before, after["free"], tolerance),
            check(f"the engine's tokens: {point}", tokens, _ask(engine, call="wake")["tokens"]),
        ]
    engine.tell(None)
    engine.wait().expect()
    left = _folders(home)
    last = row.start(g18.trainer, home=str(home), until=g18.POINTS[0])
    last.listen()
    row.judge(
        *checks,
        check("a kill left files", True, bool(left)),
        check("stale files after the next start", [], [name for name in _folders(home) if name in left]),
    )


def _ask(engine: Child, **call: Any) -> Any:
    engine.tell(call)
    return engine.listen()


def _folders(home: Path) -> list[str]:
    return sorted(folder.name for folder in home.iterdir())

"""What a weight sync in adapter mode sends, and what it leaves alone."""

from __future__ import annotations

import pytest

from gpu_tests.harness.checks import bytes_moved, check
from gpu_tests.harness.faults import seeded
from gpu_tests.harness.row import Row
from gpu_tests.scenarios import g13


@pytest.mark.row("G13")
@seeded({"merged": "payload", "full-state": "payload"})
def test_a_sync_sends_the_adapter_and_nothing_else(row: Row) -> None:
    """An adapter sync sends the adapter's bytes alone, with the trainer's base released and the engine's untouched."""
    engine = row.start(g13.engine)
    address = engine.listen()
    trainer = row.start(g13.trainer)
    trainer.tell(address)
    sent, got = trainer.wait().expect(), engine.wait().expect()
    row.judge(
        check("payload", g13.PAYLOAD, got["payload"]),
        check("bytes on the wire", (g13.PAYLOAD + g13.FRAMING,) * 2, (sent["sent"], got["total"])),
        check("adapter", sent["adapter"], got["adapter"]),
        check("the engine's base", got["base"], got["base after"]),
        bytes_moved("the trainer's base was released", sent["expected"], sent["released"]),
        bytes_moved("the trainer's base stayed released", 0, sent["during the sync"]),
    )

"""Tensors that another process takes from this one's device memory."""

from __future__ import annotations

import pytest

from gpu_tests.harness.checks import check
from gpu_tests.harness.child import ended
from gpu_tests.harness.faults import seeded
from gpu_tests.harness.row import Row
from gpu_tests.scenarios import g16

GRANULE = 2 << 20


@pytest.mark.row("G16")
@seeded({"released-before-the-acknowledgement": "received", "region-exported": "an export of region memory"})
def test_an_adapter_is_repacked_and_held_until_it_is_acknowledged(row: Row) -> None:
    """Region memory is refused; its repacked copy arrives whole, is released after the acknowledgement, and is gone."""
    socket = str(row.folder / "handover")
    consumer = row.start(g16.consumer, socket=socket)
    assert consumer.listen() == "waiting"
    producer = row.start(g16.producer, socket=socket)
    offered = producer.listen()
    consumer.tell(offered["handle"])
    received = consumer.listen()
    producer.tell("acknowledged")
    producer.listen()
    consumer.listen()
    producer.tell("closed")
    produced, outcome = ended(producer)
    consumer.tell("leave")
    consumed, _ = ended(consumer)
    left = outcome.value["left"] if outcome and produced == "ok" else None
    row.record("refusal", offered["refusal"])
    row.judge(
        check("an export of region memory", "refused", offered["region"]),
        check("received", offered["whole"], received),
        check("ends", ("ok", "ok"), (produced, consumed)),
        check("bytes left", 0, left, tolerance=GRANULE),
    )

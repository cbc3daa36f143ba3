"""The profile through the runner: a death and a hang cost their scenarios, and the rest is judged."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from colocert.judge import Evidence, judge
from colocert.record.manifest import COMPLETE, DIED, HANG, Options
from colocert.record.runner import record

pytestmark = [pytest.mark.torch, pytest.mark.slow]
IMPLEMENTATION = Path(__file__).parent / "impls" / "ends_and_hangs.py"


def test_a_death_and_a_hang_become_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colocert.record.process.DEADLINE", 6.0)
    recorded = record(str(IMPLEMENTATION), tmp_path, Options(profiles=("sync-payload",), depth=0, controls=False))
    odd = {scenario.id: scenario.status for scenario in recorded.scenarios if scenario.status != COMPLETE}
    assert recorded.problem is None
    assert odd == {"payload-full-alias": DIED, "payload-merged-alias": HANG}
    judged = judge(Evidence(tmp_path))
    assert judged.verdict == "not-conformant"
    assert {row.id for row in judged.rules if row.outcome == "pass"} == set()


def test_the_reference_conforms(tmp_path: Path) -> None:
    """With its controls red."""
    recorded = record("colocert_reference", tmp_path, Options(profiles=("sync-payload",), depth=0))
    judged = judge(Evidence(tmp_path))
    assert recorded.problem is None
    assert (judged.profiles, {c.outcome for c in recorded.controls}) == ({"sync-payload": "conformant"}, {"red"})

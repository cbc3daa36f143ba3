"""The real `torch_memory_saver` 0.0.10 over the stand-in device, recorded and judged."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("torch_memory_saver")
pytest.importorskip("torch")

from colocert.device import run
from colocert.judge_stream import judge_files
from colocert.trace import events as ev
from colocert.trace.merge import merged, open_all

from . import real_saver

pytestmark = pytest.mark.torch

MIB = 1 << 20


def test_two_cycles_are_recorded_with_their_bytes(tmp_path: Path) -> None:
    seen = run(real_saver.two_cycles, folder=str(tmp_path)).expect()
    assert seen == {"frees": [16 * MIB] * 2, "problem": "", "undone": True}
    (path,) = tmp_path.glob("*.jsonl")
    events = [event for _, event in merged(open_all([path]))]
    free = [e.free for e in events if isinstance(e, ev.BytesSeen)]
    assert [b - a for a, b in pairwise(free)] == [n * 8 * MIB for n in (1, -1, -1, 1, 1, -1, -1)]
    result = judge_files([path])
    assert result.counts == {}
    assert {o.id for o in result.judged.rules if o.outcome == "pass"} == {"LC-05", "LC-20"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "code"),
    [(real_saver.pauses_twice, "double-release"), (real_saver.tagless_after_partial, "tagless-after-partial")],
)
def test_a_process_that_the_saver_ended_is_judged_by_the_call_it_ended_in(
    body: object, code: str, tmp_path: Path
) -> None:
    assert run(body, folder=str(tmp_path)).kind == "hook-abort"  # type: ignore[arg-type]
    (path,) = tmp_path.glob("*.jsonl")
    result = judge_files([path])
    assert set(result.counts) == {("LC-05", code)}
    assert "ends without a closing line" in result.notes[0]

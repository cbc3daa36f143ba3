"""What is drawn and written of a run: every byte of the samples, under the tag it lies in, at the step it was held."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from colocert.report.bytes_over_time import Layer, bytes_over_time
from colocert.trace import read_trace
from colocert.trace.events import Note, Send
from colocert_reference.real import pictures
from colocert_reference.real.loop import Iteration
from colocert_reference.real.pair import MIB, Sample

SVG = "{http://www.w3.org/2000/svg}"


def sample(step: str, trainer: dict[str, int], engine: dict[str, int], host: dict[str, int], **more: Any) -> Sample:
    """In MiB by tag; `host` is the trainer's default and the engine's weights."""
    tags = {"engine": {t: n * MIB for t, n in engine.items()}, "trainer": {t: n * MIB for t, n in trainer.items()}}
    host_tags = {
        side: {tag: host[side] * MIB} if side in host else {}
        for side, tag in (("engine", "weights"), ("trainer", "default"))
    }
    device = {side: sum(of.values()) for side, of in tags.items()}
    on_host = {side: sum(of.values()) for side, of in host_tags.items()}
    return Sample("phase", step, 0.5, device, on_host, 0, tags, host_tags, **more)


ALL = {"weights": 8, "kv_cache": 6, "cuda_graph": 2}
RUN = [
    sample("engine.start", {}, ALL, {}),
    sample("engine.release kv_cache", {}, {"weights": 8, "cuda_graph": 2}, {}),
    sample("trainer.init", {"default": 20, "grad_buffer": 4}, {"weights": 8}, {}),
    sample("engine.release weights", {"default": 20, "grad_buffer": 4}, {}, {"engine": 7}),
    sample("trainer.train", {"default": 20, "grad_buffer": 4, "communicators": 2}, {}, {"engine": 7}),
    sample("engine.resume weights", {"default": 20, "communicators": 2}, {"weights": 8}, {}),
    sample("trainer.sleep", {}, {"weights": 8}, {"trainer": 15}),
    sample("trainer.update_weights", {}, {"weights": 8}, {"trainer": 15}, facts={"adapter": 3 * MIB, "version": 2}),
    sample("engine.admit", {}, ALL, {"trainer": 15}),
    sample("trainer.wake_up", {"default": 20, "grad_buffer": 4}, ALL, {}, failed=True),
]
LEARNED = [Iteration(n, 0.1 + 0.05 * n, 0.1, 64, -0.1, 1.0, 1e-6, n + 1, "a·b") for n in range(5)]


def layers(sample: Sample, where: str) -> dict[Layer, int]:
    held = sample.tags if where == "device" else sample.host_tags
    return {Layer(side, tag): n for side, of in held.items() for tag, n in of.items()}


def test_the_series_holds_the_samples_to_the_byte() -> None:
    made = pictures.series(RUN)
    for where in ("device", "host"):
        assert [getattr(made.held(at), where) for at in range(1, len(RUN) + 1)] == [layers(s, where) for s in RUN]
    assert [span.method for span in made.spans if span.raised] == ["wake_up"]
    assert ("driver", 0, len(RUN)) in [(span.lane, span.begin, span.end) for span in made.spans]


def test_a_trace_of_the_run_counts_the_same_bytes_in_the_kit_s_own_ledger(tmp_path: Path) -> None:
    """Though a release moves less to the host than it frees on the device."""
    path = tmp_path / "trace.jsonl"
    pictures.write_trace(path, RUN, peak_device="gpu", iterations=LEARNED[:1])
    events = list(read_trace(path))
    counted = bytes_over_time(events)
    ended = [n for n, e in enumerate(events[1:], 1) if type(e).__name__ in ("Ack", "CallEnd", "CallRaise")]
    assert len(ended) == len(RUN)
    for at, sampled in zip(ended, RUN, strict=True):
        assert counted.held(at).device == layers(sampled, "device"), sampled.step
        assert counted.held(at).host == layers(sampled, "host"), sampled.step
    [sent], [noted] = ([e for e in events if isinstance(e, kind)] for kind in (Send, Note))
    assert isinstance(sent, Send)
    assert isinstance(noted, Note)
    assert (sent.kind, sent.nbytes, sent.version) == ("adapter", 3 * MIB, 2)
    assert noted.facts["reward"] == LEARNED[0].reward


def test_the_timeline_draws_each_tag_and_the_capacity() -> None:
    root = ElementTree.fromstring(pictures.timeline_svg(RUN, title="a run", capacity=40 * MIB))
    titles = {t.text for t in root.iter(f"{SVG}title")}
    assert {"trainer default", "trainer grad_buffer", "engine weights", "engine kv_cache"} <= titles
    assert "capacity 40 MiB" in [t.text for t in root.iter(f"{SVG}text")]
    without = pictures.timeline_svg(RUN, title="a run")
    assert "capacity" not in without
    lowest = max(float(r.get("y", "0")) for r in root.iter(f"{SVG}rect"))
    assert lowest < float(root.get("height", "0"))


def test_the_opening_ends_with_the_hand_off_after_the_iterations_asked_for() -> None:
    assert pictures.opening(RUN, 0) == (0, 9)
    assert pictures.opening(RUN, 3) == (0, 9)
    assert pictures.opening(RUN[:4], 1) == (0, 4)


@pytest.mark.parametrize("count", [1, 5])
def test_the_reward_is_a_point_an_iteration_inside_the_panel(count: int) -> None:
    root = ElementTree.fromstring(pictures.reward_svg(LEARNED[:count], title="a run"))
    points = [(float(c.get("cx", "0")), float(c.get("cy", "0"))) for c in root.iter(f"{SVG}circle")]
    assert len(points) == count
    assert points == sorted(points, key=lambda p: (p[0], -p[1]))  # to the right and, as the reward rises, upward
    assert all(64 <= x <= 700 and 58 <= y <= 268 for x, y in points)

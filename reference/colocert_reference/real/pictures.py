"""What a run of the pair looked like: its bytes over its steps and its reward as SVG, and its steps as a trace.

Knows the kit's drawing and its trace files, to which a pair's samples are turned. Does not know how a run goes.
Steps are numbered from 1; bytes are what both sides held after each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from colocert.report.bytes_over_time import Column, Layer, Series, Span
from colocert.report.palette import DARK, LIGHT, figure_css
from colocert.report.timeline_svg import timeline
from colocert.svg import rect, rule, text
from colocert.trace import SCHEMA_VERSION, TraceWriter
from colocert.trace.events import (
    Ack,
    CallBegin,
    CallEnd,
    CallIssue,
    CallRaise,
    Config,
    Event,
    Header,
    Note,
    SaverAlloc,
    SaverFree,
    SaverPause,
    SaverResume,
    Send,
)

if TYPE_CHECKING:
    from colocert_reference.real.loop import Iteration
    from colocert_reference.real.pair import Sample

TRAINER, ENGINE = "trainer", "engine"
UNMANAGED = "communicators"
DEFAULT, WEIGHTS, PADDING = "default", "weights", " padding"
_MANY = 80
"""Steps beyond which a phase is too narrow for its name."""
_WIDE, _HIGH, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 320, 64, 20, 58, 52


# ---- bytes


def series(samples: Sequence[Sample], *, iterations: bool = False) -> Series:
    """What both sides held, by tag, which step each carried out when, and the phases above, or the iterations."""
    columns: list[Column] = []
    spans: list[Span] = []
    for at, sample in enumerate(samples, 1):
        columns.append(Column(at, _layers(sample.tags, sample.device), _layers(sample.host_tags, sample.host)))
        side, _, method = sample.step.partition(".")
        lane = f"{ENGINE} 0" if side == ENGINE else "rank 0"
        spans.append(Span(lane, method, at - 1, at, sample.failed))
    spans += _iterations(samples) if iterations else _phases(samples)
    return Series(len(samples), tuple(columns), tuple(spans), len(spans))


def _phases(samples: Sequence[Sample]) -> Iterator[Span]:
    for phase, of_phase in itertools.groupby(enumerate(samples), lambda numbered: numbered[1].phase):
        numbers = [at for at, _ in of_phase]
        yield Span("driver", phase, numbers[0], numbers[-1] + 1)


def _iterations(samples: Sequence[Sample]) -> Iterator[Span]:
    """From a rollout to the next."""
    begun = [at for at, sample in enumerate(samples) if sample.phase == "rollout"]
    ended = next((at for at, sample in enumerate(samples) if sample.phase == "close"), len(samples))
    for number, (begin, end) in enumerate(itertools.pairwise([*begun, ended])):
        yield Span("iteration", str(number), begin, end)


def _layers(tags: Mapping[str, Mapping[str, int]], total: Mapping[str, int]) -> dict[Layer, int]:
    """By tag where a side says so; what it does not name is of no tag."""
    held: dict[Layer, int] = {}
    for side, nbytes in total.items():
        known = {tag: min(n, nbytes) for tag, n in tags.get(side, {}).items() if nbytes > 0}
        held |= {Layer(side, tag): n for tag, n in known.items() if n}
        if (rest := nbytes - sum(known.values())) > 0:
            held[Layer(side, "other")] = rest
    return held


def timeline_svg(
    samples: Sequence[Sample], *, title: str, capacity: int = 0, steps: tuple[int, int] | None = None
) -> str:
    """The bytes of both sides over the steps, stacked by tag against the capacity; `steps` draws some of them only."""
    shown = series(samples, iterations=steps is None and len(samples) > _MANY)
    return timeline(shown, window=steps, title=title, alone=True, capacity=capacity, axis="step")


def opening(samples: Sequence[Sample], iterations: int) -> tuple[int, int]:
    """The steps of a run's start and its first iterations, to the end of the hand-off after the last of them."""
    ends = [at for at, sample in enumerate(samples, 1) if sample.step == "engine.admit"]
    return 0, ends[min(iterations, len(ends) - 1)] if ends else len(samples)


# ---- the reward


def reward_svg(iterations: Sequence[Iteration], *, title: str) -> str:
    """The mean reward of each iteration, with the standard error of that mean as a band."""
    first, last = iterations[0].number, max(iterations[-1].number, iterations[0].number + 1)
    width, height = _WIDE - _LEFT - _RIGHT, _HIGH - _TOP - _BOTTOM
    errors = [i.spread / math.sqrt(i.rollouts) for i in iterations]
    highest = max(i.reward + e for i, e in zip(iterations, errors, strict=True))
    top = min(1.0, math.ceil(10 * highest + 0.5) / 10)

    def x(number: int) -> float:
        return _LEFT + width * (number - first) / (last - first)

    def y(reward: float) -> float:
        return _TOP + height * (1 - max(0.0, reward) / top)

    parts = [rect(_LEFT, _TOP, width, height, cls="g-panel")]
    for tenth in range(0, round(10 * top) + 1, 1 if top <= 0.5 else 2):
        parts.append(rule(_LEFT, _LEFT + width, y(tenth / 10), cls="g-line"))
        parts.append(text(_LEFT - 8, y(tenth / 10) + 4, f"{tenth / 10:.1f}", anchor="end", cls="g-muted"))
    above = [f"{x(i.number):.1f} {y(i.reward + e):.1f}" for i, e in zip(iterations, errors, strict=True)]
    below = [f"{x(i.number):.1f} {y(i.reward - e):.1f}" for i, e in zip(iterations, errors, strict=True)]
    parts.append(f'<path d="M{"L".join([*above, *reversed(below)])}Z" class="m-default" fill-opacity=".22"/>')
    line = "L".join(f"{x(i.number):.1f} {y(i.reward):.1f}" for i in iterations)
    parts.append(f'<path d="M{line}" fill="none" class="r-line" stroke-width="2"/>')
    for i in iterations:
        said = escape(f"iteration {i.number}: {i.reward:.3f}, adapter version {i.version}")
        parts.append(f'<circle cx="{x(i.number):.1f}" cy="{y(i.reward):.1f}" r="3" class="m-default">')
        parts.append(f"<title>{said}</title></circle>")
    step = max(1, math.ceil((last - first) / 12))
    for number in range(first, last + 1, step):
        parts.append(text(x(number), _TOP + height + 18, str(number), size_=11, anchor="middle", cls="g-muted"))
    parts.append(text(_LEFT + width / 2, _HIGH - 14, "iteration", anchor="middle", cls="g-ink"))
    parts.append(text(_LEFT, _TOP - 12, "share of sampled bytes that are lower-case letters", cls="g-muted"))
    return _document("".join(parts), title)


def _document(body: str, title: str) -> str:
    def style(colours: Mapping[str, str]) -> str:
        return f"{figure_css(colours)}.r-line{{stroke:{colours['default']}}}"

    dark = f"@media (prefers-color-scheme:dark){{{style(DARK)}}}"
    size = f'viewBox="0 0 {_WIDE} {_HIGH}" width="{_WIDE}" height="{_HIGH}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}"'
        f' font-family="system-ui, Helvetica, Arial, sans-serif"><title>{escape(title)}</title>'
        f"<style>{style(LIGHT)}{dark}</style>{rect(0, 0, _WIDE, _HIGH, cls='g-bg')}"
        f"{text(12, 26, title, size_=16, weight='bold', cls='g-ink')}{body}</svg>\n"
    )


# ---- the trace


def write_trace(
    path: Path, samples: Sequence[Sample], *, peak_device: str, iterations: Sequence[Iteration] = ()
) -> None:
    """The run as a trace of the kit's: calls, allocations by tag, what was sent, and each iteration as a note."""
    writer = TraceWriter(path, Header(schema=SCHEMA_VERSION, scenario=f"{peak_device}-peak", profile=""))
    try:
        seq = 0
        for event in _events(samples, peak_device, list(iterations)):
            seq = event.seq = seq + 1
            writer(event)
    finally:
        writer.close()


def _events(samples: Sequence[Sample], peak_device: str, iterations: list[Iteration]) -> Iterator[Event]:
    yield Config({"peak_device": peak_device, "lora": True})
    backed = _payloads(samples)
    known: dict[str, int] = {}
    there: set[str] = set()
    for call, sample in enumerate(samples, 1):
        side, _, method = sample.step.partition(".")
        at = int(sample.begun * 1e9)
        yield _timed(CallIssue(method, call, owner=ENGINE) if side == ENGINE else CallBegin(TRAINER, method, call), at)
        for event in _moves(sample, backed, known, there, call):
            yield _timed(event, at)
        for kind in ("base", "adapter"):
            if kind in sample.facts:
                yield Send(kind, sample.facts[kind], "host", sample.facts.get("version", 0), statement=True)
        ended = int((sample.begun + sample.seconds) * 1e9)
        if side == ENGINE:
            yield _timed(Ack(call, owner=ENGINE), ended)
        elif sample.failed:
            yield _timed(CallRaise(TRAINER, method, call, "PairError"), ended)
        else:
            yield _timed(CallEnd(TRAINER, method, call), ended)
        if sample.step == "trainer.train" and not sample.failed and iterations:
            yield Note("iteration", _facts(iterations.pop(0)), statement=True)


def _payloads(samples: Sequence[Sample]) -> dict[str, int]:
    """The bytes that go to the host when a tag is released: less than its granules on the device."""
    most: dict[str, int] = {}
    for sample in samples:
        for side, tags in sample.host_tags.items():
            for tag, nbytes in tags.items():
                most[f"{side} {tag}"] = max(most.get(f"{side} {tag}", 0), nbytes)
    return most


def _moves(
    sample: Sample, backed: Mapping[str, int], known: dict[str, int], there: set[str], call: int
) -> Iterator[Event]:
    """What the step did to each tag. Backed-up memory is two allocations: its payload, and the rest of its granules."""
    now: dict[str, tuple[str, str, int, bool]] = {}
    for layer, nbytes in _layers(sample.tags, sample.device).items():
        name = f"{layer.side} {layer.tag}"
        payload = min(backed.get(name, 0), nbytes)
        if payload:
            now[name] = (layer.side, layer.tag, payload, True)
        if nbytes > payload:
            now[name + PADDING * bool(payload)] = (layer.side, layer.tag, nbytes - payload, False)
    for name in [*sorted(there - now.keys()), *sorted(now.keys() - there)]:
        side, tag, nbytes, backup = now.get(name) or (name.split()[0], name.split()[1], known[name], name in backed)
        owner = ENGINE if side == ENGINE else ""
        if name in there:
            there.discard(name)
            managed = tag != UNMANAGED
            yield (
                SaverPause(tag, name, nbytes, backup, call, owner=owner)
                if managed
                else SaverFree(tag, name, nbytes, owner=owner)
            )
            if not managed:
                del known[name]
            continue
        there.add(name)
        if name in known:
            yield SaverResume(tag, name, nbytes, backup, call, owner=owner)
        else:
            known[name] = nbytes
            yield SaverAlloc(tag, name, nbytes, backup, owner=owner)


def _timed(event: Event, at: int) -> Event:
    event.at = at
    return event


def _facts(iteration: Iteration) -> dict[str, Any]:
    return {name: getattr(iteration, name) for name in ("number", "reward", "loss", "gap", "version")}

"""A timeline is well-formed, is also said in words, and holds every layer, call and finding."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from colocert.report.bytes_in_words import byte_ticks, event_ticks, held_in_words, size, table
from colocert.report.bytes_over_time import Mark, Series, bytes_over_time
from colocert.report.palette import DARK, LIGHT
from colocert.report.timeline_svg import NARROW, WIDE, shown_lanes, timeline
from colocert.trace import AnyEvent
from colocert.trace import events as ev

MIB = 1 << 20
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def series() -> Series:
    events: list[AnyEvent] = [
        ev.Header(schema=1, scenario="s<1>", profile="handoff"),
        ev.CallBegin("driver", "run", 1),
        ev.SaverAlloc("weights", "w", 64 * MIB, True, owner="engine"),
        ev.SaverAlloc("default", "base", 96 * MIB, True),
        ev.SaverAlloc("my_own", "x", 32 * MIB, False),
        ev.CallBegin("trainer", "sleep", 2),
        ev.SaverPause("default", "base", 96 * MIB, True, 1),
        ev.CallRaise("trainer", "sleep", 2, "Refused"),
        ev.CallEnd("driver", "run", 1),
    ]
    return bytes_over_time(events)


MARKS = [Mark(6, "HO-01", "weights-before-grads", "expected: a < b; observed: it is & was"), Mark(6, "HO-03", "c", "d")]


def drawn(series: Series, **more: object) -> ElementTree.Element:
    return ElementTree.fromstring(timeline(series, MARKS, title="s<1>", alone=True, **more))  # type: ignore[arg-type]


def test_it_is_well_formed_and_in_words_too(series: Series) -> None:
    root = drawn(series)
    assert root.tag == f"{SVG}svg"
    assert root.get("role") == "img"
    said = root.get("aria-label", "")
    for words in ("s<1>", "8 events", "device at most 192 MiB", "host at most 96 MiB", "HO-01 weights-before-grads"):
        assert words in said


def test_every_layer_call_and_finding_is_there(series: Series) -> None:
    root = drawn(series)
    titles = {t.text for t in root.iter(f"{SVG}title")}
    assert {"trainer default", "trainer my_own", "engine weights"} <= titles
    assert {"driver: run, events 1 to 8", "rank 0: sleep, events 5 to 7, raised"} <= titles
    text = " ".join("".join(t.itertext()) for t in root.iter(f"{SVG}text"))
    assert "1  event 6: HO-01 weights-before-grads; expected: a < b; observed: it is & was" in text
    assert "device after it: 96 MiB (trainer: my_own 32 MiB; engine: weights 64 MiB)" in text
    assert "host after it: 96 MiB (trainer: default 96 MiB)" in text


def test_findings_at_one_event_share_a_line(series: Series) -> None:
    root = drawn(series)
    assert len([p for p in root.iter(f"{SVG}path") if p.get("class") == "g-mark"]) == 1
    assert [t.text for t in root.iter(f"{SVG}text") if t.get("class") == "g-onflag"] == ["1, 2"]


def test_engine_memory_is_told_by_a_pattern_and_not_by_colour_alone(series: Series) -> None:
    hatched = [p for p in drawn(series).iter(f"{SVG}path") if p.get("fill") == "url(#hatch)"]
    assert len(hatched) == 1


def test_roles_are_told_apart_by_pattern_and_name() -> None:
    held = [("policy", 64), ("critic", 96), ("engine", 32)]
    series = bytes_over_time(
        [ev.SaverAlloc("model", "w", n * MIB, True, owner=who) for who, n in held]
        + [ev.CallBegin("sync", "sync", 1), *[ev.Data("model", "w", "read", owner="policy")] * 30]
    )
    root = ElementTree.fromstring(timeline(series, alone=True))
    patterns = [p.get("fill") for p in root.iter(f"{SVG}path") if (p.get("fill") or "").startswith("url")]
    assert patterns == ["url(#dots)", "url(#hatch)"]
    assert {"policy model", "critic model"} <= {t.text for t in root.iter(f"{SVG}text")}


def test_it_refers_to_nothing_outside(series: Series) -> None:
    text = timeline(series, MARKS, alone=True)
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]
    assert "href" not in text


def test_every_class_has_a_colour_for_both_grounds(series: Series) -> None:
    root = drawn(series)
    style = next(root.iter(f"{SVG}style")).text or ""
    light, _, dark = style.partition("@media (prefers-color-scheme:dark)")
    used = {c for e in root.iter() for c in (e.get("class") or "").split()}
    assert used
    for name in used:
        assert f".{name}{{" in light
        assert f".{name}{{" in dark
    assert LIGHT["grad_buffer"] in light
    assert DARK["grad_buffer"] in dark


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_nothing_lies_outside_the_picture(series: Series, width: int) -> None:
    root = drawn(series, width=width)
    _, _, right, bottom = map(float, root.get("viewBox", "").split())
    assert right == width
    for shape in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(shape.get(k, "nan")) for k in ("x", "y", "width", "height"))
        assert x >= -0.1
        assert x + w <= right + 0.1
        assert y + h <= bottom + 0.1
    for said in root.iter(f"{SVG}text"):
        assert 0 <= float(said.get("x", "nan")) <= right
        assert 0 <= float(said.get("y", "nan")) <= bottom
    for path in root.iter(f"{SVG}path"):
        for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path.get("d", "")):
            assert -0.1 <= float(x) <= right + 0.1
            assert -0.1 <= float(y) <= bottom + 0.1


def test_a_window_draws_what_is_inside_it(series: Series) -> None:
    inside = timeline(series, MARKS, window=(4, 8), alone=True)
    outside = timeline(series, MARKS, window=(0, 4), alone=True)
    assert "event 6: HO-01" in inside
    assert "event 6: HO-01" not in outside.partition("</title>")[2]
    assert "rank 0: sleep" not in outside


def test_a_run_without_host_copies_has_no_host_panel() -> None:
    text = timeline(bytes_over_time([ev.SaverAlloc("default", "base", MIB, True)]))
    assert ">device</text>" in text
    assert ">host</text>" not in text


def test_a_run_of_many_ranks_draws_the_first_and_counts_the_rest() -> None:
    begun: list[AnyEvent] = [ev.CallBegin("trainer", "sleep", rank, rank=rank) for rank in range(1000)]
    series = bytes_over_time([ev.SaverAlloc("default", "base", MIB, True), ev.CallBegin("driver", "run", 1), *begun])
    lanes = shown_lanes(series)
    assert lanes[:3] == ["driver", "rank 0", "rank 1"]
    assert len(lanes) < 10
    assert f"and {1001 - len(lanes)} more ranks or engines" in timeline(series)


@pytest.mark.parametrize("top", [1, 7, 5 * MIB, 217 * MIB, 140 << 30, 3 << 40])
def test_bytes_on_the_axis_are_few_and_round(top: int) -> None:
    ticks = byte_ticks(top)
    assert 2 <= len(ticks) <= 5
    assert ticks[-1] <= top
    assert all(re.fullmatch(r"\d+ \w+", size(t)) for t in ticks)


@pytest.mark.parametrize("span", [1, 9, 112, 4711, 10_000_000])
def test_events_on_the_axis_are_few_and_round(span: int) -> None:
    ticks = event_ticks(span)
    assert 2 <= len(ticks) <= 9
    assert ticks[-1] <= span


def test_sizes_and_holdings_in_words(series: Series) -> None:
    assert [size(n) for n in (0, 3000, 64 * MIB, 1_400_000_000)] == ["0 bytes", "2.9 KiB", "64 MiB", "1.3 GiB"]
    assert held_in_words({}) == "nothing"
    assert table(series)[-1] == (
        "6",
        "driver run, rank 0 sleep",
        "96 MiB (trainer: my_own 32 MiB; engine: weights 64 MiB)",
        "96 MiB (trainer: default 96 MiB)",
    )

"""The byte series is the ledger's bytes by owner and tag, whole runs summed, and loses no peak however short it is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import pytest

from colocert.judge import Evidence
from colocert.judge_trace import judge_events
from colocert.record.registry import BY_ID
from colocert.record.registry import run as run_scenario
from colocert.report.bytes_over_time import Column, Layer, Series, bytes_over_time, marks
from colocert.report.timeline_svg import timeline
from colocert.rules.catalogue import catalogue
from colocert.trace import AnyEvent, read_trace
from colocert.trace import events as ev
from colocert.trace.ledger import Ledger
from colocert_reference.colocert_impl import Reference

MIB = 1 << 20
BASE, GRADS, WEIGHTS = Layer("trainer", "default"), Layer("trainer", "grad_buffer"), Layer("engine", "weights")


def alloc(tag: str, name: str, nbytes: int, *, owner: str = "", rank: int = 0, seq: int = 0) -> AnyEvent:
    return ev.SaverAlloc(tag, name, nbytes, tag != "grad_buffer", owner=owner, rank=rank, seq=seq)


def test_bytes_lie_with_their_owner_and_tag() -> None:
    series = bytes_over_time(
        [
            ev.Header(schema=1, scenario="s", profile="handoff"),
            alloc("default", "base", 4),
            alloc("grad_buffer", "grads", 2),
            alloc("weights", "w", 8, owner="engine"),
            ev.SaverPause("default", "base", 4, True, 1),
            ev.SaverPause("grad_buffer", "grads", 2, False, 2),
            ev.SaverResume("default", "base", 4, True, 3),
            ev.SaverFree("weights", "w", 8, owner="engine"),
        ]
    )
    assert series.columns == (
        Column(1, {BASE: 4}, {}),
        Column(2, {BASE: 4, GRADS: 2}, {}),
        Column(3, {BASE: 4, GRADS: 2, WEIGHTS: 8}, {}),
        Column(4, {GRADS: 2, WEIGHTS: 8}, {BASE: 4}),
        Column(5, {WEIGHTS: 8}, {BASE: 4}),
        Column(6, {BASE: 4, WEIGHTS: 8}, {}),
        Column(7, {BASE: 4}, {}),
    )
    assert series.layers == [BASE, GRADS, WEIGHTS]
    assert (series.peak("device"), series.peak("host")) == ((14, 3), (4, 4))
    assert series.held(4).host == series.held(5).host == {BASE: 4}
    assert series.held(0) == Column(0, {}, {})


def test_ranks_are_summed_or_looked_at_one_by_one() -> None:
    events = [alloc("default", "base", 4 + rank, rank=rank) for rank in (0, 1)]
    assert bytes_over_time(events).columns[-1].device == {BASE: 9}
    assert bytes_over_time(events, rank=1).columns[-1].device == {BASE: 5}
    assert bytes_over_time(events, rank=7).columns == ()


@pytest.mark.parametrize(
    "end",
    [
        ev.SaverFatal("resume", "default", "base", 1, "out-of-memory", rank=1),
        ev.SaverTouch("default", "base", "read", rank=1),
        ev.Fault("rank.train", "killed", rank=1),
        ev.Change("rank.ended", rank=1),
        ev.Change("rank.started", {"incarnation": 1}, rank=1),
    ],
)
def test_what_a_process_had_is_free_once_it_ended(end: AnyEvent) -> None:
    out = ev.SaverPause("default", "base", 4, True, 1, rank=1)
    series = bytes_over_time([alloc("default", "base", 4), alloc("default", "base", 4, rank=1), out, end])
    assert series.columns[-2].host == {BASE: 4}
    assert series.columns[-1] == Column(4, {BASE: 4}, {})
    again = bytes_over_time([alloc("default", "base", 4, rank=1), end, alloc("default", "base", 4, rank=1)])
    assert again.columns[-1].device == {BASE: 4}


def test_a_roles_storages_move_and_leave_their_copies_behind() -> None:
    base, grads = Layer("policy", "model"), Layer("policy", "grads")
    events = [
        ev.SaverAlloc("model", "base", 8, True, "model", owner="policy"),
        ev.SaverAlloc("grads", "grads", 2, False, "grads", owner="policy"),
        ev.Move("policy", "model", ["base", "unheard of"], "host", 8),
        ev.Move("policy", "grads", ["grads"], "host", 2),
        ev.SaverTouch("model", "base", "read", owner="policy"),
        ev.Move("policy", "model", ["base"], "device", 8),
        ev.Move("critic", "model", ["base"], "device", 8),
    ]
    for event in events:
        event.owner = event.owner or "policy"
    series = bytes_over_time(events)
    assert [(c.at, c.device, c.host) for c in series.columns] == [
        (1, {base: 8}, {}),
        (2, {base: 8, grads: 2}, {}),
        (3, {grads: 2}, {base: 8}),
        (4, {}, {base: 8}),
        (6, {base: 8}, {base: 8}),
    ]


def test_a_hang_keeps_its_memory() -> None:
    series = bytes_over_time([alloc("default", "base", 4), ev.Fault("rank.train", "hang")])
    assert series.columns[-1].device == {BASE: 4}


@pytest.mark.parametrize("scenario", ["lora-cycle", "full-cycle", "gpu-lora-acks-0", "cpu-full-three"])
def test_totals_are_those_of_the_ledgers_after_every_event(scenario: str) -> None:
    events: list[AnyEvent] = []
    run_scenario(Reference(), Reference().claims, BY_ID[scenario], events.append)
    series = bytes_over_time(events)
    ledgers: dict[tuple[str, int], Ledger] = {}
    for at, event in enumerate(events, 1):
        ledgers.setdefault((event.owner, event.rank), Ledger()).apply(event)
        held = series.held(at)
        assert sum(held.device.values()) == sum(ledger.device_bytes for ledger in ledgers.values())
        assert sum(held.host.values()) == sum(ledger.host_bytes for ledger in ledgers.values())


def walk(seed: int, steps: int) -> Iterator[AnyEvent]:
    """A random run of releases and resumes over regions of different sizes."""
    chance = random.Random(seed)
    out: set[int] = set()
    for i in range(12):
        yield alloc(("default", "grad_buffer", "param_buffer")[i % 3], str(i), (i + 1) * MIB)
    for step in range(steps):
        i = chance.randrange(12)
        kind = ev.SaverResume if i in out else ev.SaverPause
        yield kind(("default", "grad_buffer", "param_buffer")[i % 3], str(i), (i + 1) * MIB, i % 3 != 1, step)
        out ^= {i}


@pytest.mark.parametrize("seed", range(5))
def test_a_short_series_keeps_peaks_and_the_last_state(seed: int) -> None:
    whole, short = (bytes_over_time(walk(seed, 5000), columns=n) for n in (10_000, 40))
    assert len(whole.columns) > 4000
    assert len(short.columns) <= 40
    for where in ("device", "host"):
        assert short.peak(where)[0] == whole.peak(where)[0]
    assert short.columns[-1][1:] == whole.columns[-1][1:]
    assert [c.at for c in short.columns] == sorted({c.at for c in short.columns})


def test_a_spike_is_drawn_as_a_spike_and_not_as_a_plateau() -> None:
    events: list[AnyEvent] = [alloc("default", "base", MIB)]
    for i in range(200):
        events += [alloc("default", f"x{i}", 1), ev.SaverFree("default", f"x{i}", 1)]
    events += [alloc("default", "spike", 9 * MIB), ev.SaverFree("default", "spike", 9 * MIB)]
    events += [ev.Data("default", "base", "read")] * 5000
    series = bytes_over_time(events, columns=8)
    assert series.peak("device")[0] == 10 * MIB
    assert series.held(4000).device == {BASE: MIB}


def test_calls_have_a_lane_each_and_an_unanswered_one_counts_as_raised() -> None:
    series = bytes_over_time(
        [
            ev.CallBegin("driver", "run", 1),
            ev.CallIssue("release", 1, owner="engine"),
            ev.Ack(1, owner="engine"),
            ev.CallBegin("trainer", "sleep", 2, rank=1),
            ev.CallRaise("trainer", "sleep", 2, "Refused", rank=1),
            ev.CallBegin("trainer", "train", 3, rank=1),
        ]
    )
    assert series.lanes == ["driver", "rank 1", "engine 0"]
    assert [(s.lane, s.method, s.begin, s.end, s.raised) for s in series.spans] == [
        ("driver", "run", 1, 6, True),
        ("engine 0", "release", 2, 3, False),
        ("rank 1", "sleep", 4, 5, True),
        ("rank 1", "train", 6, 6, True),
    ]


def test_a_finding_is_marked_at_its_event(broken: Evidence) -> None:
    path = broken.folder / broken.record.scenarios[1].trace
    events = list(read_trace(path))
    judged = judge_events(events, [catalogue()["LC-03"]])
    found = marks(events, judged.findings)
    assert found
    for mark, finding in zip(found, judged.findings, strict=True):
        assert events[mark.at].seq == finding.seq  # the header is not counted
        assert finding.observed in mark.said


def test_the_configuration_comes_along(record_into: Callable[..., Evidence], conforming: Evidence) -> None:
    series: Series = bytes_over_time(read_trace(conforming.folder / conforming.record.scenarios[0].trace))
    assert (series.profile, series.scenario) == ("lifecycle", "lora-cycle")
    assert series.config["lora"] is True
    assert series.claims["early_grad_release"] is True


def test_of_very_many_calls_those_kept_lie_all_along_the_axis() -> None:
    events: list[AnyEvent] = [ev.CallBegin("driver", "run", 0)]
    for i in range(20_000):
        rank = i % 4
        events += [ev.CallBegin("trainer", "sleep", i, rank=rank), ev.CallEnd("trainer", "sleep", i, rank=rank)]
    events += [ev.CallBegin("trainer", "train", 1), ev.CallRaise("trainer", "train", 1, "Refused")]
    series = bytes_over_time([*events, ev.CallEnd("driver", "run", 0)])
    assert len(series.spans) <= 10_000 < series.calls == 20_002
    assert "of 20002 calls, the longest at each place is drawn" in timeline(series)
    assert {(s.lane, s.method) for s in series.spans if s.lane == "driver" or s.raised} == {
        ("driver", "run"),
        ("rank 0", "train"),
    }
    for rank in range(4):
        begun = [s.begin for s in series.spans if s.lane == f"rank {rank}"]
        assert max(b - a for a, b in itertools.pairwise(begun)) < len(events) / 400

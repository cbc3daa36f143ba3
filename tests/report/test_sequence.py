"""A sequence diagram has each line of the transcript once, between the right two lanes, with its findings."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from colocert.judge import Evidence
from colocert.report.figures import Trace, trace_of
from colocert.report.sequence import MOST_LANES, Diagram, diagram
from colocert.report.transcript import lines
from colocert.rules.fold import Finding
from colocert.trace import AnyEvent
from colocert.trace import events as ev
from colocert_reference.colocert_impl import Reference


def of(*events: AnyEvent, findings: tuple[Finding, ...] = ()) -> Diagram:
    shown = list(lines(events))
    return diagram(events, shown, findings, 0, len(shown) - 1)


def told(found: Diagram) -> list[tuple[str, str]]:
    return [(row.arrow, row.told) for row in found.rows]


def test_a_lifecycle_call_goes_from_the_suite_to_the_rank_and_on_to_its_memory() -> None:
    found = of(
        ev.CallBegin("trainer", "sleep", 1, seq=1),
        ev.SaverCall("pause", "default", 1, seq=2),
        ev.SaverPause("default", "base", 4, True, 1, seq=3),
        ev.SaverRefused("pause", "default", 2, seq=4),
        ev.SaverFatal("pause", "default", "base", 3, "double-release", seq=5),
        ev.CallRaise("trainer", "sleep", 1, "Refused", seq=6),
    )
    assert found.lanes == ("suite", "rank 0", "memory")
    assert told(found) == [
        ("call", "suite → rank 0"),
        ("call", "rank 0 → memory"),
        ("out", "memory"),
        ("failed", "memory → rank 0"),
        ("end", "memory"),
        ("failed", "rank 0 → suite"),
    ]
    assert [row.depth for row in found.rows] == [0, 1, 2, 2, 2, 1]


def test_a_driver_calls_ranks_and_engines() -> None:
    found = of(
        ev.CallBegin("driver", "run", 1, seq=1),
        ev.CallIssue("release", 1, owner="engine", rank=1, seq=1),
        ev.EngineRelease(["weights"], owner="engine", rank=1, seq=2),
        ev.Ack(1, owner="engine", rank=1, seq=3),
        ev.CallBegin("trainer", "update_weights", 2, seq=2),
        ev.Send("adapter", 4, "device", seq=3),
        ev.CallEnd("trainer", "update_weights", 2, seq=4),
        ev.CallEnd("driver", "run", 1, seq=5),
    )
    assert found.lanes == ("suite", "driver", "rank 0", "engine 0", "engine 1")
    assert told(found) == [
        ("call", "suite → driver"),
        ("call", "driver → engine 1"),
        ("dot", "engine 1"),
        ("back", "engine 1 → driver"),
        ("call", "driver → rank 0"),
        ("send", "rank 0 → engine 0"),
        ("back", "rank 0 → driver"),
        ("back", "driver → suite"),
    ]


def test_roles_stand_between_what_is_called_and_their_memory() -> None:
    move, send = ev.Move("policy", "model", ["base"], "device", 8, seq=2), ev.Send("adapter", 4, "host", seq=3)
    send.owner = "policy"
    found = of(
        ev.CallBegin("weight_sync", "sync", 1, seq=1),
        move,
        send,
        ev.Believed({"policy.model": False}, statement=True, seq=4),
        ev.CallEnd("weight_sync", "sync", 1, seq=5),
    )
    assert found.lanes == ("suite", "weight_sync", "policy", "memory", "engine 0")
    assert told(found) == [
        ("call", "suite → weight_sync"),
        ("send", "policy → memory"),
        ("send", "policy → engine 0"),
        ("dot", "weight_sync"),
        ("back", "weight_sync → suite"),
    ]


def test_a_row_has_the_number_of_its_event_and_the_findings_about_it() -> None:
    finding = Finding(rule="LC-01", code="grads-kept", rank=0, seq=3, expected="a", observed="b")
    events = [ev.Header(schema=1, scenario="s", profile="lifecycle"), ev.ClaimsStated({"lora": True}, seq=1)]
    found = of(
        *events,
        ev.CallBegin("trainer", "sleep", 1, seq=2),
        ev.CallEnd("trainer", "sleep", 1, seq=3),
        findings=(finding,),
    )
    assert [(row.at, row.findings) for row in found.rows] == [(2, ()), (3, (finding,))]
    assert (found.first, found.last, found.total) == (2, 3, 3)


def test_a_rank_that_is_left_out_has_its_lane() -> None:
    begun = [ev.CallBegin("trainer", "init", r, rank=r, seq=1) for r in range(3)]
    events = [*begun, ev.CallBegin("trainer", "train", 9, seq=2), ev.CallEnd("trainer", "train", 9, seq=3)]
    shown = list(lines(events))
    assert diagram(events, shown, (), 3, 4).lanes == ("suite", "rank 0", "rank 1", "rank 2")


def test_very_many_ranks_stay_a_picture() -> None:
    found = of(*(ev.CallBegin("trainer", "sleep", r, rank=r, seq=1) for r in range(64)))
    assert len(found.lanes) == MOST_LANES
    assert len(found.rows) == 64
    assert all(0 <= row.target < MOST_LANES for row in found.rows)
    assert found.rows[63].told == "suite → rank 63"


@pytest.mark.parametrize("scenario", ["lora-cycle", "gpu-lora-acks-0", "cpu-lora-fault-trainer-sleep"])
def test_no_line_of_a_transcript_is_lost(
    scenario: str, record_into: Callable[..., Evidence], tmp_path: pytest.TempPathFactory
) -> None:
    evidence = record_into(tmp_path, Reference(), "reference", scenario)
    trace: Trace = trace_of(evidence, evidence.record.scenarios[0].trace)
    found = diagram(trace.events, trace.lines, (), 0, len(trace.lines) - 1)
    flat = ["".join(row.text.split()) for row in found.rows]
    assert flat == ["".join(line.text.partition("| ")[2].split() or line.text.split()) for line in trace.lines]
    numbers = [row.at for row in found.rows]
    assert numbers == sorted(set(numbers))

"""Ranks of one rig: each has a world of its own, one order of events, and one plan of faults."""

from __future__ import annotations

from typing import Any

import pytest

from colocert import Config, Rig, SaverFatal
from colocert.trace import events as ev
from colocert_reference.colocert_impl import CLAIMS


def rig(ranks: int = 3, **config: Any) -> tuple[Rig, list[Any]]:
    events: list[Any] = []
    made = Rig(Config(**{"lora": True, "ranks": ranks, **config}), CLAIMS, events.append, started=False)
    for rank in made.ranks:
        rank.start()
    return made, events


def test_the_rig_is_its_own_rank_0() -> None:
    made, _ = rig()
    assert made.ranks[0] is made
    assert [rank.rank for rank in made.ranks] == [0, 1, 2]


def test_each_rank_has_its_saver_and_its_groups() -> None:
    made, _ = rig()
    made.ranks[1].saver.pause("default")
    made.ranks[2].process_groups.destroy("data")
    assert [any(a.paused for a in rank.saver.allocations.values()) for rank in made.ranks] == [False, True, False]
    assert ["data" in rank.process_groups.alive for rank in made.ranks] == [True, True, False]


def test_events_bear_their_rank_and_one_order() -> None:
    made, events = rig()
    assert [e.seq for e in events] == list(range(1, len(events) + 1))
    made.ranks[2].data("default", "read")
    assert {e.rank for e in events if isinstance(e, ev.Data)} == {2}


def test_a_fault_goes_off_once_on_whichever_rank_comes_first() -> None:
    made, events = rig()
    made.faults.arm("clear_memory", "before")
    with pytest.raises(RuntimeError, match="injected"):
        made.ranks[1].clear_memory()
    made.ranks[0].clear_memory()
    made.ranks[1].clear_memory()
    assert len([e for e in events if isinstance(e, ev.Fault)]) == 1


def test_the_end_of_one_rank_silences_that_rank_only() -> None:
    made, events = rig()
    with pytest.raises(SaverFatal):
        made.ranks[1].saver.resume("default")
    count = len(events)
    made.ranks[1].emit(ev.Note("ghost"))
    assert len(events) == count
    made.ranks[0].emit(ev.Note("alive"))
    assert (events[-1].rank, len(events)) == (0, count + 1)


def test_a_send_names_what_it_read_and_from_where() -> None:
    made, events = rig(1)
    made.send("adapter", "default", only="adapter", version=4)
    with pytest.raises(ValueError, match="host copy"):
        made.send("adapter", "default", only="adapter", read_from="host")
    made.saver.pause("default")
    made.send("adapter", "default", only="adapter", read_from="host", version=5)
    sent = [e for e in events if isinstance(e, ev.Send)]
    assert [(e.tensors, e.read_from, e.version) for e in sent] == [(["adapter"], "device", 4), (["adapter"], "host", 5)]


def test_a_neighbour_takes_the_device_and_gives_it_back() -> None:
    made, _ = rig(1)
    made.fill_device(2 << 20)
    assert made.free_bytes() == 2 << 20
    made.relieve_device()
    assert made.free_bytes() > 2 << 20

"""The engine double refuses what a real server refuses, and writes down what happened."""

from __future__ import annotations

from typing import Any

import pytest

from colocert import Config, InjectedFault
from colocert.rig.engine import EngineDouble, EngineNotReady, EngineTagError
from colocert.rig.faults import Faults
from colocert.trace import events as ev


def engine(**config: Any) -> tuple[EngineDouble, list[Any]]:
    events: list[Any] = []
    made = EngineDouble(1, Config(**{"lora": True, **config}), events.append, Faults(events.append))
    return made, events


def of(events: list[Any], kind: type) -> list[Any]:
    return [e for e in events if isinstance(e, kind)]


def test_its_events_are_its_own() -> None:
    _, events = engine()
    assert {(e.rank, e.owner) for e in events} == {(1, "engine")}
    assert [e.tag for e in events] == ["weights", "kv_cache", "cuda_graph"]


def test_weights_have_a_mirror_and_caches_come_back_without_their_contents() -> None:
    made, events = engine()
    made.release()
    assert made.released == {"weights", "kv_cache", "cuda_graph"}
    assert {e.tag: e.backup for e in of(events, ev.SaverPause)} == {
        "weights": True,
        "kv_cache": False,
        "cuda_graph": False,
    }
    made.resume()
    assert {e.tag for e in of(events, ev.SaverResume) if e.content == ev.POISON} == {"kv_cache", "cuda_graph"}


def test_it_releases_by_default_what_it_can() -> None:
    made, _ = engine(engine_releases=frozenset({"kv_cache"}))
    made.release()
    assert made.released == {"kv_cache"}


@pytest.mark.parametrize("call", ["release", "resume"])
def test_a_strict_server_refuses_what_is_redundant_before_it_moves_anything(call: str) -> None:
    made, events = engine()
    if call == "release":
        made.release(["weights"])
    else:
        made.release(["kv_cache"])
    before = made.released
    with pytest.raises(EngineTagError):
        getattr(made, call)(["weights", "kv_cache"])
    assert made.released == before
    assert of(events, (ev.EngineRelease if call == "release" else ev.EngineResume))[-1].redundant == ["weights"]


def test_a_lenient_server_moves_the_rest() -> None:
    made, events = engine(engine_server="lenient")
    made.release(["kv_cache"])
    made.resume(["weights", "kv_cache"])
    last = of(events, ev.EngineResume)[-1]
    assert (last.tags, last.redundant, made.released) == (["kv_cache"], ["weights"], set())


def test_an_unknown_tag_is_named() -> None:
    with pytest.raises(EngineTagError, match="kv"):
        engine()[0].release(["kv"])


def test_without_a_mirror_a_release_loses_the_base_until_it_is_sent() -> None:
    made, events = engine(engine_mirror=False)
    made.release(["weights"])
    made.resume(["weights"])
    made.update("adapter", 1)
    made.generate(1)
    made.update("base", 2)
    made.generate(1)
    assert [(e.version, e.valid) for e in of(events, ev.RequestBegin)] == [(1, False), (2, True)]


def test_it_takes_no_weights_and_serves_no_request_while_memory_is_out() -> None:
    made, events = engine()
    made.release(["weights"])
    with pytest.raises(EngineNotReady, match="weights"):
        made.update("adapter", 1)
    with pytest.raises(EngineNotReady, match="weights"):
        made.generate()
    assert [e.ready for e in of(events, ev.RequestBegin)] == [False]
    assert made.in_flight == 0


def test_a_fault_leaves_its_request_in_flight_until_it_is_drained() -> None:
    made, events = engine()
    made._faults.arm("engine.generate", "before")
    with pytest.raises(InjectedFault):
        made.generate()
    assert made.in_flight == 1
    made.drain()
    assert (made.in_flight, made.admitting, len(of(events, ev.RequestEnd))) == (0, False, 1)
    made.admit()
    assert made.admitting


def test_a_fault_after_a_release_has_moved_that_tag_only() -> None:
    made, _ = engine()
    made._faults.arm("engine.release.weights", "after")
    with pytest.raises(InjectedFault):
        made.release(["weights", "kv_cache"])
    assert made.released == {"weights"}

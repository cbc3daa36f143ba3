"""What the rig of an engine knows of bytes, memory and time."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from colocert.record.drive import ProcessGone, TrainerShapeError
from colocert.record.engine import EngineSession, run_engine, take_step
from colocert.record.scenarios import Scenario, make_config
from colocert.rig.contract import Claims
from colocert.rig.engine_rig import EngineRig, Request
from colocert.rig.engine_wire import ADAPTER_TENSORS, BASE_TENSORS, AdapterFile, Sent, What, Wire
from colocert.rig.saver import SaverFatal
from colocert.trace import AnyEvent
from colocert.trace.events import CallEnd, CallRaise, Change, EngineToken, SaverTouch
from colocert_fixtures.variants.engine_of_plain_calls import PlainEngine
from colocert_reference.colocert_impl import CLAIMS
from colocert_reference.engine_ports import from_file

REQUEST = Request(1, "p", "a", 1, 10.0)


def rig_of(**config: Any) -> tuple[EngineRig, list[AnyEvent]]:
    events: list[AnyEvent] = []
    return EngineRig(make_config({"lora": True, **config}), CLAIMS, events.append), events


def adapter(rig: EngineRig, version: int) -> dict[str, bytearray]:
    return {t: rig.sent.make(What("adapter", "a", version, t)) for t in ADAPTER_TENSORS}


def last_token(events: list[AnyEvent]) -> EngineToken:
    return next(e for e in reversed(events) if isinstance(e, EngineToken))


def test_a_token_tells_each_adapter_tensor_by_its_bytes() -> None:
    rig, events = rig_of()
    a, b = ADAPTER_TENSORS
    one, two = adapter(rig, 1), adapter(rig, 2)
    for given, labels in (
        (one, ["a@1", "a@1"]),
        ({a: bytes(one[a]), b: memoryview(two[b])}, ["a@1", "a@2"]),
        ({a: one[b], b: one[a]}, ["?", "?"]),
        ({a: one[a]}, ["a@1", "?"]),
        ({a: one[a], b: b"\0" * len(one[b])}, ["a@1", "?"]),
    ):
        rig.forward(REQUEST, adapter=given)
        assert last_token(events).adapters == labels
    rig.forward(REQUEST)
    assert last_token(events).adapters == []


def test_transport_memory_that_was_taken_back_is_noise() -> None:
    """Also for whoever kept a view of it."""
    rig, _ = rig_of()
    wire = Wire(adapter(rig, 1), lambda: rig.point("wire"))
    views, copies = dict(wire), {t: bytes(d) for t, d in wire.items()}
    wire.take_back()
    assert [rig.sent.what(v) for v in views.values()] == [None, None]
    assert [w.version for v in copies.values() if (w := rig.sent.what(v))] == [1, 1]


def test_an_adapter_file_is_safetensors_and_is_written_over_in_place(tmp_path: Path) -> None:
    sent = Sent()
    buffers = {t: sent.make(What("adapter", "a", 1, t)) for t in ADAPTER_TENSORS}
    file = AdapterFile(tmp_path / "a.safetensors", buffers)
    size = file.path.stat().st_size
    assert from_file(file.path) == {t: bytes(d) for t, d in buffers.items()}
    file.take_back()
    assert file.path.stat().st_size == size
    assert {sent.what(d) for d in from_file(file.path).values()} == {None}
    file.path.write_bytes(file.path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="must end within the file"):
        from_file(file.path)


def test_the_base_is_valid_once_every_tensor_is_of_one_version() -> None:
    rig, events = rig_of(engine_mirror=False)
    valid = [rig.base_valid()]
    rig.saver.pause("weights")
    rig.saver.resume("weights")
    valid.append(rig.base_valid())
    for version, tensors in ((1, BASE_TENSORS[:1]), (2, BASE_TENSORS[1:]), (2, BASE_TENSORS[:1])):
        for tensor in tensors:
            rig.write(tensor, rig.sent.make(What("base", "", version, tensor)))
        valid.append(rig.base_valid())
    rig.write(BASE_TENSORS[0], b"anything")
    assert [*valid, rig.base_valid()] == [True, False, False, False, True, False]
    told = [e.facts["valid"] for e in events if isinstance(e, Change) and e.what == "engine.base"]
    assert told == [False, True, False]


def test_a_mirrored_base_survives_a_release() -> None:
    rig, _ = rig_of()
    rig.saver.pause("weights")
    rig.saver.resume("weights")
    assert rig.base_valid()


def test_a_token_on_released_memory_is_in_the_trace_and_ends_the_process() -> None:
    rig, events = rig_of()
    rig.saver.pause("kv_cache")
    with pytest.raises(SaverFatal):
        rig.forward(REQUEST)
    assert last_token(events).released == ["kv_cache"]
    assert isinstance(events[-1], SaverTouch)


def run(engine: Any, *steps: str) -> list[AnyEvent]:
    events: list[AnyEvent] = []
    scenario = Scenario("test", {"lora": True}, steps, "", "engine")
    run_engine(SimpleNamespace(claims=CLAIMS, engine=engine), Claims.of(CLAIMS), scenario, events.append)
    return events


def test_an_engine_without_the_calls_of_one_is_named() -> None:
    with pytest.raises(TrainerShapeError, match="without release"):
        run(lambda rig: object())


def test_an_exit_is_the_end_of_the_scenario() -> None:
    class Exits(PlainEngine):
        def generate(self, request: Request) -> list[str]:
            raise SystemExit(1)

    with pytest.raises(ProcessGone, match="SystemExit"):
        run(Exits, "ask - p", "ask - p")


def test_a_coroutine_that_does_not_end_is_given_up_and_the_scenario_goes_on() -> None:
    class Hangs(PlainEngine):
        async def generate(self, request: Request) -> list[str]:  # type: ignore[override]
            await asyncio.Event().wait()
            return []

    events = run(Hangs, "ask - p", "release kv_cache")
    assert [e.facts["method"] for e in events if isinstance(e, Change) and e.what == "call.overdue"] == ["generate"]
    assert [e.method for e in events if isinstance(e, CallEnd)] == ["release", "close"]


def test_a_call_other_than_a_request_that_does_not_end_is_the_end_of_the_scenario() -> None:
    class Hangs(PlainEngine):
        async def release(self, tags: Any) -> None:  # type: ignore[override]
            await asyncio.Event().wait()

    with pytest.raises(ProcessGone, match=r"release\(\) did not end within 120 s"):
        run(Hangs, "release kv_cache", "ask - p")


def test_a_request_that_the_engine_cancels_is_an_error_like_another() -> None:
    class Cancels(PlainEngine):
        async def generate(self, request: Request) -> list[str]:  # type: ignore[override]
            raise asyncio.CancelledError

    events = run(Cancels, "ask - p", "release kv_cache")
    assert [e.error for e in events if isinstance(e, CallRaise)] == ["CancelledError"]
    assert [e.method for e in events if isinstance(e, CallEnd)] == ["release", "close"]


def test_an_error_of_ready_says_nothing() -> None:
    class Raises(PlainEngine):
        def ready(self) -> bool:
            raise OSError

    events = run(Raises, "release kv_cache")
    assert [e for e in events if isinstance(e, Change) and e.what == "engine.ready"] == []


def test_a_plain_request_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colocert.record.engine.REAL_SECONDS", 0.1)

    class Hangs(PlainEngine):
        def generate(self, request: Request) -> list[str]:
            time.sleep(30)
            return []

    events = run(Hangs, "ask - p", "release kv_cache")
    assert isinstance(events[-1], Change)
    assert events[-1].what == "call.overdue"


def test_a_fault_of_the_wire_raises_in_whoever_reads_it() -> None:
    """The nth tensor that is taken."""
    events = run(PlainEngine, "fault wire before 2", "adapter a 1")
    assert [e.error for e in events if isinstance(e, CallRaise)] == ["InjectedFault"]


def test_tags_that_the_claims_leave_out_are_left_out() -> None:
    claims = dataclasses.replace(CLAIMS, engine_releases=frozenset({"kv_cache"}))
    rig = EngineRig(make_config({"lora": True}), claims, lambda event: None)
    asked: list[Any] = []

    class Engine(PlainEngine):
        def release(self, tags: Any) -> None:
            asked.append(tags)

    session = EngineSession(rig)
    session.engine = Engine(rig)
    take_step(session, "release weights,kv_cache")
    take_step(session, "release weights")
    assert asked == [["kv_cache"]]

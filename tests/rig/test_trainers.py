"""The trainer double does right whatever it is asked; its handle writes each call down, and death is not an error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from colocert import Config, InjectedFault, Rig
from colocert.record.scenarios import make_config
from colocert.rig.trainers import RankDied, TrainerHandle
from colocert.trace import events as ev
from colocert_reference.colocert_impl import CLAIMS


def rig(**config: Any) -> tuple[Rig, TrainerHandle, list[Any]]:
    events: list[Any] = []
    made = Rig(make_config({"lora": True, **config}), CLAIMS, events.append, capacity=1 << 30, started=False)
    made.trainers[0].init()
    return made, made.trainers[0], events


def of(events: list[Any], *kinds: type) -> list[Any]:
    return [e for e in events if isinstance(e, kinds) and not e.owner]


def moves(events: list[Any]) -> list[str]:
    """Which tags went out and came back, once for each move of a tag."""
    steps = [("-" if isinstance(e, ev.SaverPause) else "+") + e.tag for e in of(events, ev.SaverPause, ev.SaverResume)]
    return [step for i, step in enumerate(steps) if i == 0 or steps[i - 1] != step]


def test_memory_comes_with_init_and_only_once() -> None:
    made, handle, events = rig()
    count = len(of(events, ev.SaverAlloc))
    assert count == len(made.saver.allocations) > 0
    handle.init()
    assert len(of(events, ev.SaverAlloc)) == count


def test_gradients_go_first_and_come_back_last_each_once() -> None:
    _, handle, events = rig()
    for call in ("offload_grad_buffer", "offload_grad_buffer", "sleep", "sleep", "wake_up", "wake_up"):
        getattr(handle, call)()
    assert moves(events) == ["-grad_buffer", "-default", "+default", "+grad_buffer"]


def test_an_early_release_is_undone_by_a_step() -> None:
    _, handle, events = rig()
    handle.offload_grad_buffer()
    handle.train()
    assert moves(events) == ["-grad_buffer", "+grad_buffer"]
    assert not of(events, ev.SaverTouch)


def test_it_sends_from_wherever_the_weights_are() -> None:
    made, handle, events = rig()
    handle.train()
    handle.update_weights()
    handle.sleep()
    handle.update_weights()
    assert [(e.kind, e.read_from, e.version) for e in of(events, ev.Send)] == [
        ("adapter", "device", 1),
        ("adapter", "host", 1),
    ]
    assert made.engines[0].version == 1


def test_an_engine_that_lost_its_base_is_sent_it_before_the_adapter() -> None:
    made, handle, events = rig(engine_mirror=False)
    made.engines[0].release(["weights"])
    made.engines[0].resume(["weights"])
    handle.update_weights()
    assert [e.kind for e in of(events, ev.Send)] == ["base", "adapter"]
    assert made.engines[0].base_valid


def test_rank_0_sends_to_every_engine_and_the_others_take_part() -> None:
    events: list[Any] = []
    made = Rig(make_config({"lora": True, "ranks": 2, "engines": 2}), CLAIMS, events.append, started=False)
    for handle in made.trainers:
        handle.init()
        handle.train()
        handle.update_weights()
    assert [e.rank for e in of(events, ev.Send)] == [0]
    assert [e.version for e in made.engines] == [1, 1]


def test_rematerialised_parameters_stay_until_they_are_sent() -> None:
    _, handle, events = rig(lora=False, rematerialize=True)
    handle.train()
    handle.sleep()
    assert moves(events) == ["-grad_buffer", "-default"]
    handle.update_weights()
    handle.update_weights()
    assert moves(events)[2:] == ["-param_buffer"]
    assert [e.tensors for e in of(events, ev.Send)] == [["params"]]


def test_every_call_is_written_with_its_end_or_its_error() -> None:
    made, handle, events = rig()
    made.faults.arm("trainer.sleep", "before")
    with pytest.raises(InjectedFault):
        handle.sleep()
    handle.sleep()
    told = [(type(e).__name__, e.method, e.call) for e in of(events, ev.CallBegin, ev.CallEnd, ev.CallRaise)]
    assert told[2:] == [
        ("CallBegin", "sleep", 2),
        ("CallRaise", "sleep", 2),
        ("CallBegin", "sleep", 3),
        ("CallEnd", "sleep", 3),
    ]


def test_a_rank_that_the_saver_ended_is_dead_from_then_on() -> None:
    """Its caller sees `RankDied`, an ordinary error; the rank itself writes nothing more."""
    made, handle, events = rig()
    handle.sleep()
    made.fill_device(2 << 20)
    with pytest.raises(RankDied, match="wake_up"):
        handle.wake_up()
    assert isinstance(events[-1], ev.SaverFatal)
    count = len(events)
    with pytest.raises(RankDied, match="has ended"):
        handle.sleep()
    assert len(events) == count


def test_a_trainer_of_coroutines_can_be_chained() -> None:
    """Its call ends when the coroutine does."""
    made, _, events = rig()

    class Slow:
        async def sleep(self) -> str:
            await asyncio.sleep(5)
            made.record("slept")
            return "asleep"

        async def wake_up(self) -> None:
            raise ValueError("still tired")

    handle = made.chain([Slow()])[0]
    assert made.run(handle.sleep()) == "asleep"
    assert [type(e).__name__ for e in events[-3:]] == ["CallBegin", "Note", "CallEnd"]
    with pytest.raises(ValueError, match="tired"):
        made.run(handle.wake_up())
    assert isinstance(events[-1], ev.CallRaise)
    made.close()


def test_chaining_takes_one_trainer_a_rank() -> None:
    events: list[Any] = []
    made = Rig(Config(lora=True, ranks=2), CLAIMS, events.append, started=False)
    with pytest.raises(ValueError, match="zip"):
        made.chain([object()])

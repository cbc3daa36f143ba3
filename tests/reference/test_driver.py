"""The reference driver: both hand-offs in both modes, call for call; what it refuses; how it comes back from errors."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from colocert.judge_trace import judge_events
from colocert.record.registry import BY_ID, run
from colocert.record.scenarios import Scenario
from colocert.rules.catalogue import catalogue
from colocert.trace import AnyEvent
from colocert_fixtures.mutants.handoff import (
    awaits_the_first_rank_only,
    returns_at_the_first_error,
    wakes_the_trainer_during_the_release,
)
from colocert_reference.colocert_impl import CLAIMS
from colocert_reference.colocert_impl import implementation as reference
from colocert_reference.driver import GRAPH, KV, WEIGHTS, Driver, DriverSettings, ImpossibleConfiguration

TAGS = frozenset({WEIGHTS, KV, GRAPH})


class Broken(RuntimeError):
    """The step that was chosen to fail."""


class World:
    """Both sides as one list of calls. The call numbered `breaks` fails, before its effect or after it."""

    def __init__(self, breaks: int = 0, *, after: bool = False) -> None:
        self.calls: list[str] = []
        self.out: set[str] = set()
        self.asleep: set[str] = set()
        self.breaks, self.after = breaks, after

    def done(self, call: str, out: Collection[str] = (), back: Collection[str] = (), *, side: str = "out") -> None:
        """One call of either side, and what it releases or takes back."""
        self.calls.append(call)
        held = getattr(self, side)
        breaks = len(self.calls) == self.breaks
        if breaks and not self.after:
            raise Broken(call)
        held |= set(out)
        held -= set(back)
        if breaks:
            raise Broken(call)


class Trainers:
    def __init__(self, world: World) -> None:
        self.world = world

    def init(self) -> None:
        self.world.done("init")

    def offload_grad_buffer(self) -> None:
        self.world.done("offload_grad_buffer", ["grads"], side="asleep")

    def clear_memory(self) -> None:
        self.world.done("clear_memory")

    def sleep(self) -> None:
        self.world.done("sleep", ["grads", "default"], side="asleep")

    def update_weights(self) -> None:
        assert WEIGHTS not in self.world.out
        self.world.done("update_weights")

    def wake_up(self) -> None:
        self.world.done("wake_up", (), ["grads", "default"], side="asleep")

    def train(self) -> None:
        self.world.done("train", (), ["grads", "default"], side="asleep")


class Engines:
    """Strict: what is asked twice is refused."""

    def __init__(self, world: World) -> None:
        self.world = world

    def released(self) -> Collection[str]:
        return set(self.world.out)

    def release(self, tags: Collection[str]) -> None:
        assert not self.world.out & set(tags)
        self.world.done(f"release {' '.join(tags)}", tags)

    def resume(self, tags: Collection[str]) -> None:
        assert self.world.out >= set(tags)
        self.world.done(f"resume {' '.join(tags)}", (), tags)

    def drain(self) -> None:
        self.world.done("drain")

    def flush(self) -> None:
        self.world.done("flush")

    def admit(self) -> None:
        self.world.done("admit")

    def generate(self) -> None:
        assert not self.world.out
        assert self.world.asleep - {"critic"} == {"grads", "default"}
        self.world.done("generate")


class Critics:
    """Their calls are listed with a `critic` before them."""

    def __init__(self, world: World) -> None:
        self.world = world

    def init(self) -> None:
        self.world.done("critic init")

    def sleep(self) -> None:
        self.world.done("critic sleep", ["critic"], side="asleep")

    def wake_up(self) -> None:
        self.world.done("critic wake_up", (), ["critic"], side="asleep")

    def train(self) -> None:
        assert "critic" not in self.world.asleep
        self.world.done("critic train")


def driver(world: World, peak: str, *, lora: bool = True, **settings: Any) -> Driver:
    made = DriverSettings(**{"peak_device": peak, "lora": lora, "releasable": TAGS, **settings})
    return Driver(Trainers(world), Engines(world), made)


# ---- the order, as the first seed describes it

START = {
    "gpu": ["drain", "release kv_cache cuda_graph", "init"],
    "cpu": ["drain", "release kv_cache cuda_graph", "release weights", "init"],
}
TO_ROLLOUT = {
    ("gpu", True): ["clear_memory", "offload_grad_buffer", "resume weights", "sleep", "update_weights"],
    ("gpu", False): ["resume weights", "sleep", "update_weights"],
    ("cpu", True): ["sleep", "resume weights", "sleep", "update_weights"],
    ("cpu", False): ["sleep", "resume weights", "sleep", "update_weights"],
}
CACHES_BACK = ["flush", "resume kv_cache cuda_graph", "admit"]
TO_TRAIN = {
    "gpu": ["drain", "release kv_cache cuda_graph", "wake_up", "release weights"],
    "cpu": ["drain", "release kv_cache cuda_graph", "release weights", "wake_up"],
}

each_mode = pytest.mark.parametrize(("peak", "lora"), TO_ROLLOUT, ids=lambda v: {True: "lora", False: "full"}.get(v, v))


@each_mode
def test_both_hand_offs_call_for_call(peak: str, lora: bool) -> None:
    """gpu-peak: gradients, engine weights, trainer, sync, caches; and back. cpu-peak: each side whole, in turn."""
    world = World()
    driver(world, peak, lora=lora).run(1)
    first = [call for call in TO_ROLLOUT[peak, lora] if call != "resume weights" or peak == "cpu"]
    expected = [*START[peak], *first, *CACHES_BACK, "generate", *TO_TRAIN[peak], "train"]
    assert world.calls == [*expected, *TO_ROLLOUT[peak, lora], *CACHES_BACK]


@each_mode
def test_a_later_run_goes_on_from_the_rollout(peak: str, lora: bool) -> None:
    world = World()
    made = driver(world, peak, lora=lora)
    made.run(1)
    world.calls.clear()
    made.run(1)
    assert "init" not in world.calls
    assert world.calls.count("generate") == world.calls.count("train") == 1


def test_evaluation_and_resampling_are_rollouts_without_a_hand_off() -> None:
    world = World()
    driver(world, "gpu", rollouts=3).run(1)
    place = world.calls.index("generate")
    assert world.calls[place : place + 3] == ["generate"] * 3


@pytest.mark.parametrize(
    "releasable", [frozenset({KV}), frozenset({WEIGHTS}), frozenset()], ids=["kv", "weights", "no"]
)
@pytest.mark.parametrize("peak", ["gpu", "cpu"])
def test_it_moves_the_tags_that_this_engine_releases_and_no_others(peak: str, releasable: frozenset[str]) -> None:
    world = World()
    made = driver(world, peak, releasable=releasable)
    made.run(2)
    made.close()
    named = {tag for call in world.calls for tag in call.split()[1:]}
    assert named == releasable


@each_mode
def test_close_gives_the_engine_everything_back_and_sends_what_waits(peak: str, lora: bool) -> None:
    """Rematerialised parameters stay on the device until they are sent."""
    world = World()
    made = driver(world, peak, lora=lora)
    made.close()
    assert world.calls == ["drain"]
    made.run(1)
    made.engines.release([KV])
    world.calls.clear()
    made.close()
    assert world.calls == ["drain", "sleep", "resume kv_cache"]
    made.unsent = True
    world.calls.clear()
    made.close()
    assert world.calls == ["drain", "sleep", "update_weights"]


# ---- refusals (HO-08)


@pytest.mark.parametrize("setting", ["offload_train", "offload_rollout", "use_critic"])
def test_gpu_peak_refuses_what_it_cannot_do_before_any_call(setting: str) -> None:
    """The message names the settings that it got."""
    world = World()
    with pytest.raises(ImpossibleConfiguration, match=setting):
        driver(world, "gpu", **{setting: setting == "use_critic"})
    assert world.calls == []


def test_cpu_peak_and_lora_are_not_refused() -> None:
    for settings in ({"offload_train": False}, {"offload_rollout": False}, {"use_critic": True}):
        driver(World(), "cpu", **settings)
    driver(World(), "gpu", lora=True)
    with pytest.raises(ImpossibleConfiguration, match="tpu"):
        driver(World(), "tpu")


@pytest.mark.parametrize("name", ["no-train-offload", "no-rollout-offload", "critic"])
def test_on_the_rig_a_refusal_has_no_effect(name: str) -> None:
    """Not an allocation, a move or a call."""
    events: list[AnyEvent] = []
    run(reference, CLAIMS, BY_ID[f"gpu-lora-{name}"], events.append)
    own = [e for e in events if not e.owner]
    assert [type(e).__name__ for e in own] == ["Config", "ClaimsStated", "CallBegin", "CallRaise"]
    assert {type(e).__name__ for e in events if e.owner} == {"SaverAlloc"}


def test_a_critic_has_the_device_before_the_trainer_in_cpu_peak() -> None:
    world = World()
    settings = DriverSettings(peak_device="cpu", lora=True, releasable=TAGS, use_critic=True)
    Driver(Trainers(world), Engines(world), settings, Critics(world)).run(1)
    start = [*START["cpu"][:-1], "critic init", "critic sleep", "init"]
    to_rollout = ["critic sleep", *TO_ROLLOUT["cpu", True], *CACHES_BACK]
    to_train = [*TO_TRAIN["cpu"][:-1], "critic wake_up", "critic train", "critic sleep", "wake_up"]
    assert world.calls == [*start, *to_rollout, "generate", *to_train, "train", *to_rollout]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_with_a_critic_a_run_after_an_error_at_any_step_is_an_ordinary_run(after: bool) -> None:
    settings = DriverSettings(peak_device="cpu", lora=True, releasable=TAGS, use_critic=True)
    whole = World()
    Driver(Trainers(whole), Engines(whole), settings, Critics(whole)).run(1)
    for breaks in range(1, len(whole.calls) + 1):
        world = World(breaks, after=after)
        made = Driver(Trainers(world), Engines(world), settings, Critics(world))
        with pytest.raises(Broken):
            made.run(1)
        made.run(1)
        assert (world.out, world.asleep) == (set(), {"grads", "default", "critic"})


# ---- recovery (HO-10)


def steps(peak: str, lora: bool) -> int:
    world = World()
    made = driver(world, peak, lora=lora)
    made.run(1)
    return len(world.calls)


@each_mode
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_run_after_an_error_at_any_step_is_an_ordinary_run(peak: str, lora: bool, after: bool) -> None:
    """Nothing is released or resumed twice, and it ends ready for the next rollout."""
    for breaks in range(1, steps(peak, lora) + 1):
        world = World(breaks, after=after)
        made = driver(world, peak, lora=lora)
        with pytest.raises(Broken):
            made.run(1)
        made.run(1)
        assert (world.out, world.asleep) == (set(), {"grads", "default"})
        assert world.calls[-1] == "admit"


@each_mode
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_close_after_an_error_at_any_step_leaves_nothing_half_released(peak: str, lora: bool, after: bool) -> None:
    for breaks in range(1, steps(peak, lora) + 1):
        world = World(breaks, after=after)
        made = driver(world, peak, lora=lora)
        with pytest.raises(Broken):
            made.run(1)
        made.close()
        assert world.out == set()
        assert world.asleep in (set(), {"grads", "default"})


# ---- acknowledgements (HO-07)

SEEDS = range(200)
HO_07 = [catalogue()["HO-07"]]
REST = [rule for rule in catalogue().values() if rule.profile == "handoff"]


def order(seed: int, peak: str) -> Scenario:
    """One iteration of three ranks and two engines, acknowledged in the seed's order."""
    config = {"lora": True, "peak_device": peak, "ranks": 3, "engines": 2}
    return Scenario(f"order-{seed}", config, ("run 1", "close"), "", "handoff", seed)


def events_of(implementation: Any, scenario: Scenario) -> list[AnyEvent]:
    events: list[AnyEvent] = []
    run(implementation, CLAIMS, scenario, events.append)
    return events


@pytest.mark.parametrize("peak", ["gpu", "cpu"])
def test_no_phase_starts_early_in_any_order_of_acknowledgements(peak: str) -> None:
    """And no other rule finds fault."""
    orders = set()
    for seed in SEEDS:
        events = events_of(reference, order(seed, peak))
        judged = judge_events(events, REST)
        assert (seed, judged.findings) == (seed, ())
        assert judged.exercised["HO-07"]["started-early"] > 8
        orders.add(tuple((e.owner, e.rank) for e in events if type(e).__name__ == "Ack"))
    assert len(orders) == len(SEEDS)


@pytest.mark.parametrize("mutant", [awaits_the_first_rank_only, wakes_the_trainer_during_the_release])
@pytest.mark.parametrize("peak", ["gpu", "cpu"])
def test_a_driver_that_does_not_await_everyone_is_found_in_the_scenarios_orders(mutant: Any, peak: str) -> None:
    """In at least one of the seeds that the suite runs; here in every one."""
    seeds = [BY_ID[f"{peak}-lora-acks-{seed}"] for seed in range(5)]
    found = [bool(judge_events(events_of(mutant.implementation, s), HO_07).findings) for s in seeds]
    assert found == [True] * 5


def test_a_group_call_that_returns_at_the_first_error_is_found_after_one() -> None:
    """While all is well it awaits everyone."""
    calm = events_of(returns_at_the_first_error.implementation, BY_ID["gpu-lora-acks-0"])
    assert judge_events(calm, HO_07).findings == ()
    faulted = [s for name, s in BY_ID.items() if s.profile == "handoff" and "-fault-trainer-" in name]
    broken = (events_of(returns_at_the_first_error.implementation, scenario) for scenario in faulted)
    assert any(judge_events(events, HO_07).findings for events in broken)

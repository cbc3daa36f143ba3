"""Exploration covers every sequence, merges soundly, and finds the shortest one that breaks a rule."""

from __future__ import annotations

import itertools
from typing import Any

from colocert.judge_trace import judge_events
from colocert.record.explore import Explorer
from colocert.record.scenarios import LORA, Scenario
from colocert.record.steps import run_scenario
from colocert.rules.catalogue import catalogue
from colocert_reference.colocert_impl import Reference, ReferenceTrainer

CONFIG = Scenario("explore", LORA, ())
RULES = list(catalogue().values())


class Unmerged(ReferenceTrainer):
    fingerprint = None  # type: ignore[assignment]


class ForgetsEarlyRelease(ReferenceTrainer):
    """Wakes only what a complete sleep released."""

    def wake_up(self) -> None:
        if "default" in self.released:
            super().wake_up()


class CountsSleeps(ReferenceTrainer):
    """Releases twice at its third sleep."""

    sleeps = 0

    def sleep(self) -> None:
        self.sleeps += 1
        if self.sleeps == 3 and self.released:
            self.ports.memory.pause("default")
        super().sleep()


class HidesItsCount(CountsSleeps):
    """Its fingerprint leaves out what its next calls depend on."""

    def fingerprint(self) -> tuple[object, ...]:
        counted, self.sleeps = self.sleeps, 0
        try:
            return super().fingerprint()
        finally:
            self.sleeps = counted


def explore(trainer: type[ReferenceTrainer], depth: int, fault_depth: int) -> tuple[Any, Explorer]:
    reference = Reference(trainer=trainer)
    explorer = Explorer(reference, reference.claims, CONFIG, RULES)
    return explorer.run(depth, fault_depth), explorer


def test_every_sequence_is_counted() -> None:
    record, _ = explore(ReferenceTrainer, 4, 0)
    assert record.sequences == sum(len(record.calls) ** n for n in range(1, 5))
    assert record.faulted == 0


def test_merged_and_unmerged_runs_cover_the_same_sequences() -> None:
    merged, a = explore(ReferenceTrainer, 3, 2)
    unmerged, b = explore(Unmerged, 3, 2)
    assert (merged.sequences, merged.faulted) == (unmerged.sequences, unmerged.faulted)
    assert merged.runs < unmerged.runs
    assert unmerged.states == 0
    assert not a.discoveries
    assert not b.discoveries


def test_merged_and_unmerged_runs_find_the_same() -> None:
    _, merged = explore(ForgetsEarlyRelease, 4, 3)
    _, unmerged = explore(type("Unmerged", (ForgetsEarlyRelease,), {"fingerprint": None}), 4, 3)
    assert set(merged.discoveries) == set(unmerged.discoveries)
    for key, found in merged.discoveries.items():
        assert len(found.path) == len(unmerged.discoveries[key].path)


def test_the_shortest_sequence_is_found() -> None:
    _, explorer = explore(ForgetsEarlyRelease, 4, 0)
    found = explorer.discoveries["LC-08", "early-release-left"]
    assert [t.method for t in found.path] == ["offload_grad_buffer", "wake_up"]


def test_an_explored_sequence_replayed_as_a_scenario_shows_the_same() -> None:
    reference = Reference(trainer=ForgetsEarlyRelease)
    _, explorer = explore(ForgetsEarlyRelease, 3, 3)
    for (rule, code), found in explorer.discoveries.items():
        steps = tuple(step for taken in found.path for step in taken.steps())
        events: list[Any] = []
        run_scenario(reference, reference.claims, Scenario("again", LORA, steps), events.append)
        assert any((f.rule, f.code) == (rule, code) for f in judge_events(events, RULES).findings)


def test_state_that_a_fingerprint_shows_is_told_apart() -> None:
    record, explorer = explore(CountsSleeps, 4, 0)
    assert ("LC-05", "double-release") in explorer.discoveries
    assert not record.detail


def test_a_fingerprint_that_hides_state_ends_the_merging() -> None:
    record, explorer = explore(HidesItsCount, 4, 0)
    assert "fingerprint()" in record.detail
    assert record.states == 0
    assert ("LC-05", "double-release") in explorer.discoveries


def test_every_single_fault_of_a_call_is_injected() -> None:
    record, explorer = explore(ReferenceTrainer, 1, 1)
    passed = {method: explorer._cache[next(iter(explorer._states)), method, None].points for method in record.calls}
    assert record.faulted == sum(len(ways) for points in passed.values() for _, ways in points)
    assert {point for point, _ in passed["sleep"]} == {
        "clear_memory",
        "groups.destroy",
        "saver.pause.grad_buffer",
        "saver.pause.default",
    }


def test_nothing_illegal_on_the_reference_at_depth_six_with_every_single_fault() -> None:
    record, explorer = explore(ReferenceTrainer, 6, 6)
    assert record.sequences == sum(6**n for n in range(1, 7))
    assert record.faulted > record.sequences
    assert not explorer.discoveries


def test_all_sequences_run_plainly_agree_with_the_merged_count() -> None:
    """The count is what a plain enumeration gives."""
    record, _ = explore(ReferenceTrainer, 3, 0)
    plain = [s for n in (1, 2, 3) for s in itertools.product(record.calls, repeat=n)]
    assert record.sequences == len(plain)

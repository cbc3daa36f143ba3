"""The adapter for miles' driver loop: where it is claimed, what it refuses, and the verdicts on public checkouts.

The verdicts need a checkout of miles with its `train.py`, named by `COLOCERT_MILES_PATH`; no wheel has one.
"""

from __future__ import annotations

import importlib.util
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

from colocert.adapters import miles
from colocert.judge_trace import judge_events
from colocert.record.manifest import COMPLETE, Options
from colocert.record.registry import BY_ID
from colocert.record.runner import record
from colocert.rig import Claims, Config, Rig
from colocert.rig.contract import check_implementation
from colocert.rules.catalogue import catalogue
from colocert.trace import AnyEvent, read_trace
from colocert.trace.events import CallEnd, CallRaise, EngineResume, RequestBegin

NEEDS = ("torch", "megatron.core", "torch_memory_saver", "ray", "transformers", "numpy")
OPTION = "--colocate-memory-peak-device"
RULES = [rule for rule in catalogue().values() if rule.profile == "handoff"]

GPU_PEAK_BRANCH = {
    ("HO-09", "sync-owed"),
    ("HO-15", "redundant-resume"),
}
MAIN = {
    ("HO-04", "more-than-the-sync-reads"),
    ("HO-04", "resident-together"),
    ("HO-06", "before-release"),
    ("HO-09", "half-released"),
    ("HO-10", "left-half-released"),
    ("HO-11", "trainer-resident"),
    ("HO-15", "redundant-resume"),
}
"""What the two versions fail, explained one by one in docs/certified.md."""


def tree(root: Path, monkeypatch: pytest.MonkeyPatch, *, loop: bool) -> None:
    """A folder with an empty package `miles`, with or without a driver loop, named in `COLOCERT_MILES_PATH`."""
    (root / "miles").mkdir()
    (root / "miles" / "__init__.py").write_text("")
    if loop:
        (root / "train.py").write_text("create_rollout_manager(args, pg)\n")
    monkeypatch.setenv(miles.MILES.variable, str(root))


def test_a_wheel_claims_no_hand_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, monkeypatch, loop=False)
    assert not hasattr(miles.implementation, "driver")
    assert check_implementation(miles.implementation, "miles")[3] == ("lifecycle",)


def test_a_checkout_claims_the_hand_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, monkeypatch, loop=True)
    assert check_implementation(miles.implementation, "miles")[3] == ("lifecycle", "handoff")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(lora=True, engine_releases=frozenset()), "takes kv_cache or weight"),
        (Config(lora=True), "this version has no --colocate-memory-peak-device"),
    ],
)
def test_what_miles_options_cannot_express_is_refused(
    config: Config, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree(tmp_path, monkeypatch, loop=True)
    rig = Rig(config, miles.implementation.claims, lambda event: None, started=False)
    with pytest.raises(ValueError, match=message):
        miles.implementation.driver(rig)
    rig.close()


Runs = Mapping[str, list[AnyEvent]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The events of every hand-off scenario that the checkout's claims ask for, by scenario."""
    if not os.environ.get(miles.MILES.variable) or not hasattr(miles.implementation, "driver"):
        pytest.skip("no checkout of miles with train.py here: set COLOCERT_MILES_PATH")
    for name in NEEDS:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            pytest.skip(f"miles needs {name}: pip install 'colocert[reference]'")
    folder = tmp_path_factory.mktemp("miles")
    made = record("colocert.adapters.miles", folder, Options(profiles=("handoff",), depth=0, workers=2, controls=False))
    assert made.problem is None
    assert {s.status for s in made.scenarios} == {COMPLETE}
    return {s.id: list(read_trace(folder / s.trace)) for s in made.scenarios}


def has_gpu_peak() -> bool:
    return OPTION in miles.MILES.source("miles.utils.arguments")


def found(runs: Runs, *ids: str) -> dict[tuple[str, str], set[str]]:
    """Rule and code to the scenarios that show it, over these scenarios or all."""
    shown: dict[tuple[str, str], set[str]] = defaultdict(set)
    for scenario in ids or runs:
        for finding in judge_events(runs[scenario], RULES).findings:
            shown[finding.rule, finding.code].add(scenario)
    return shown


@pytest.mark.slow
@pytest.mark.torch
class TestTheCheckout:
    """The public main of 2026-08-21 or the gpu-peak branch of 2026-07-28, in every hand-off scenario."""

    def test_the_known_rules_are_red_and_no_others(self, runs: Runs) -> None:
        assert set(found(runs)) == (GPU_PEAK_BRANCH if has_gpu_peak() else MAIN)

    def test_every_other_bound_rule_was_exercised(self, runs: Runs) -> None:
        met = {
            rule for events in runs.values() for rule, codes in judge_events(events, RULES).exercised.items() if codes
        }
        facts = Claims.of(miles.implementation.claims).facts()
        assert {rule.id for rule in RULES if rule.bound(facts)} <= met

    def test_gpu_peak_keeps_its_order(self, runs: Runs) -> None:
        if not has_gpu_peak():
            pytest.skip("this version has no gpu-peak mode")
        met = judge_events(runs["gpu-lora-three"], RULES).exercised
        assert met["HO-01"]["weights-before-grads"] == 2
        assert met["HO-02"]["weights-before-trainer"] == 3
        assert not {"HO-01", "HO-02"} & {rule for rule, _ in found(runs)}

    @pytest.mark.parametrize("kind", ["lora", "full"])
    def test_a_kv_cache_that_stayed_is_resumed(self, runs: Runs, kind: str) -> None:
        events = runs[f"cpu-{kind}-weights-only"]
        resumed = [e for e in events if isinstance(e, EngineResume) and "kv_cache" in e.redundant]
        assert resumed
        assert ("HO-15", "redundant-resume") in found(runs, f"cpu-{kind}-weights-only")

    def test_weights_that_stayed_are_resumed_on_main_alone(self, runs: Runs) -> None:
        shown = found(runs, "cpu-lora-kv-only")
        assert (("HO-15", "redundant-resume") in shown) is not has_gpu_peak()

    def test_only_a_last_iteration_without_evaluation_owes_a_sync(self, runs: Runs) -> None:
        if not has_gpu_peak():
            pytest.skip("main ends its last iteration like any other")
        assert ("HO-09", "sync-owed") in found(runs, "gpu-lora-one")
        assert not found(runs, "gpu-lora-evaluate", "cpu-lora-evaluate")

    def test_full_parameter_runs_of_main_fail_the_offload_levels_alone(self, runs: Runs) -> None:
        if has_gpu_peak():
            pytest.skip("for main")
        full = [scenario for scenario in runs if "-full-" in scenario]
        assert found(runs, *full) == {("HO-15", "redundant-resume"): {"cpu-full-weights-only", "cpu-full-kv-only"}}

    def test_impossible_gpu_peak_settings_are_refused_before_any_effect(self, runs: Runs) -> None:
        if not has_gpu_peak():
            pytest.skip("this version has no gpu-peak mode")
        for name in ("no-train-offload", "no-rollout-offload", "critic"):
            met = judge_events(runs[f"gpu-lora-{name}"], RULES).exercised
            assert met["HO-08"]["not-refused"] > 0

    def test_a_critic_trains_in_cpu_peak_beside_the_actors(self, runs: Runs) -> None:
        events = runs["cpu-full-critic"]
        trained = [e.actor for e in events if isinstance(e, CallEnd) and e.method == "train"]
        assert sorted(trained) == ["critic", "critic", "trainer", "trainer"]  # side by side, or one after the other
        assert not [e for e in events if isinstance(e, CallRaise)]

    def test_a_resampled_rollout_asks_the_engines_twice(self, runs: Runs) -> None:
        requests = {
            name: sum(isinstance(e, RequestBegin) for e in runs[f"cpu-full-{name}"]) for name in ("resample", "three")
        }
        assert BY_ID["cpu-full-resample"].steps == ("run 2", "close")
        assert requests == {"resample": 8, "three": 6}

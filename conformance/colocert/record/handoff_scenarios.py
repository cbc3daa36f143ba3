"""The scenarios of the hand-off profile, as data: modes, engines, acknowledgement orders, refusals, errors.

Knows which situations matter to a driver. Does not know how a step is taken (`handoff`) or which rule looks at it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from colocert.record.scenarios import Scenario

TRAINER_POINTS = ("init", "clear_memory", "sleep", "update_weights", "wake_up", "train")
ENGINE_POINTS = (
    "engine.release.kv_cache",
    "engine.release.weights",
    "engine.resume.weights",
    "engine.resume.kv_cache",
    "engine.update",
    "engine.drain",
    "engine.admit",
    "engine.generate",
)
ACK_SEEDS = 5


def _mode(peak: str, lora: bool) -> Iterator[Scenario]:
    kind = "lora" if lora else "full"
    prefix = f"{peak}-{kind}"
    needs = f"peak_device∋{peak}" + ("; lora" if lora else "")
    base: Mapping[str, Any] = {"lora": lora, "peak_device": peak, "ranks": 2}

    critic = "gpu_peak_with_critic" if peak == "gpu" else ""

    def scenario(name: str, *steps: str, seed: int = 0, claim: str = "", **more: Any) -> Scenario:
        asked = f"{needs}; {claim}" if claim else needs
        golden = not name.startswith(("acks", "again", "three")) and not any(
            s.startswith(("fault", "fill")) for s in steps
        )
        return Scenario(f"{prefix}-{name}", {**base, **more}, steps, asked, "handoff", seed, golden)

    yield scenario("one", "run 1", "close", ranks=1)
    yield scenario("three", "run 3", "close")
    yield scenario("again", "run 1", "run 2", "close")
    yield scenario("evaluate", "run 2", "close", evaluate=True)
    yield scenario("resample", "run 2", "close", resample=True)
    for name, tag in (("weights-only", "weights"), ("kv-only", "kv_cache")):
        yield scenario(name, "run 2", "close", claim=f"engine_releases∋{tag}", engine_releases=frozenset({tag}))
    yield scenario("engine-stays", "run 2", "close", engine_releases=frozenset())
    yield scenario("lenient", "run 2", "close", engine_server="lenient")
    yield scenario("no-mirror", "run 2", "close", claim="engine_releases∋weights", engine_mirror=False)
    if not lora:
        yield scenario("remat", "run 1", "run 2", "close", claim="rematerialize", rematerialize=True)
        steps = (
            "fault trainer.update_weights before",
            "run 1",
            "run 1",
            "fault trainer.update_weights before",
            "run 1",
        )
        yield scenario("remat-unsent", *steps, "close", claim="rematerialize", rematerialize=True)
    for seed in range(ACK_SEEDS):
        yield scenario(f"acks-{seed}", "run 2", "close", seed=seed, ranks=3, engines=2)
    yield scenario("critic", "run 2", "close", use_critic=True, ranks=1)
    for point in ("init", "train", "sleep"):
        runs = [step for when in ("before", "after") for step in (f"fault critic.{point} {when}", "run 1", "run 1")]
        yield scenario(f"critic-fault-{point}", *runs, "close", claim=critic, use_critic=True, ranks=1)
    if peak == "gpu":
        yield scenario("no-train-offload", "run 1", offload_train=False)
        yield scenario("no-rollout-offload", "run 1", offload_rollout=False)
    yield from _faults(scenario, lora)


def _faults(scenario: Any, lora: bool) -> Iterator[Scenario]:
    """An error before and after each step, then the next run; and then a shutdown instead."""
    early = ("offload_grad_buffer",) if lora else ()
    points = [*(f"trainer.{p}" for p in (*TRAINER_POINTS, *early)), *ENGINE_POINTS, "saver.pause", "saver.resume"]
    for point in points:
        ways = ("refused",) if point.startswith("saver.") else ("before", "after")
        runs = [step for when in ways for step in (f"fault {point} {when}", "run 1", "run 1")]
        yield scenario(
            "fault-" + point.replace(".", "-").replace("_", "-"), *runs, f"fault {point} {ways[0]} 2", "run 1", "close"
        )
    yield scenario("dead-rank", "run 1", "fill device", "run 1", "relieve device", "close")


HANDOFF_SCENARIOS: tuple[Scenario, ...] = tuple(
    scenario for peak in ("gpu", "cpu") for lora in (True, False) for scenario in _mode(peak, lora)
)

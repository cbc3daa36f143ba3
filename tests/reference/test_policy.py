"""Policy-gradient steps: the batch on its own, then through megatron-core against the formula written out."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest

from .children import child, needs, ranks

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs the extra `reference` (got no torch)"),
]


def real(test: Any) -> Any:
    """A test that trains."""
    for mark in needs("megatron.core", "torch_memory_saver"):
        test = mark(test)
    return test


SCENARIOS = Path(__file__).with_name("policy_scenarios.py")
CYCLE = ["offload_grad_buffer", "sleep", "update_weights", "wake_up"]


def learned(number: int = 1, calls: list[str] | None = None) -> list[dict[str, Any]]:
    """What `learns` saw on each of so many tensor-parallel ranks."""
    return ranks(SCENARIOS, "learns", number, calls=calls or [], tensor=number, size=number)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    [facts] = learned()
    return facts


def test_advantages_are_centred_and_in_units_of_the_groups_deviation() -> None:
    from colocert_reference.real.policy import group_advantages

    assert group_advantages([0.0, 2.0]) == [-1.0, 1.0]
    assert group_advantages([1.0, 0.0, 0.0, 1.0]) == [1.0, -1.0, -1.0, 1.0]
    assert group_advantages([3.0]) == [0.0]
    assert group_advantages([0.1, 0.1, 0.1]) == [0.0, 0.0, 0.0]  # not rounding errors over a rounding error
    assert math.fsum(group_advantages([0.3, 0.1, 7.0])) == pytest.approx(0.0, abs=1e-12)


def test_a_group_is_compared_with_itself_only() -> None:
    from colocert_reference.real.policy import PolicyBatch, Rollout

    poor = [Rollout([1], [2], 0.0), Rollout([1], [3], 1.0)]
    rich = [Rollout([4], [2], 100.0), Rollout([4], [3], 101.0)]
    batch = PolicyBatch.from_rollouts([poor, rich])
    assert batch.advantages.tolist() == [[-1.0], [1.0], [-1.0], [1.0]]


def test_only_completion_tokens_weigh_and_padding_lies_to_the_right() -> None:
    from colocert_reference.real.policy import PolicyBatch, Rollout

    batch = PolicyBatch.from_rollouts([[Rollout([7, 8, 9], [1, 2], 0.0), Rollout([7, 8, 9], [3], 2.0)]])
    assert batch.ids.tolist() == [[7, 8, 9, 1], [7, 8, 9, 3]]
    assert batch.labels.tolist() == [[8, 9, 1, 2], [8, 9, 3, 0]]
    assert batch.advantages.tolist() == [[0.0, 0.0, -1.0, -1.0], [0.0, 0.0, 1.0, 0.0]]
    assert batch.tokens == 3


def test_the_loss_is_minus_the_mean_of_advantage_times_logprob_over_completion_tokens() -> None:
    import torch

    from colocert_reference.real.policy import PolicyBatch, Rollout

    batch = PolicyBatch.from_rollouts([[Rollout([7], [1, 2], 0.0), Rollout([7], [3], 2.0)]])
    negative = torch.tensor([[0.5, 0.25], [2.0, 1000.0]])  # the last is of padding
    assert batch.loss(negative).item() == pytest.approx(-(-1 * (-0.5) + -1 * (-0.25) + 1 * (-2.0)) / 3)


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ([], "at least one group"),
        ([[]], "at least one rollout"),
        ([[([1], [2], 0.0), ([3], [2], 0.0)]], "one prompt"),
        ([[([], [2], 0.0)]], "at least one token each"),
        ([[([1], [], 0.0)]], "at least one token each"),
        ([[([1], [2], math.nan)]], "finite"),
    ],
)
def test_what_is_no_batch_is_refused(groups: list[list[tuple[list[int], list[int], float]]], told: str) -> None:
    from colocert_reference.real.policy import PolicyBatch, Rollout

    with pytest.raises(ValueError, match=told):
        PolicyBatch.from_rollouts([[Rollout(*one) for one in group] for group in groups])


@real
def test_loss_and_gradients_are_those_of_the_formula_a_sequence_at_a_time() -> None:
    """So no sequence sees the padding of its batch. The order of sums differs, hence rounding."""
    facts = child(SCENARIOS, "gradient").wait().expect("ok")
    expected, seen = facts["losses"]
    assert seen == pytest.approx(expected, abs=1e-6)
    assert len(facts["far"]) == 16
    assert max(facts["far"]) < 1e-4


@real
def test_what_was_rewarded_becomes_likelier_and_what_was_not_less_likely(alone: dict[str, Any]) -> None:
    best, worst, _, poor, rich = alone["gained"]
    assert min(best, rich) > 0.5
    assert max(worst, poor) < -0.5


@real
def test_a_step_that_was_not_fed_trains_on_the_seeded_tokens(alone: dict[str, Any]) -> None:
    """Their loss is that of tokens drawn evenly, which a policy-gradient loss is not."""
    assert len(alone["losses"]) == 13
    assert alone["losses"][-1] > math.log(256) - 0.5
    assert max(alone["losses"][:-1]) < 1.5


@real
def test_fed_steps_with_a_hand_off_after_each_are_bit_identical_to_steps_without(alone: dict[str, Any]) -> None:
    assert learned(calls=CYCLE) == [alone]


@real
def test_fed_steps_are_the_same_with_two_tensor_parallel_ranks(alone: dict[str, Any]) -> None:
    """Log-probabilities of a vocabulary in two halves; sums that are split in two round otherwise."""
    zero, one = learned(number=2)
    assert zero["losses"] == one["losses"]
    assert zero["losses"] == pytest.approx(alone["losses"], abs=1e-4)


@real
def test_a_batch_that_the_model_has_no_place_for_is_refused_and_not_trained_on() -> None:
    long, above, below, loss = child(SCENARIOS, "refusals").wait().expect("ok")
    assert "17 tokens at most (got 18)" in long
    assert "(got 256)" in above
    assert "(got -1)" in below
    assert float(loss) > 5

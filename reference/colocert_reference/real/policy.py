"""Rollouts as one training batch, and the policy-gradient loss over it.

    advantage of a rollout    its reward less the mean of its group, divided by the group's standard deviation unless
                              that is zero; a group is what was sampled for one prompt
    loss                      minus the mean, over all completion tokens, of advantage x log-probability

Knows torch and what a rollout is. Does not know the model: log-probabilities come in, as megatron's vocabulary-parallel
cross entropy gives them. Prompt tokens, and the padding to one length, have weight zero. Padding lies to the right,
where under a causal mask no earlier position sees it.

Under data parallelism each rank takes the mean over its own tokens, and the ranks' gradients are averaged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

PADDING = 0


@dataclass(frozen=True)
class Rollout:
    """One sampled completion."""

    prompt: list[int]
    completion: list[int]
    reward: float


@dataclass(frozen=True)
class PolicyBatch:
    """[rollouts, positions] on the host: the token at each position, the one after it, and that one's advantage."""

    ids: torch.Tensor
    labels: torch.Tensor
    advantages: torch.Tensor
    tokens: int

    @classmethod
    def from_rollouts(cls, groups: Sequence[Sequence[Rollout]]) -> PolicyBatch:
        """Each group holds the rollouts of one prompt."""
        for group in groups:
            _check(group)
        rollouts = [rollout for group in groups for rollout in group]
        if not rollouts:
            raise ValueError("a batch needs at least one group of rollouts (got none)")
        length = max(len(r.prompt) + len(r.completion) for r in rollouts) - 1
        padded = torch.full((len(rollouts), length + 1), PADDING, dtype=torch.long)
        weights = torch.zeros(len(rollouts), length)
        advantages = [a for group in groups for a in group_advantages([r.reward for r in group])]
        for row, (rollout, advantage) in enumerate(zip(rollouts, advantages, strict=True)):
            tokens = [*rollout.prompt, *rollout.completion]
            padded[row, : len(tokens)] = torch.tensor(tokens)
            weights[row, len(rollout.prompt) - 1 : len(tokens) - 1] = advantage
        return cls(padded[:, :-1], padded[:, 1:], weights, sum(len(r.completion) for r in rollouts))

    def check(self, vocabulary: int, sequence: int) -> None:
        """Raises `ValueError` where a model of these sizes has no place for the batch."""
        if self.ids.shape[1] > sequence:
            raise ValueError(
                f"prompt and completion must have {sequence + 1} tokens at most (got {self.ids.shape[1] + 1})"
            )
        tokens = torch.stack([self.ids, self.labels])
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= vocabulary:
            raise ValueError(f"tokens must be of a vocabulary of {vocabulary} (got {low if low < 0 else high})")

    def loss(self, negative_logprobs: torch.Tensor) -> torch.Tensor:
        """The policy-gradient loss, given -log p of every label."""
        advantages = self.advantages.to(negative_logprobs.device)
        return (negative_logprobs * advantages).sum() / self.tokens


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Centred, and in units of the standard deviation where the rewards differ."""
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    deviation = math.sqrt(math.fsum(c * c for c in centred) / len(rewards))
    same = max(rewards) == min(rewards)
    return [0.0 if same else c / deviation for c in centred]


def _check(group: Sequence[Rollout]) -> None:
    if not group:
        raise ValueError("a group needs at least one rollout (got none): leave it out")
    if any(list(r.prompt) != list(group[0].prompt) for r in group):
        raise ValueError("the rollouts of a group must have one prompt (got several): make it as many groups")
    for rollout in group:
        if not rollout.prompt or not rollout.completion:
            raise ValueError(f"a rollout needs a prompt and a completion of at least one token each (got {rollout})")
        if not math.isfinite(rollout.reward):
            raise ValueError(f"a reward must be finite (got {rollout.reward})")

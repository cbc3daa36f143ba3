"""Bodies of child processes for test_policy.py: one trainer each, fed with rollouts."""

from __future__ import annotations

import hashlib
from typing import Any

from colocert.device import Stage

CYCLE = ("offload_grad_buffer", "sleep", "update_weights", "wake_up")
SIZES = {"vocabulary": 256, "hidden": 64, "heads": 8, "kv_heads": 2, "ffn": 96, "sequence": 16}
GROUPS = [
    [([5, 6, 7], [10, 11], 1.0), ([5, 6, 7], [12, 13, 14, 15], 0.0), ([5, 6, 7], [16], 0.5)],
    [([200], [1, 2, 3], 0.0), ([200], [4, 5, 6], 2.0)],
    [([9, 9], [8, 8], 1.0), ([9, 9], [7], 1.0)],
]


def built(tensor: int = 1, size: int = 1, rank: int = 0, port: int = 0, **settings: Any) -> Any:
    from colocert_reference.real.groups import World
    from colocert_reference.real.model import Shape
    from colocert_reference.real.trainer import RealTrainer

    parallel = {"tensor_model_parallel_size": tensor}
    world = World(rank=rank, size=size, address=("127.0.0.1", port), timeout_minutes=2, parallel=parallel)
    return RealTrainer(Shape(**SIZES), world=world, **settings)


def batch() -> Any:
    from colocert_reference.real.policy import PolicyBatch, Rollout

    return PolicyBatch.from_rollouts([[Rollout(*one) for one in group] for group in GROUPS])


def logprobs(trainer: Any, prompt: list[int], completion: list[int]) -> Any:
    """Of each completion token, from the logits of this sequence alone, without padding."""
    import torch

    tokens = [*prompt, *completion]
    ids, length = torch.tensor([tokens[:-1]]), len(tokens) - 1
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    logits = trainer.parts.model(ids, torch.arange(length)[None], mask, runtime_gather_output=True)[0]
    rows = torch.arange(len(prompt) - 1, length)
    return logits.log_softmax(-1)[rows, torch.tensor(completion)]


def gradient(stage: Stage) -> dict[str, Any]:
    """Loss and live gradients of one fed step beside the formula written out, a sequence at a time."""
    import torch

    trainer = built(accumulate=2)
    for _ in range(2):
        trainer.train()
    trained = [p for p in trainer.parts.model.parameters() if p.requires_grad]
    # (reward - mean) / std, by hand: of 1, 0, 1/2; of 0, 2; of 1, 1.
    advantages = [[1.5**0.5, -(1.5**0.5), 0.0], [-1.0, 1.0], [0.0, 0.0]]
    terms = [
        advantage * logprobs(trainer, prompt, completion).sum()
        for group, given in zip(GROUPS, advantages, strict=True)
        for (prompt, completion, _), advantage in zip(group, given, strict=True)
    ]
    expected = -torch.stack(terms).sum() / 16
    gradients = torch.autograd.grad(expected / 2, trained)
    trainer.feed(batch())
    trainer.train()
    far = [float((p.main_grad - g).abs().max() / g.abs().max()) for p, g in zip(trained, gradients, strict=True)]
    return {"losses": [expected.item(), trainer.work.losses[-1]], "far": far}


def learns(
    stage: Stage, calls: list[str], tensor: int = 1, size: int = 1, rank: int = 0, port: int = 0
) -> dict[str, Any]:
    """Twelve fed steps with `calls` after each, then one that is not fed."""
    import torch

    trainer = built(tensor, size, rank, port)

    def seen() -> list[float]:
        with torch.no_grad():
            return [float(logprobs(trainer, p, c).sum()) for group in GROUPS[:2] for p, c, _ in group]

    before = seen()
    for _ in range(12):
        trainer.feed(batch())
        trainer.train()
        for call in calls:
            getattr(trainer, call)()
    after = seen()
    trainer.train()
    held = trainer.parts.tensors()["default"]
    facts = {
        "gained": [b - a for a, b in zip(before, after, strict=True)],
        "losses": trainer.work.losses,
        "contents": hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in held.values())).hexdigest(),
    }
    stage.tell("done")
    stage.listen()  # the store is rank 0's: nobody leaves before all are done
    return facts


def refusals(stage: Stage) -> list[str]:
    """What the trainer says to batches that it has no place for; then it trains as if nothing had been fed."""
    from colocert_reference.real.policy import PolicyBatch, Rollout

    trainer, told = built(), []
    for prompt, completion in (([1], [1] * 17), ([256], [1]), ([1], [-1])):
        try:
            trainer.feed(PolicyBatch.from_rollouts([[Rollout(prompt, completion, 1.0)]]))
        except ValueError as error:
            told.append(str(error))
    trainer.train()
    return [*told, f"{trainer.work.losses[0]:.1f}"]

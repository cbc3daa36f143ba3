"""The trainer of a learning pair in its process: fed with rollouts, it sends adapters, and the base where asked.

What it adds to `trainer_process`: a batch of rollouts for the next step; names that the engine loads (Hugging Face's
for the base, PEFT's for the adapter); what its memory is by tag; and two observations of each step, made where nothing
that is observed can prevent them:

    gap          between the log-probabilities of the sampled tokens here, before the step, and those that the engine
                 sampled them with: the largest difference, and the mean
    gradients    what the gradient buffers hold after the forward pass and before the backward pass of a step that
                 begins an accumulation; nothing but zeros is right

Knows calls, the wire and tensors. Does not know the order of calls, or what makes a gap too large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from colocert_reference.ports import DEFAULT
from colocert_reference.real import adapter_wire
from colocert_reference.real.engine_memory import held
from colocert_reference.real.trainer_process import TrainerProcess

POLICY = "policy"
_FOREVER = 7 * 86400.0


class GradientsNotZero(RuntimeError):
    """A step was about to add to gradients that nobody had zeroed."""


class LearnerProcess(TrainerProcess):
    """`TrainerProcess` whose `feed` also takes the engine's log-probabilities, and whose `train` says what was seen.

    `send_base` is a transfer like `update_weights`; both take the version to send as.
    """

    def __init__(self, stage: Any, **settings: Any) -> None:
        super().__init__(stage, accumulate=1, names="peft", **settings)
        self.header: dict[str, Any] = {}
        self.sizes: dict[str, int] = {}
        self.observed: dict[str, Any] = {}

    def init(self) -> None:
        from colocert_reference.real.memory import granules

        super().init()
        tensors = self.built().parts.tensors()
        self.sizes = {tag: sum(granules(t.nbytes) for t in of_tag.values()) for tag, of_tag in tensors.items()}

    def feed(self, groups: Sequence[Mapping[str, Any]]) -> int:  # type: ignore[override]
        """What the next step trains on: a prompt, and completions with their rewards and the engine's logprobs."""
        from colocert_reference.real.policy import PolicyBatch, Rollout

        rollouts = [
            [Rollout(g["prompt"], c, r) for c, r in zip(g["completions"], g["rewards"], strict=True)] for g in groups
        ]
        batch = PolicyBatch.from_rollouts(rollouts)
        self.built().feed(self._observed(batch, groups))
        return batch.tokens

    def _observed(self, batch: Any, groups: Sequence[Mapping[str, Any]]) -> Any:
        """The batch, which notes what passes through its loss."""
        told = [(len(g["prompt"]), row) for g in groups for row in g["logprobs"]]
        watch = self._watch

        class Observed(type(batch)):  # type: ignore[misc]
            def loss(self, negative_logprobs: Any) -> Any:
                watch(negative_logprobs, told)
                return super().loss(negative_logprobs)

        return Observed(batch.ids, batch.labels, batch.advantages, batch.tokens)

    def _watch(self, negative_logprobs: Any, told: list[tuple[int, list[float]]]) -> None:
        """Between forward and backward."""
        norm = self._gradient_norm()
        if not self.built().work.gradients.live() and norm != 0:
            raise GradientsNotZero(
                f"the gradient buffers must hold zeros before the first backward pass of a step (got a norm of "
                f"{norm:.3g}): nobody zeroed the gradients after the step before, or after their memory came back"
            )
        found = [
            (-row[prompt - 1 : prompt - 1 + len(logprobs)].detach()).tolist()
            for row, (prompt, logprobs) in zip(negative_logprobs, told, strict=True)
        ]
        gaps = [
            abs(a - b) for mine, (_, theirs) in zip(found, told, strict=True) for a, b in zip(mine, theirs, strict=True)
        ]
        finite = all(map(math.isfinite, gaps))
        self.observed = {
            "gap": max(gaps) if finite else math.inf,
            "mean_gap": math.fsum(gaps) / len(gaps) if finite else math.inf,
        }

    def train(self) -> dict[str, Any]:  # type: ignore[override]
        """One step; its loss, the gap, and the norm of the gradients that it was made with."""
        self.observed = {}
        loss = super().train()
        return {"loss": loss, "gradient_norm": self._gradient_norm(), **self.observed}

    def _gradient_norm(self) -> float:
        """Of what the buffers hold."""
        squares = [float(buffer.double().square().sum()) for buffer in self.built().work.gradients.buffers()]
        return math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.inf

    # ---- sending

    def update_weights(self, version: int) -> None:
        self.header = {"kind": "adapter", "adapter": POLICY, "version": version}
        self.built().update_weights()

    def send_base(self, version: int) -> None:
        """The frozen base, out of the memory or the host backup that it lies in."""
        self.header = {"kind": "base", "version": version}
        self.deliver(self.built().base())

    def deliver(self, tensors: Mapping[str, Any]) -> None:
        """In FP32, whatever it is trained in."""
        raw = {name: memoryview(t.detach().float().cpu().contiguous().numpy()).cast("B") for name, t in tensors.items()}

        def connected() -> None:
            self.stage.tell({"sending": len(raw), **self.status()})

        told = adapter_wire.send(self.wire, raw, self.timeout, connected, **self.header)
        self.sent.append({"kind": self.header["kind"], "tensors": {n: len(m) for n, m in raw.items()}, **told})

    # ---- asked

    def answer(self, call: str, **arguments: Any) -> Any:
        if call in ("update_weights", "send_base"):
            return getattr(self, call)(**arguments)
        return super().answer(call, **arguments)

    def status(self) -> dict[str, Any]:
        """What goes with every answer. What lies under no tag is what the groups took."""
        believed = self.trainer.believed() if self.trainer is not None else {}
        released = sorted(tag for tag, gone in believed.items() if gone)
        holds = held(self.stage.device)
        tags = {tag: nbytes for tag, nbytes in self.sizes.items() if tag not in released}
        if rest := (holds["device"] or 0) - sum(tags.values()):
            tags["communicators"] = rest
        return {
            "held": {**holds, "tags": tags, "host_tags": {DEFAULT: holds["host"]} if holds["host"] else {}},
            "released": released,
        }


def main(stage: Any, **arguments: Any) -> None:
    """The process: answers calls until it is told to leave or whoever asked is gone."""
    serve(stage, LearnerProcess(stage, **arguments))


def serve(stage: Any, process: LearnerProcess) -> None:
    """Answers calls; the imports are done before it says that it is there."""
    import colocert_reference.real.trainer

    assert colocert_reference.real.trainer
    stage.tell({"ok": "here"})
    while (message := stage.listen(_FOREVER)) is not None:
        try:
            answer = {"ok": process.answer(message.pop("call"), **message)}
        except Exception as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        stage.tell({**answer, **process.status()})

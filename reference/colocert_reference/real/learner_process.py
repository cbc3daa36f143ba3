"""The trainer of a learning pair in its process: fed with rollouts, it sends adapters, and the base where one is asked.

What it adds to `trainer_process`: a batch of rollouts for the next step; names that the engine loads (Hugging Face's for
the base, PEFT's for the adapter); what its memory is by tag; and two observations of each step, made where nothing that
is observed can prevent them:

    gap          between the log-probabilities of the sampled tokens here, before the step, and those that the engine
                 sampled them with: the largest difference, and the mean
    gradients    what the gradient buffers hold after the forward pass and before the backward pass of a step that
                 begins an accumulation; nothing but zeros is right

Knows calls, the wire and tensors. Does not know the order of calls, or what makes a gap too large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from colocert_reference.ports import DEFAULT, GRADS
from colocert_reference.real import adapter_wire
from colocert_reference.real.engine_memory import held
from colocert_reference.real.trainer_process import Communicators, TrainerProcess

POLICY = "policy"
_FOREVER = 7 * 86400.0


class GradientsNotZero(RuntimeError):
    """A step was about to add to gradients that nobody had zeroed."""


class LearnerProcess(TrainerProcess):
    """`TrainerProcess` with `feed`, `send_base`, `save` and `load`; `train` returns what was seen of the step."""

    def __init__(
        self,
        stage: Any,
        *,
        shape: dict[str, Any],
        communicators: int,
        seed: int,
        learning_rate: float,
        wire: str,
        timeout: float,
    ) -> None:
        super().__init__(stage, shape, communicators, 1, wire, timeout)
        self.seed, self.learning_rate = seed, learning_rate
        self.header: dict[str, Any] = {}
        self.sizes: dict[str, int] = {}
        self.observed: dict[str, Any] = {}

    def init(self) -> None:
        from colocert_reference.real.memory import granules
        from colocert_reference.real.model import Shape
        from colocert_reference.real.trainer import PEFT, RealTrainer

        if self.trainer is not None:
            return
        device = self.stage.device
        trainer = RealTrainer(
            Shape(**self.shape),
            device=device.name,
            deliver=self.deliver,
            seed=self.seed,
            learning_rate=self.learning_rate,
            names=PEFT,
        )
        costly = Communicators(device, self.communicators, trainer.ports.groups, trainer.ports.work)
        trainer.ports = replace(trainer.ports, groups=costly, work=costly)
        tensors = trainer.parts.tensors()
        self.sizes = {tag: sum(granules(t.nbytes) for t in tensors[tag].values()) for tag in (DEFAULT, GRADS)}
        self.trainer = trainer

    def feed(self, groups: list[dict[str, Any]]) -> None:
        """What the next step trains on: a prompt, and completions with their rewards and the engine's logprobs."""
        from colocert_reference.real.policy import PolicyBatch, Rollout

        rollouts = [
            [Rollout(g["prompt"], c, r) for c, r in zip(g["completions"], g["rewards"], strict=True)] for g in groups
        ]
        batch = PolicyBatch.from_rollouts(rollouts)
        assert self.trainer is not None, "built by init()"
        self.trainer.feed(self._observed(batch, groups))

    def _observed(self, batch: Any, groups: list[dict[str, Any]]) -> Any:
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
        assert self.trainer is not None
        gradients = self.trainer.ports.gradients
        norm = math.sqrt(sum(float(b.double().square().sum()) for b in gradients.buffers()))  # type: ignore[attr-defined]
        if not gradients.live() and norm != 0:
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

    def train(self) -> dict[str, Any]:
        """One step; its loss, the gap, and the norm of the gradients that it was made with."""
        assert self.trainer is not None, "built by init()"
        self.observed = {}
        self.trainer.train()
        buffers = self.trainer.ports.gradients.buffers()  # type: ignore[attr-defined]
        norm = math.sqrt(sum(float(b.double().square().sum()) for b in buffers))
        return {"loss": self.trainer.work.losses[-1], "gradient_norm": norm, **self.observed}

    # ---- sending

    def update_weights(self, version: int) -> None:
        assert self.trainer is not None, "built by init()"
        self.header = {"kind": "adapter", "adapter": POLICY, "version": version}
        self.trainer.update_weights()

    def send_base(self, version: int) -> None:
        """The frozen base, out of the memory or the host backup that it lies in."""
        from colocert_reference.real import export

        assert self.trainer is not None, "built by init()"
        parts, memory = self.trainer.parts, self.trainer.memory
        base = {name: p.detach() for name, p in parts.model.named_parameters() if not p.requires_grad}
        if DEFAULT in self.trainer.released:
            base = {name: memory.backup(t) for name, t in base.items()}
        self.header = {"kind": "base", "version": version}
        self.deliver(export.base_state(parts.model, parts.shape, tensors=base))

    def deliver(self, tensors: Mapping[str, Any]) -> None:
        raw = {name: memoryview(t.cpu().contiguous().numpy()) for name, t in tensors.items()}

        def connected() -> None:
            self.stage.tell({"sending": len(raw), **self.status()})

        told = adapter_wire.send(self.wire, raw, self.timeout, connected, **self.header)
        self.sent.append({"kind": self.header["kind"], "bytes": told["bytes"], "sha256": told["sha256"]})

    # ---- asked

    def answer(self, call: str, **arguments: Any) -> Any:
        own: dict[str, Callable[..., Any]] = {
            name: getattr(self, name) for name in ("feed", "train", "update_weights", "send_base", "save", "load")
        }
        if call in own:
            return own[call](**arguments)
        return super().answer(call)

    def save(self, folder: str, iteration: int) -> None:
        """Adapter, optimizer and iteration, whole or not at all."""
        from colocert_reference.real import checkpoint

        assert self.trainer is not None, "built by init()"
        checkpoint.save(self.trainer, Path(folder), iteration)

    def load(self, folder: str) -> int:
        """The iteration whose adapter and optimizer are there now."""
        from colocert_reference.real import checkpoint

        assert self.trainer is not None, "built by init()"
        return checkpoint.load(self.trainer, Path(folder))

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

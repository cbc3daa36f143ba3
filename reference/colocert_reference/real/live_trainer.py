"""The trainer of a live pair in its process: numbered batches, adapters in turn, and digests of what it holds.

What it adds to `learner_process`: a step on batch N alone, for one of several adapters; slots for the adapters that are
not in the model now; digests of an adapter and of the logical state. Knows tensors. Does not know the order of calls.

    the adapter in the model    its parameters, moments and gradients are those of the regions
    every other one             copies on the host, by the same names; `activate` changes places
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from colocert_reference.ports import DEFAULT, GRADS
from colocert_reference.real.learner_process import LearnerProcess, serve

ROWS = 2


@dataclass
class Kept:
    """One adapter: what a step changes by name, Adam's step counts, the gradient buffers, and how many steps wait."""

    trained: dict[str, Any]
    counters: dict[str, Any]
    gradients: list[Any]
    pending: int


class LiveTrainer(LearnerProcess):
    """`LearnerProcess` with `adapters`, of which the first is in the model at the start."""

    def __init__(self, stage: Any, *, adapters: list[str], **arguments: Any) -> None:
        super().__init__(stage, **arguments)
        self.adapters, self.active = adapters, adapters[0]
        self.kept: dict[str, Kept] = {}
        self.fresh: Kept | None = None

    def init(self) -> None:
        first = self.trainer is None
        super().init()
        if first:
            self.fresh = self._copied()
            self.kept = {name: self._copied() for name in self.adapters[1:]}
            gc.freeze()  # each hand-off collects twice, and would go through all that the imports have made

    # ---- training

    def train_step(self, batch: int, adapter: str, step: bool) -> float:
        """The loss on that batch. Without `step` its gradients wait, for half of the next step of this adapter."""
        from colocert_reference.real.policy import PolicyBatch

        self.activate(adapter)
        work = self.built().work
        work.accumulate = 2 if not step or work.gradients.pending else 1
        ids = _tokens(self.built().parts.shape, batch)
        work.feed(PolicyBatch(ids[:, :-1], ids[:, 1:], _ones(ids[:, 1:]), ids[:, 1:].numel()))
        self.built().train()
        return work.losses[-1]

    # ---- adapters

    def activate(self, name: str) -> None:
        """Puts another adapter into the model, and what was there into its slot. The trainer is awake."""
        if name == self.active:
            return
        coming = self.kept.pop(name)
        self.kept[self.active] = self._copied()
        self._put(coming)
        self.active = name

    def renew_adapter(self, name: str) -> None:
        """A new adapter under that name: parameters as drawn at the start, nothing else."""
        assert self.fresh is not None, "built by init()"
        self.activate(name)
        self._put(self.fresh)

    def _copied(self) -> Kept:
        """The adapter in the model, on the host."""
        parts, gradients = self.built().parts, self.built().work.gradients
        return Kept(
            {name: _host(tensor) for name, tensor in parts.trained().items()},
            {name: _host(count) for name, count in parts.counters().items()},
            [_host(buffer) for buffer in gradients.buffers()],
            gradients.pending,
        )

    def _put(self, kept: Kept) -> None:
        """Into the tensors that are there: their addresses stay."""
        import torch

        parts, gradients = self.built().parts, self.built().work.gradients
        with torch.no_grad():
            for name, tensor in parts.trained().items():
                tensor.copy_(kept.trained[name])
            for name, count in parts.counters().items():
                count.copy_(kept.counters[name])
            for buffer, copy in zip(gradients.buffers(), kept.gradients, strict=True):
                buffer.copy_(copy)
        gradients.pending = kept.pending

    def send_adapter(self, name: str, version: int) -> None:
        """To the engine, under its name: from the region or its backup, or from the slot."""
        from colocert_reference.real import export

        self.header = {"kind": "adapter", "adapter": name, "version": version}
        if name == self.active:
            self.built().update_weights()
        else:
            parts = self.built().parts
            params = {n: self.kept[name].trained[n] for n, p in parts.model.named_parameters() if p.requires_grad}
            self.deliver(export.adapter_state(parts.model, parts.shape, tensors=params))

    # ---- digests

    def adapter_state(self, name: str) -> dict[str, str]:
        """Digests of one adapter. In FP32 its parameters are their own masters; gradients are those that wait."""
        kept = self._copied() if name == self.active else self.kept[name]
        kinds: dict[str, list[Any]] = {"params": [], "masters": [], "moments": list(kept.counters.values())}
        for tensor_name, tensor in kept.trained.items():
            moment = tensor_name.endswith((".exp_avg", ".exp_avg_sq"))
            kinds["moments" if moment else "masters" if tensor_name.startswith("master.") else "params"].append(tensor)
        made = {kind: _digest(tensors) for kind, tensors in kinds.items() if tensors}
        return {**made, "gradients": _digest(kept.gradients) if kept.pending else "none"}

    def fingerprint(self) -> dict[str, str]:
        """Every adapter, the base, and what decides how the next step goes."""
        parts = self.built().parts
        made = {f"{n}.{k}": v for n in self.adapters for k, v in self.adapter_state(n).items()}
        made["base"] = _digest(p.detach() for _, p in parts.model.named_parameters() if not p.requires_grad)
        made["active"] = self.active
        made["hooks"] = str(sum(len(m._forward_hooks) for m in parts.model.modules()))
        made["trained"] = " ".join(name for name, p in parts.model.named_parameters() if p.requires_grad)
        made["training"] = str(parts.model.training)
        made["steps"] = str(len(self.built().work.losses))
        return made

    def regions(self) -> dict[str, list[int]]:
        """The bytes of each tensor, by tag."""
        tensors = self.built().parts.tensors()
        return {tag: [t.nbytes for t in tensors[tag].values()] for tag in (DEFAULT, GRADS)}

    # ---- asked

    def answer(self, call: str, **arguments: Any) -> Any:
        own: Mapping[str, Callable[..., Any]] = {
            "train_step": self.train_step,
            "send_adapter": self.send_adapter,
            "renew_adapter": self.renew_adapter,
            "adapter_state": self.adapter_state,
            "fingerprint": self.fingerprint,
            "regions": self.regions,
        }
        return own[call](**arguments) if call in own else super().answer(call, **arguments)


def _tokens(shape: Any, batch: int) -> Any:
    """[rows, positions + 1], of the batch's number alone."""
    import torch

    generator = torch.Generator().manual_seed(7919 * (batch + 1))
    return torch.randint(0, shape.vocabulary, (ROWS, shape.sequence + 1), generator=generator)


def _ones(like: Any) -> Any:
    import torch

    return torch.ones_like(like, dtype=torch.float32)


def _host(tensor: Any) -> Any:
    return tensor.detach().to("cpu", copy=True)


def _digest(tensors: Iterable[Any]) -> str:
    """Of their bytes, whatever their type."""
    import torch

    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def main(stage: Any, **arguments: Any) -> None:
    """The process: answers calls until it is told to leave or whoever asked is gone."""
    serve(stage, LiveTrainer(stage, **arguments))

"""The reference trainer on real tensors: the lifecycle of `colocert_reference.lifecycle` over four real ports.

Knows how the parts are put together and in which region each is built. Does not know the engine: what a sync sends
goes to `deliver`. A step trains on the rollouts that it was fed (`policy`). Without any it is next-token prediction on
a few batches of seeded random tokens, taken in turn: which one a step sees depends on its number alone, whatever
happened in between.

    trainer = RealTrainer(Shape(), device="host", deliver=engine_side)
    trainer.train(); trainer.offload_grad_buffer(); trainer.sleep(); trainer.update_weights()
    trainer.wake_up(); trainer.feed(PolicyBatch.from_rollouts(groups)); trainer.train() ... trainer.close()

Has run on `host` (the real saver over the stand-in driver, gloo). On `cuda` (NCCL) it has not run yet.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from colocert_reference.lifecycle import Lifecycle
from colocert_reference.ports import DEFAULT, GRADS, Ports, Settings
from colocert_reference.real import checkpoint, cpu_shims, export, model
from colocert_reference.real.groups import RealGroups, World
from colocert_reference.real.memory import SaverMemory, open_memory
from colocert_reference.real.model import Shape
from colocert_reference.real.policy import PolicyBatch

BATCHES = 2
MEGATRON, PEFT = "megatron", "peft"
"""How a sync names what it sends: this rank's tensors as they are, or whole ones as engines load them (`export`)."""

Deliver = Callable[[Mapping[str, torch.Tensor]], None]
"""Takes what a sync sends, by parameter name. The tensors are views: valid during the call, to be copied to be kept."""


def discard(tensors: Mapping[str, torch.Tensor]) -> None:
    """A receiver that keeps nothing."""


class RealGradients:
    """The gradients port over DDP's fused buffers. They are live between the steps of one accumulation.

    An error inside a backward pass leaves partial sums: at the first step of an accumulation the next step zeroes them,
    later ones it does not undo.
    """

    def __init__(self, ddp: Any) -> None:
        self.ddp = ddp
        self.pending = 0

    def buffers(self) -> list[torch.Tensor]:
        return [buffer.grad_data for buffer in self.ddp.buffers + self.ddp.expert_parallel_buffers]

    def live(self) -> bool:
        return self.pending > 0

    def keep(self) -> list[torch.Tensor]:
        return [buffer.to("cpu", copy=True) for buffer in self.buffers()]

    def restore(self, kept: list[torch.Tensor]) -> None:
        for buffer, copy in zip(self.buffers(), kept, strict=True):
            buffer.copy_(copy)

    def zero(self) -> None:
        for buffer in self.buffers():
            buffer.zero_()


class RealWork:
    """The work port: steps and syncs. `accumulate` calls of `step` make one optimizer step."""

    def __init__(
        self,
        parts: Parts,
        gradients: RealGradients,
        memory: SaverMemory,
        groups: RealGroups,
        deliver: Deliver,
        *,
        accumulate: int,
        seed: int,
        names: str,
    ) -> None:
        if names not in (MEGATRON, PEFT):
            raise ValueError(f"names must be {MEGATRON} or {PEFT} (got {names!r})")
        self.parts, self.gradients, self.memory, self.groups = parts, gradients, memory, groups
        self.deliver, self.accumulate, self.seed, self.names = deliver, accumulate, seed, names
        self.losses: list[float] = []
        self.fed: PolicyBatch | None = None
        self.version = 0

    def feed(self, batch: PolicyBatch) -> None:
        """The next step trains on this batch; of several before one step the last counts."""
        batch.check(self.parts.shape.vocabulary, self.parts.shape.sequence)
        self.fed = batch

    def step(self) -> None:
        """Forward and backward into the gradient buffers; at the end of an accumulation, reduce and step."""
        ddp, optimizer = self.parts.ddp, self.parts.optimizer
        if not self.gradients.live():
            ddp.zero_grad_buffer()
        loss = self._loss()
        (loss / self.accumulate).backward()
        self.losses.append(loss.item())
        self.fed = None
        self.gradients.pending += 1
        if self.gradients.pending == self.accumulate:
            ddp.finish_grad_sync()
            optimizer.step()
            optimizer.zero_grad()  # `param.grad` is an alias of the buffer now: the next backward would add to it twice
            self.gradients.pending = 0

    def send(self, tag: str, *, from_host: bool) -> None:
        """The trainable parameters: the adapter under LoRA, all of them without. Nothing else is read.

        `version` counts the syncs that were delivered.
        """
        tensors = self._read(from_host, lambda name, p: p.requires_grad)
        if self.names == PEFT:
            whole = export.adapter_state if self.parts.shape.lora_rank else export.base_state
            tensors = self._exported(whole, tensors, from_host)
        self.deliver(tensors)
        self.version += 1

    def base(self, *, from_host: bool) -> dict[str, torch.Tensor]:
        """Every base parameter as the engine names it: what it loads before the first adapter."""
        tensors = self._read(from_host, lambda name, p: ".lora_" not in name)
        return self._exported(export.base_state, tensors, from_host)

    def _read(self, from_host: bool, chosen: Callable[[str, torch.Tensor], bool]) -> dict[str, torch.Tensor]:
        tensors = {name: p.detach() for name, p in self.parts.model.named_parameters() if chosen(name, p)}
        return {name: self.memory.backup(t) for name, t in tensors.items()} if from_host else tensors

    def _exported(self, whole: Any, tensors: dict[str, torch.Tensor], from_host: bool) -> dict[str, torch.Tensor]:
        with self.groups.on_host() if from_host else contextlib.nullcontext() as gather:
            state: dict[str, torch.Tensor] = whole(self.parts.model, self.parts.shape, tensors=tensors, gather=gather)
        return state

    def rematerialize(self) -> None:
        raise NotImplementedError("this trainer has no rematerialised parameters: they are their own master weights")

    def clear_memory(self) -> None:
        gc.collect()
        self.memory.managed.give_up_cache()

    def _loss(self) -> torch.Tensor:
        """Of the rollouts that were fed, or of the seeded tokens whose turn it is."""
        if self.fed is None:
            ids, positions, mask = self._batch(len(self.losses))
            return self.parts.ddp(ids, positions, mask, labels=ids.roll(-1, dims=1)).mean()
        labels = self.fed.labels.to(self.memory.managed.device)
        return self.fed.loss(self.parts.ddp(*self._inputs(self.fed.ids), labels=labels))

    def _batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shape = self.parts.shape
        generator = torch.Generator().manual_seed(self.seed + 1000 * (step % BATCHES) + self.parts.world.data_rank)
        return self._inputs(torch.randint(0, shape.vocabulary, (2, shape.sequence), generator=generator))

    def _inputs(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, positions, and the causal mask: true where a position is hidden."""
        (rows, length), device = ids.shape, self.memory.managed.device
        positions = torch.arange(length, device=device).expand(rows, -1)
        mask = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)[None, None]
        return ids.to(device), positions, mask


class Parts:
    """What is built, each part in its region: model and optimizer in `default`, DDP's gradients in `grad_buffer`."""

    def __init__(self, shape: Shape, memory: SaverMemory, world: World, seed: int, learning_rate: float) -> None:
        self.shape, self.world = shape, world
        bf16 = memory.managed.device == "cuda"
        config = shape.config(world.tensor, bf16=bf16)
        with memory.region(DEFAULT):
            self.model = model.build_model(shape, config, memory.managed.device, seed)
        with memory.fused_buffers():
            self.ddp: Any = model.wrap(self.model, config)
        with memory.region(DEFAULT):
            self.optimizer = model.build_optimizer(self.ddp, learning_rate, bf16=bf16)

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Every tensor of each tag, by name. On `host` each is one allocation."""
        frozen = {name: p.detach() for name, p in self.model.named_parameters() if not p.requires_grad}
        scale = {"optimizer.scale": self.optimizer.get_loss_scale()}
        buffers = self.ddp.buffers + self.ddp.expert_parallel_buffers
        grads = {f"grads.{n}": buffer.grad_data for n, buffer in enumerate(buffers)}
        return {DEFAULT: {**frozen, **scale, **self.trained()}, GRADS: grads}

    def trained(self) -> dict[str, torch.Tensor]:
        """Of tag `default`, what a step changes: parameters and their moments, and master weights where there are."""
        held = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        for name, master in self._masters():
            if name not in held:
                held[name] = master.detach()
            for moment in ("exp_avg", "exp_avg_sq"):
                held[f"{name}.{moment}"] = self.optimizer.optimizer.state[master][moment]
        return held

    def counters(self) -> dict[str, torch.Tensor]:
        """Adam's step of each parameter, in plain host memory."""
        state = self.optimizer.optimizer.state
        return {f"{name}.step": state[master]["step"] for name, master in self._masters()}

    def _masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the optimizer steps: in FP32 the parameters themselves."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        for n, master in enumerate(self.optimizer.get_parameters()):
            yield names.get(id(master), f"master.{n}"), master


class RealTrainer(Lifecycle):
    """One rank. `shape.lora_rank=0` trains all parameters and has no early release."""

    def __init__(
        self,
        shape: Shape | None = None,
        *,
        device: str | None = None,
        world: World | None = None,
        deliver: Deliver = discard,
        accumulate: int = 1,
        offload_train: bool = True,
        seed: int = 0,
        learning_rate: float = 1e-2,
        names: str = MEGATRON,
    ) -> None:
        shape = shape or Shape()
        device = device or os.environ.get("COLOCERT_DEVICE", "host")
        world = world or World(backend="nccl" if device == "cuda" else "gloo")
        memory, groups = SaverMemory(open_memory(device)), RealGroups(world)
        if device == "host":
            cpu_shims.apply()
        groups.rebuild()
        if device == "cuda":
            model.seed_cuda(seed)
        self.parts = Parts(shape, memory, world, seed, learning_rate)
        groups.attach(self.parts.ddp, self.parts.optimizer)
        gradients = RealGradients(self.parts.ddp)
        work = RealWork(self.parts, gradients, memory, groups, deliver, accumulate=accumulate, seed=seed, names=names)
        self.memory, self.groups, self.work = memory, groups, work
        self.base_digest: str | None = None
        super().__init__(
            Ports(memory=memory, groups=groups, gradients=gradients, work=work),
            Settings(tags=frozenset({DEFAULT, GRADS}), lora=shape.lora_rank > 0, offload_train=offload_train),
        )

    def feed(self, batch: PolicyBatch) -> None:
        """What the next `train()` trains on, and that one alone. Awake or asleep.

        Every rank is fed: tensor-parallel ones with the same batch, data-parallel ones with their share.
        """
        self.work.feed(batch)

    def base(self) -> dict[str, torch.Tensor]:
        """The base in plain host memory, by the engine's names, awake or asleep."""
        return self.work.base(from_host=DEFAULT in self.released)

    def save(self, folder: str | Path, iteration: int) -> dict[str, Any]:
        """`checkpoint.save`: between optimizer steps, awake or asleep."""
        return checkpoint.save(self, folder, iteration)

    def load(self, folder: str | Path) -> dict[str, Any]:
        """`checkpoint.load`: in place, awake."""
        return checkpoint.load(self, folder)

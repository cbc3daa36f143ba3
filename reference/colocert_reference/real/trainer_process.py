"""The trainer of a pair in its process: `RealTrainer` behind the calls of a driver's trainer port.

Knows how a call reaches the trainer, where its adapter goes, and what its process groups cost. Does not know the order
of calls. torch and megatron-core are imported when the process starts; nothing is on the device before `init`.

NCCL takes device memory at the first collective of a group and gives it back when the group is destroyed; the saver
does not manage it, and no cache clearing returns it. gloo, which stands for NCCL on `host`, takes none. So the groups
of this process hold a plain block of `communicators` bytes from a step to the next teardown. That is what the early
release of the gradients makes up for: a trainer that has just trained holds it, one that has just woken up does not,
and gradients are resident in both (`wake_up` resumes them beside the engine's weights).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colocert_reference.ports import DEFAULT, GRADS, Groups, Work
from colocert_reference.real import adapter_wire
from colocert_reference.real.engine_memory import held

if TYPE_CHECKING:
    from colocert_reference.real.trainer import RealTrainer

_FOREVER = 7 * 86400.0
OWN = ("init", "facts", "train", "feed", "base", "save", "load")
CALLS = ("offload_grad_buffer", "clear_memory", "sleep", "update_weights", "wake_up", "close")
"""Calls that this module answers, and those that are the trainer's."""


class Communicators:
    """The groups port and the work port of a trainer whose groups hold device memory from a step to their teardown."""

    def __init__(self, device: Any, nbytes: int, groups: Groups, work: Work) -> None:
        self.device, self.nbytes, self.groups, self.work = device, nbytes, groups, work
        self.block: Any = None

    def tear_down(self) -> None:
        self.groups.tear_down()
        if self.block is not None:
            self.device.free(self.block)
            self.block = None

    def rebuild(self) -> None:
        self.groups.rebuild()

    def step(self) -> None:
        """The first collective after a rebuild takes the memory."""
        if self.block is None and self.nbytes:
            self.block = self.device.alloc(None, False, self.nbytes)
        self.work.step()

    def send(self, tag: str, *, from_host: bool) -> None:
        self.work.send(tag, from_host=from_host)

    def rematerialize(self) -> None:
        self.work.rematerialize()

    def clear_memory(self) -> None:
        self.work.clear_memory()


class TrainerProcess:
    """The calls. `init` builds the trainer once; `shape` are the arguments of `real.model.Shape`.

    `names` says how a sync names what it sends (`real.trainer.MEGATRON`, `PEFT`).
    """

    def __init__(
        self,
        stage: Any,
        shape: dict[str, Any],
        communicators: int,
        accumulate: int,
        wire: str,
        timeout: float,
        names: str = "megatron",
        learning_rate: float = 1e-2,
        seed: int = 0,
    ) -> None:
        self.stage, self.shape, self.communicators = stage, shape, communicators
        self.wire, self.timeout = wire, timeout
        self.settings: dict[str, Any] = {
            "accumulate": accumulate,
            "names": names,
            "learning_rate": learning_rate,
            "seed": seed,
        }
        self.trainer: RealTrainer | None = None
        self.sent: list[dict[str, Any]] = []

    def init(self) -> None:
        from colocert_reference.real.model import Shape
        from colocert_reference.real.trainer import RealTrainer

        if self.trainer is not None:
            return
        device = self.stage.device
        trainer = RealTrainer(Shape(**self.shape), device=device.name, deliver=self.deliver, **self.settings)
        costly = Communicators(device, self.communicators, trainer.ports.groups, trainer.ports.work)
        trainer.ports = replace(trainer.ports, groups=costly, work=costly)
        self.trainer = trainer

    def deliver(self, tensors: Mapping[str, Any]) -> None:
        """To the engine's socket, out of the memory where the tensors lie: the device's, or the host backup's."""
        raw = {name: memoryview(_bytes(t)) for name, t in tensors.items()}
        told = adapter_wire.send(self.wire, raw, self.timeout, lambda: self.stage.tell({"sending": len(raw)}))
        self.sent.append({"tensors": {name: len(m) for name, m in raw.items()}, **told})

    def feed(self, groups: Sequence[Sequence[Mapping[str, Any]]]) -> int:
        """What the next `train` trains on: rollouts (`prompt`, `completion`, `reward`) by prompt; how many tokens."""
        from colocert_reference.real.policy import PolicyBatch, Rollout

        trainer = self.built()
        batch = PolicyBatch.from_rollouts([[Rollout(**rollout) for rollout in group] for group in groups])
        trainer.feed(batch)
        return batch.tokens

    def train(self) -> float:
        """The loss of the step."""
        trainer = self.built()
        trainer.train()
        return trainer.work.losses[-1]

    def base(self, path: str) -> dict[str, Any]:
        """Writes the base, by the engine's names, as one safetensors file: complete under that name, or not there."""
        from safetensors.torch import save_file

        state, unfinished = self.built().base(), Path(f"{path}.unfinished")
        try:
            save_file(state, unfinished)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        return {"path": path, "tensors": len(state), "bytes": sum(t.nbytes for t in state.values())}

    def save(self, folder: str, iteration: int) -> dict[str, Any]:
        """Between optimizer steps, awake or asleep."""
        return self.built().save(folder, iteration)

    def load(self, folder: str) -> dict[str, Any]:
        """In place, awake: `iteration` and `version` as they were saved."""
        return self.built().load(folder)

    def built(self) -> RealTrainer:
        if self.trainer is None:
            raise RuntimeError("this call needs a trainer that was built: init() first")
        return self.trainer

    def facts(self) -> dict[str, Any]:
        """Bytes of every tensor by tag, losses, what was sent, and what the trainer believes to have released."""
        assert self.trainer is not None, "built by init()"
        tensors = self.trainer.parts.tensors()
        return {
            "sizes": {tag: [t.nbytes for t in tensors[tag].values()] for tag in (DEFAULT, GRADS)},
            "adapter": {n: p.nbytes for n, p in self.trainer.parts.model.named_parameters() if p.requires_grad},
            "losses": self.trainer.work.losses,
            "sent": self.sent,
            "version": self.trainer.work.version,
            "believed": self.trainer.believed(),
        }

    def answer(self, call: str, **arguments: Any) -> Any:
        """What the call returns."""
        if call in OWN:
            return getattr(self, call)(**arguments)
        if call not in CALLS:
            raise ValueError(f"call must be one of {', '.join((*OWN, *CALLS))} (got {call!r})")
        return getattr(self.built(), call)(**arguments)


def main(stage: Any, **settings: Any) -> None:
    """The process, by the arguments of `TrainerProcess`: answers calls until told to leave or whoever asked is gone."""
    process = TrainerProcess(stage, **settings)
    import colocert_reference.real.trainer

    assert colocert_reference.real.trainer
    stage.tell({"ok": "here"})
    while (message := stage.listen(_FOREVER)) is not None:
        try:
            answer = {"ok": process.answer(**message)}
        except Exception as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        stage.tell({**answer, "held": held(stage.device), "released": _released(process)})


def _released(process: TrainerProcess) -> list[str]:
    believed = process.trainer.believed() if process.trainer is not None else {}
    return [tag for tag, released in believed.items() if released]


def _bytes(tensor: Any) -> Any:
    """The bytes of a tensor, of whatever type, in host memory."""
    import torch

    return tensor.cpu().contiguous().view(torch.uint8).flatten().numpy()

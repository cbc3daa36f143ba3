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

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from colocert_reference.ports import DEFAULT, GRADS, Groups, Work
from colocert_reference.real import adapter_wire
from colocert_reference.real.engine_memory import held

if TYPE_CHECKING:
    from colocert_reference.real.trainer import RealTrainer

_FOREVER = 7 * 86400.0
CALLS = ("offload_grad_buffer", "clear_memory", "sleep", "update_weights", "wake_up", "train", "close")


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
    """The calls. `init` builds the trainer once; `shape` are the arguments of `real.model.Shape`."""

    def __init__(
        self, stage: Any, shape: dict[str, Any], communicators: int, accumulate: int, wire: str, timeout: float
    ) -> None:
        self.stage, self.shape, self.communicators, self.accumulate = stage, shape, communicators, accumulate
        self.wire, self.timeout = wire, timeout
        self.trainer: RealTrainer | None = None
        self.sent: list[dict[str, Any]] = []

    def init(self) -> None:
        from colocert_reference.real.model import Shape
        from colocert_reference.real.trainer import RealTrainer

        if self.trainer is not None:
            return
        device = self.stage.device
        trainer = RealTrainer(Shape(**self.shape), device=device.name, deliver=self.deliver, accumulate=self.accumulate)
        costly = Communicators(device, self.communicators, trainer.ports.groups, trainer.ports.work)
        trainer.ports = replace(trainer.ports, groups=costly, work=costly)
        self.trainer = trainer

    def deliver(self, tensors: Mapping[str, Any]) -> None:
        """To the engine's socket, out of the memory where the tensors lie: the device's, or the host backup's."""
        raw = {name: memoryview(t.cpu().contiguous().numpy()) for name, t in tensors.items()}
        told = adapter_wire.send(self.wire, raw, self.timeout, lambda: self.stage.tell({"sending": len(raw)}))
        self.sent.append({"tensors": {name: len(m.cast("B")) for name, m in raw.items()}, **told})

    def facts(self) -> dict[str, Any]:
        """Bytes of every tensor by tag, losses, what was sent, and what the trainer believes to have released."""
        assert self.trainer is not None, "built by init()"
        tensors = self.trainer.parts.tensors()
        return {
            "sizes": {tag: [t.nbytes for t in tensors[tag].values()] for tag in (DEFAULT, GRADS)},
            "adapter": {n: p.nbytes for n, p in self.trainer.parts.model.named_parameters() if p.requires_grad},
            "losses": self.trainer.work.losses,
            "sent": self.sent,
            "believed": self.trainer.believed(),
        }

    def answer(self, call: str) -> Any:
        """What the call returns."""
        if call in ("init", "facts"):
            return getattr(self, call)()
        if call not in CALLS:
            raise ValueError(f"call must be init, facts or one of {', '.join(CALLS)} (got {call!r})")
        if self.trainer is None:
            raise RuntimeError(f"{call}() needs a trainer that was built: init() first")
        return getattr(self.trainer, call)()


def main(stage: Any, *, shape: dict[str, Any], communicators: int, accumulate: int, wire: str, timeout: float) -> None:
    """The process: answers calls until it is told to leave or whoever asked is gone."""
    process = TrainerProcess(stage, shape, communicators, accumulate, wire, timeout)
    import colocert_reference.real.trainer

    assert colocert_reference.real.trainer
    stage.tell({"ok": "here"})
    while (message := stage.listen(_FOREVER)) is not None:
        try:
            answer = {"ok": process.answer(message["call"])}
        except Exception as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        stage.tell({**answer, "held": held(stage.device), "released": _released(process)})


def _released(process: TrainerProcess) -> list[str]:
    believed = process.trainer.believed() if process.trainer is not None else {}
    return [tag for tag, released in believed.items() if released]

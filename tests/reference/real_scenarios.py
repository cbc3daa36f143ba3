"""Bodies of child processes for test_real_trainer.py. Each takes a stage, builds one trainer and returns what it saw.

torch, megatron-core and the trainer are imported inside each body: the launcher's probe runs before torch is loaded.
"""

from __future__ import annotations

import gc
import hashlib
import weakref
from typing import Any

from colocert.device import DeviceOutOfMemory, Stage

CYCLE = ("offload_grad_buffer", "sleep", "update_weights", "wake_up")


def build(lora: bool = True, **settings: Any) -> Any:
    from colocert_reference.real.model import Shape
    from colocert_reference.real.trainer import RealTrainer

    return RealTrainer(Shape(lora_rank=8 if lora else 0), **settings)


def digest(tensors: dict[str, Any]) -> dict[str, str]:
    """SHA-256 over each tensor's bytes."""
    return {name: hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for name, t in tensors.items()}


def addresses(trainer: Any) -> dict[str, int]:
    tensors = trainer.parts.tensors()
    trainable = {n: p for n, p in trainer.parts.model.named_parameters() if p.requires_grad}
    return {
        **{f"{tag}/{name}": t.data_ptr() for tag, named in tensors.items() for name, t in named.items()},
        **{f"main_grad/{name}": p.main_grad.data_ptr() for name, p in trainable.items()},
    }


def cycle(stage: Stage, lora: bool) -> dict[str, Any]:
    """One hand-off and back, with free bytes, pinned host bytes, addresses, contents and exports around it."""
    exports: list[dict[str, str]] = []
    trainer = build(lora, deliver=lambda tensors: exports.append(digest(dict(tensors))))
    trainer.train()
    trainer.update_weights()
    tensors = trainer.parts.tensors()
    facts: dict[str, Any] = {
        "sizes": {tag: [t.nbytes for t in named.values()] for tag, named in tensors.items()},
        "moments": sum(name.endswith("exp_avg") for name in tensors["default"]),
        "adapters": sum(name.endswith((".lora_a", ".lora_b")) for name in tensors["default"]),
        "own": stage.device.own_bytes(),
        "free": [stage.device.free_bytes()],
        "pinned": [trainer.memory.managed.host_bytes()],
        "addresses": [addresses(trainer)],
        "contents": [digest(tensors["default"])],
    }
    for call in CYCLE if lora else CYCLE[1:]:
        getattr(trainer, call)()
        facts["free"].append(stage.device.free_bytes())
        facts["pinned"].append(trainer.memory.managed.host_bytes())
    facts["grads_after"] = sum(int(t.count_nonzero()) for t in tensors["grad_buffer"].values())
    facts["addresses"].append(addresses(trainer))
    facts["contents"].append(digest(trainer.parts.tensors()["default"]))
    facts["exports"] = exports
    return facts


def touches(stage: Stage, released: str, tensor: str) -> None:
    """Reads one number of a tensor whose region `released` has given back."""
    trainer = build()
    found = next(t for named in trainer.parts.tensors().values() for name, t in named.items() if tensor in name)
    found.view(-1)[0].item()
    getattr(trainer, released)()
    stage.tell("released")
    found.view(-1)[0].item()


def trains(stage: Stage, steps: int, calls: list[str], accumulate: int = 1, lora: bool = True) -> dict[str, Any]:
    """`steps` steps with `calls` after each."""
    trainer = build(lora, accumulate=accumulate)
    for _ in range(steps):
        trainer.train()
        for call in calls:
            getattr(trainer, call)()
    trainer.wake_up()
    return {
        "losses": [loss.hex() for loss in trainer.work.losses],
        "contents": digest(trainer.parts.tensors()["default"]),
    }


def shares(stage: Stage) -> None:
    """Obeys calls by name, and says after each what it raised, what is free and what the trainer believes."""
    trainer = build()
    gc.collect()  # building leaves cycles that hold placed tensors until Python looks at them
    stage.tell({"held": stage.device.own_bytes()})
    while call := stage.listen():
        error = ""
        try:
            getattr(trainer, call)()
        except Exception as raised:
            error = type(raised).__name__
        gc.collect()
        stage.tell({"error": error, "free": stage.device.free_bytes(), "believed": trainer.believed()})


def neighbour(stage: Stage) -> None:
    """Another process on the device: takes as many bytes as it is told, gives them back at 0."""
    block = None
    while (nbytes := stage.listen()) is not None:
        answer = "ok"
        if block is not None:
            stage.device.free(block)
            block = None
        try:
            block = stage.device.alloc("weights", True, nbytes) if nbytes else None
        except DeviceOutOfMemory:
            answer = "does not fit"
        stage.tell(answer)


def groups_come_back(stage: Stage) -> dict[str, Any]:
    """A rebuild that fails half-way, then one that succeeds: the arguments, the references, the training."""
    import torch.distributed as dist

    trainer = build()
    trainer.train()
    before = trainer.groups.arguments()
    old = [weakref.ref(group) for group in trainer.groups._alive()]
    trainer.sleep()
    facts: dict[str, Any] = {"asleep": trainer.groups.arguments(), "made": 0}
    make = dist.new_group

    def fails(*args: Any, **kwargs: Any) -> Any:
        facts["made"] += 1
        if facts["made"] == 5:
            raise RuntimeError("peer lost")
        return make(*args, **kwargs)

    dist.new_group = fails
    try:
        trainer.wake_up()
    except RuntimeError as error:
        facts["error"] = str(error)
    finally:
        dist.new_group = make
    facts["believed"] = trainer.believed()
    facts["after_failure"] = trainer.groups.arguments()
    free = stage.device.free_bytes()
    trainer.wake_up()
    facts["moved"] = free - stage.device.free_bytes()
    trainer.train()
    gc.collect()
    facts["alive"] = [group.group_desc for ref in old if (group := ref()) is not None]
    facts["before"], facts["after"] = before, trainer.groups.arguments()
    trainer.close()
    facts["closed"] = trainer.groups.arguments()
    return facts


def groups_taken_away(stage: Stage) -> dict[str, Any]:
    """All groups vanish behind the trainer's back, as when a peer crashed: once before a sleep, once before a step."""
    import torch.distributed as dist

    trainer = build()
    before = trainer.groups.arguments()
    dist.destroy_process_group()
    for call in ("sleep", "sleep", "wake_up", "train"):
        getattr(trainer, call)()
    dist.destroy_process_group()
    trainer.train()
    return {"same": trainer.groups.arguments() == before, "steps": len(trainer.work.losses)}


def gradients(stage: Stage) -> dict[str, Any]:
    """The live gradients in DDP's buffer beside those that autograd gives for the same parameters and batch."""
    import torch

    trainer = build(accumulate=2)
    for _ in range(2):
        trainer.train()
    trained = [p for p in trainer.parts.model.parameters() if p.requires_grad]
    ids, positions, mask = trainer.work._batch(2)
    loss = trainer.parts.model(ids, positions, mask, labels=ids.roll(-1, dims=1)).mean() / 2
    expected = torch.autograd.grad(loss, trained)
    trainer.train()
    for call in CYCLE:
        getattr(trainer, call)()
    return {
        "equal": [torch.equal(p.main_grad, g) for p, g in zip(trained, expected, strict=True)],
        "live": trainer.ports.gradients.live(),
        "nonzero": sum(int(g.count_nonzero()) for g in expected),
    }


def early_release_alone(stage: Stage) -> dict[str, Any]:
    """The engine's resume failed after the early release: `sleep()` never comes."""
    trainer = build()
    trainer.train()
    free = [stage.device.free_bytes()]
    for call in ("offload_grad_buffer", "offload_grad_buffer", "wake_up", "wake_up", "offload_grad_buffer", "train"):
        getattr(trainer, call)()
        free.append(stage.device.free_bytes())
    return {"free": free, "believed": trainer.believed(), "steps": len(trainer.work.losses)}


def saver_first(stage: Stage) -> str:
    """The saver is put to use before megatron-core is imported."""
    from colocert.device import tensors

    tensors.start()
    try:
        build()
    except ImportError as error:
        return type(error).__name__
    return ""


def mode_after_import(stage: Stage) -> list[str]:
    """The saver's mode as megatron's import leaves it, and as the trainer runs with."""
    import megatron.core.inference.contexts.dynamic_context
    import torch_memory_saver

    assert megatron.core
    saver = torch_memory_saver.torch_memory_saver
    modes = [saver._impl_ctor_kwargs["hook_mode"]]
    build()
    return [*modes, saver._impl._hook_mode]


def one_of_two(stage: Stage, rank: int, port: int) -> dict[str, Any]:
    """One data-parallel rank, on other data than its peer; a hand-off with its groups torn down between two steps."""
    from colocert_reference.real.groups import World

    world = World(rank=rank, size=2, address=("127.0.0.1", port), timeout_minutes=2)
    trainer = build(world=world)
    for _ in range(2):
        trainer.train()
        for call in CYCLE:
            getattr(trainer, call)()
    trainer.train()
    stage.tell("done")
    stage.listen()  # the store is rank 0's: nobody leaves before both are done
    return {
        "losses": trainer.work.losses,
        "contents": digest(trainer.parts.tensors()["default"]),
        "data": next(g for g in trainer.groups.arguments() if g["name"] == "DATA_PARALLEL_GROUP"),
    }


def bf16_buffers(stage: Stage) -> dict[str, Any]:
    """DDP as the distributed optimizer needs it, which is built on the CPU too: a buffer of parameters as well."""
    import torch

    from colocert_reference.ports import DEFAULT, GRADS
    from colocert_reference.real import cpu_shims, export, model
    from colocert_reference.real.groups import RealGroups, World
    from colocert_reference.real.memory import SaverMemory, open_memory

    memory = SaverMemory(open_memory("host"))
    cpu_shims.apply()
    RealGroups(World()).rebuild()
    shape = model.Shape()
    config = shape.config(bf16=True)
    with memory.region(DEFAULT):
        gpt = model.build_model(shape, config, "cpu", 0)
    before = {name: p.detach().clone() for name, p in gpt.named_parameters()}
    with memory.fused_buffers():
        ddp: Any = model.wrap(gpt, config)
    [buffer] = ddp.buffers
    trained = {name: p.detach() for name, p in gpt.named_parameters() if p.requires_grad}
    start, end = buffer.param_data.data_ptr(), buffer.param_data.data_ptr() + buffer.param_data.nbytes
    facts: dict[str, Any] = {
        "types": sorted({str(p.dtype) for p in gpt.parameters()} | {str(buffer.grad_data.dtype)}),
        "inside": all(start <= t.data_ptr() < end for t in trained.values()),
        "free": [stage.device.free_bytes()],
        "buffers": [buffer.grad_data.nbytes, buffer.param_data.nbytes],
    }
    memory.pause(GRADS)
    facts["free"].append(stage.device.free_bytes())
    facts["kept"] = all(torch.equal(before[name], t) for name, t in trained.items())
    awake = export.adapter_state(gpt, shape)
    memory.pause(DEFAULT)
    asleep = export.adapter_state(gpt, shape, tensors={name: memory.backup(t) for name, t in trained.items()})
    facts["same"] = all(torch.equal(awake[name], asleep[name]) for name in awake)
    facts["free"].append(stage.device.free_bytes())
    memory.resume(DEFAULT)
    facts["back"] = all(torch.equal(before[name], p.detach()) for name, p in gpt.named_parameters())
    return facts

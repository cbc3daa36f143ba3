"""Bodies of child processes for test_checkpoint.py: trainers that save, end, load and go on."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from pathlib import Path
from typing import Any

from colocert.device import Stage

SIZES = {"vocabulary": 256, "hidden": 64, "heads": 8, "kv_heads": 2, "ffn": 96, "sequence": 16}
ASLEEP = ("offload_grad_buffer", "sleep", "update_weights")


def built(tensor: int = 1, size: int = 1, rank: int = 0, port: int = 0, seed: int = 0, **shape: Any) -> Any:
    from colocert_reference.real.groups import World
    from colocert_reference.real.model import Shape
    from colocert_reference.real.trainer import RealTrainer

    parallel = {"tensor_model_parallel_size": tensor}
    world = World(rank=rank, size=size, address=("127.0.0.1", port), timeout_minutes=2, parallel=parallel)
    return RealTrainer(Shape(**{**SIZES, **shape}), world=world, seed=seed)


def state(trainer: Any) -> dict[str, Any]:
    """Everything that a checkpoint promises, as digests."""
    parts = trainer.parts
    tensors = {**parts.tensors()["default"], **parts.counters()}
    return {
        "tensors": {n: hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for n, t in tensors.items()},
        "losses": [loss.hex() for loss in trainer.work.losses],
        "version": trainer.work.version,
    }


def step(trainer: Any, number: int) -> None:
    """Every other step is fed."""
    from colocert_reference.real.policy import PolicyBatch, Rollout

    if number % 2:
        trainer.feed(PolicyBatch.from_rollouts([[Rollout([1, number], [2], 0.0), Rollout([1, number], [3, 4], 1.0)]]))
    trainer.train()


def straight(stage: Stage, steps: int, lora: bool = True) -> dict[str, Any]:
    """So many steps with a sync after each."""
    trainer = built(lora_rank=8 if lora else 0)
    for number in range(steps):
        step(trainer, number)
        trainer.update_weights()
    return state(trainer)


def begins(stage: Stage, folder: str, steps: int, lora: bool = True) -> dict[str, Any]:
    """The first steps; one checkpoint saved awake and one asleep, both over older ones. What is in their folders."""
    trainer = built(lora_rank=8 if lora else 0)
    for number in range(steps):
        step(trainer, number)
        trainer.update_weights()
        trainer.save(Path(folder) / "awake", number)
    trainer.save(Path(folder) / "asleep", 0)
    for call in ASLEEP if lora else ASLEEP[1:2]:
        getattr(trainer, call)()
    trainer.work.version = steps
    told = trainer.save(Path(folder) / "asleep", steps - 1)
    return {"told": told, **{name: contents(Path(folder) / name) for name in ("awake", "asleep")}}


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def goes_on(stage: Stage, folder: str, steps: int, lora: bool = True) -> dict[str, Any]:
    """Loads in a trainer that has trained on its own, and makes the remaining steps."""
    trainer = built(lora_rank=8 if lora else 0)
    step(trainer, 3)
    addresses = {n: t.data_ptr() for named in trainer.parts.tensors().values() for n, t in named.items()}
    own = stage.device.own_bytes()
    told = trainer.load(folder)
    after = {n: t.data_ptr() for named in trainer.parts.tensors().values() for n, t in named.items()}
    facts = {"told": told, "in_place": addresses == after and own == stage.device.own_bytes()}
    for number in range(told["iteration"] + 1, steps):
        step(trainer, number)
        trainer.update_weights()
    return {**facts, **state(trainer)}


def refusals(stage: Stage, folder: str) -> dict[str, Any]:
    """What is said to each attempt that must fail, and whether the trainer was as before after all of them."""
    from colocert_reference.real.checkpoint import BadCheckpoint, NotNow

    trainer, good = built(), Path(folder) / "good"
    step(trainer, 1)
    trainer.save(good, 4)
    step(trainer, 2)
    before, told = state(trainer), {}

    def attempt(name: str, action: Any, kind: type[Exception] = BadCheckpoint) -> None:
        try:
            action()
        except kind as error:
            told[name] = str(error)

    def damaged(name: str, damage: Any) -> None:
        copy = Path(folder) / name
        shutil.copytree(good, copy)
        damage(copy, next(copy.glob("*.safetensors")))
        attempt(name, lambda: trainer.load(copy))

    def flipped(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)

    def edited(path: Path) -> None:
        path.write_text(path.read_text().replace('"iteration": 4', '"iteration": 5'))

    damaged("flipped", lambda copy, tensors: flipped(tensors))
    damaged("cut", lambda copy, tensors: os.truncate(tensors, 100))
    damaged("gone", lambda copy, tensors: tensors.unlink())
    damaged("no_json", lambda copy, tensors: os.truncate(copy / "checkpoint.json", 50))
    damaged("edited", lambda copy, tensors: edited(copy / "checkpoint.json"))
    damaged("foreign", lambda copy, tensors: (copy / "checkpoint.json").write_text('{"format": "other"}'))
    attempt("no_folder", lambda: trainer.load(Path(folder) / "nowhere"))
    for name, other in (("ffn", {"ffn": 64}), ("full", {"lora_rank": 0}), ("seed", {"seed": 1})):
        saved = Path(folder) / name
        shutil.copytree(good, saved)
        rewritten(saved, other, trainer)
        attempt(name, lambda saved=saved: trainer.load(saved))
    trainer.offload_grad_buffer()
    attempt("early", lambda: trainer.load(good), NotNow)
    trainer.sleep()
    attempt("asleep", lambda: trainer.load(good), NotNow)
    trainer.wake_up()
    same = state(trainer) == before
    trainer.work.accumulate = 2
    trainer.train()
    attempt("accumulating", lambda: trainer.save(good, 5), NotNow)
    trainer.work.accumulate = 1
    return {"told": told, "same": same, "after": trainer.load(good)}


def rewritten(saved: Path, other: dict[str, Any], trainer: Any) -> None:
    """The checkpoint as a trainer of another shape, or of another base, would have sealed it."""
    import json

    from colocert_reference.real import checkpoint

    manifest = json.loads((saved / "checkpoint.json").read_text())
    del manifest["seal"]
    if "seed" in other:
        manifest["ranks"][0]["base"] = "0" * 64
    else:
        manifest["shape"].update(other)
    checkpoint._publish(saved, manifest)


def crash_points(stage: Stage, folder: str) -> dict[str, Any]:
    """The folder as it is at each point of a second save, and what a trainer gets out of each such folder."""
    from colocert_reference.real import checkpoint

    trainer, work = built(), Path(folder) / "work"
    step(trainer, 1)
    trainer.save(work, 1)
    states = {1: state(trainer)}
    step(trainer, 2)
    states[2] = state(trainer)
    points: list[str] = []

    def point(name: str) -> None:
        shutil.copytree(work, Path(folder) / f"{len(points)}")
        points.append(name)

    def around(owner: Any, name: str) -> Any:
        real = getattr(owner, name)

        def patched(*args: Any, **more: Any) -> Any:
            point(f"before {name}")
            result = real(*args, **more)
            point(f"after {name}")
            return result

        setattr(owner, name, patched)
        return real

    def half(tensors: Any, path: Path) -> None:
        save_file(tensors, path)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        point("half a file")
        path.write_bytes(whole)

    save_file = checkpoint.save_file
    checkpoint.save_file = half  # type: ignore[assignment]
    reals = [(owner, name, around(owner, name)) for owner, name in ((os, "fsync"), (Path, "replace"), (Path, "unlink"))]
    trainer.save(work, 2)
    for owner, name, real in reals:
        setattr(owner, name, real)
    checkpoint.save_file = save_file
    point("saved")
    loaded = []
    for number in range(len(points)):
        iteration = trainer.load(Path(folder) / f"{number}")["iteration"]
        loaded.append([points[number], iteration, state(trainer) == states[iteration]])
    step(trainer, 3)
    trainer.save(Path(folder) / "0", 3)
    return {"loaded": loaded, "left": sorted(contents(Path(folder) / "0")), "work": sorted(contents(work))}


def killed(stage: Stage, folder: str) -> None:
    """SIGKILL in the second save, when its files are complete and nothing names them yet."""
    from colocert_reference.real import checkpoint

    trainer = built()
    for number in range(3):
        step(trainer, number)
        trainer.update_weights()
    trainer.save(folder, 2)
    step(trainer, 3)
    checkpoint._publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    trainer.save(folder, 3)


def two_ranks(stage: Stage, folder: str, rank: int, port: int, steps: int, load: bool) -> dict[str, Any]:
    """One of two tensor-parallel ranks: saves after three steps, or loads at its second attempt; then goes on."""
    trainer = built(2, 2, rank, port)
    facts: dict[str, Any] = {}
    if load:
        broken = Path(folder) / "broken"
        facts["errors"] = []
        try:
            trainer.load(broken)
        except Exception as error:
            facts["errors"] = [type(error).__name__, str(error)]
        facts["told"] = trainer.load(Path(folder) / "good")
    for number in range(3 if load else 0, steps):
        step(trainer, number)
        trainer.sleep()
        trainer.update_weights()
        if number == 2:
            facts["saved"] = trainer.save(Path(folder) / "good", number)
        trainer.wake_up()
    facts["state"] = state(trainer)
    stage.tell("done")
    stage.listen()  # the store is rank 0's: nobody leaves before both are done
    return facts

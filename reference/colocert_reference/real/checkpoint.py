"""Checkpoints of a trainer: what it trains and what its next step depends on. The frozen base is named, not kept.

    FOLDER/rank0-12-3f9a….safetensors    a rank's trained parameters, moments, step counters, losses and RNG state
    FOLDER/checkpoint.json               which of these files count, their SHA-256, iteration, version, sizes, layout

A save writes new files first, then replaces `checkpoint.json` in one step, then removes the files that no longer count.
So whatever ends it, the folder holds the previous checkpoint or the new one, of all ranks together. All ranks reach one
folder; they meet through the store of their groups, which is there while they sleep too.

A save reads the host backups of a trainer that sleeps. A load needs one that is awake: it writes in place, so addresses
and regions stay, and it writes nothing before all ranks have found everything in order.

Knows files and what is in them. Does not know when to save, nor the engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from colocert_reference.ports import DEFAULT

if TYPE_CHECKING:
    from colocert_reference.real.trainer import RealTrainer

FORMAT = {"format": "colocert-reference-trainer", "version": 1}
MANIFEST = "checkpoint.json"
LOSSES = "losses"
TENSORS = "rank*-*.safetensors"
UNFINISHED = ".unfinished-"


class BadCheckpoint(ValueError):
    """The folder holds no checkpoint that this trainer can go on from; nothing was loaded."""


class NotNow(RuntimeError):
    """The trainer's state does not allow it; nothing was written."""


class PeerFailed(RuntimeError):
    """Another rank could not; nothing was loaded, and the previous checkpoint counts."""


def save(trainer: RealTrainer, folder: str | Path, iteration: int) -> dict[str, Any]:
    """Every rank calls. Returns `iteration`, and the adapter's version, once all ranks' files are on the disk."""
    folder, world = Path(folder), trainer.parts.world
    entries = _everyone(trainer, lambda: _write_tensors(trainer, folder, iteration))
    manifest = {
        **FORMAT,
        "iteration": iteration,
        "adapter_version": trainer.work.version,
        "shape": asdict(trainer.parts.shape),
        "world": {"ranks": world.size, "tensor": world.tensor},
        "ranks": entries,
    }
    _everyone(trainer, lambda: _publish(folder, manifest) if world.rank == 0 else None)
    return {"iteration": iteration, "version": trainer.work.version}


def load(trainer: RealTrainer, folder: str | Path) -> dict[str, Any]:
    """Every rank calls. The trainer goes on as the saved one would have; returns `iteration` and the version."""
    folder, found = Path(folder), dict[str, Any]()

    def check() -> None:
        if away := ", ".join(sorted(trainer.released)):
            raise NotNow(f"a checkpoint is loaded into resident memory (got {away} released): wake_up() first")
        found["manifest"] = _manifest(folder)
        _same_trainer(trainer, folder / MANIFEST, found["manifest"])
        found["tensors"] = _read_tensors(trainer, folder, found["manifest"]["ranks"][trainer.parts.world.rank])

    _everyone(trainer, check)
    manifest, work = found["manifest"], trainer.work
    with torch.no_grad():
        for name, place in places(trainer).items():
            place.copy_(found["tensors"].pop(name))
    _set_rng(trainer, found["tensors"])
    work.losses[:] = found["tensors"][LOSSES].tolist()
    work.version, work.fed, work.gradients.pending = manifest["adapter_version"], None, 0
    return {"iteration": manifest["iteration"], "version": work.version}


def places(trainer: RealTrainer) -> dict[str, torch.Tensor]:
    """The tensors that a checkpoint holds, where the trainer has them."""
    return {**trainer.parts.trained(), **trainer.parts.counters()}


def _write_tensors(trainer: RealTrainer, folder: Path, iteration: int) -> dict[str, Any]:
    """This rank's file, and what `checkpoint.json` says of it."""
    if trainer.work.gradients.live():
        raise NotNow("a checkpoint is saved between optimizer steps (got an accumulation under way): train() first")
    folder.mkdir(parents=True, exist_ok=True)
    resident = DEFAULT not in trainer.released
    trained = trainer.parts.trained()
    tensors = {name: t if resident else trainer.memory.backup(t) for name, t in trained.items()}
    tensors |= {**trainer.parts.counters(), **_rng(trainer)}
    tensors[LOSSES] = torch.tensor(trainer.work.losses, dtype=torch.float64)
    rank = trainer.parts.world.rank
    unfinished = folder / f"{UNFINISHED}rank{rank}-{os.getpid()}"
    with _removed_at_the_end(unfinished):
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, unfinished)
        digest = _sha256(unfinished)
        name = f"rank{rank}-{iteration}-{digest[:16]}.safetensors"
        _put(unfinished, folder / name)
    return {"file": name, "sha256": digest, "base": _base_digest(trainer)}


def _publish(folder: Path, manifest: dict[str, Any]) -> None:
    """From here on this is the checkpoint; what it does not name goes."""
    unfinished = folder / f"{UNFINISHED}{MANIFEST}-{os.getpid()}"
    with _removed_at_the_end(unfinished):
        unfinished.write_text(json.dumps({**manifest, "seal": _seal(manifest)}, indent=1) + "\n")
        _put(unfinished, folder / MANIFEST)
    counted = {entry["file"] for entry in manifest["ranks"]}
    for path in [*folder.glob(TENSORS), *folder.glob(f"{UNFINISHED}*")]:
        if path.name not in counted:
            path.unlink(missing_ok=True)


def _put(unfinished: Path, path: Path) -> None:
    """The complete file under its name, on the disk before this returns."""
    _sync(unfinished)
    unfinished.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _removed_at_the_end(path: Path) -> Iterator[None]:
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        raise BadCheckpoint(f"{path} must be readable (got {error.strerror}): name the folder of a save()") from None
    except ValueError:
        raise BadCheckpoint(f"{path} must be JSON (got a damaged file): restore it or start anew") from None
    if not isinstance(manifest, dict) or any(manifest.get(key) != value for key, value in FORMAT.items()):
        raise BadCheckpoint(f"{path} must be of {FORMAT} (got something else): name the folder of a save()")
    if manifest.pop("seal", None) != _seal(manifest):
        raise BadCheckpoint(f"{path} must be as it was saved (got a damaged file): restore it or start anew")
    return manifest


def _seal(manifest: dict[str, Any]) -> str:
    """SHA-256 over what the manifest says."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _same_trainer(trainer: RealTrainer, path: Path, manifest: dict[str, Any]) -> None:
    """Raises unless the checkpoint is of a trainer of these sizes, this layout and this base."""
    world = trainer.parts.world
    for what, here in (
        ("shape", asdict(trainer.parts.shape)),
        ("world", {"ranks": world.size, "tensor": world.tensor}),
    ):
        saved = manifest[what]
        other = [f"{name}={saved.get(name)}" for name in here if saved.get(name) != here[name]]
        if other:
            mine = [f"{name}={here[name]}" for name in here if saved.get(name) != here[name]]
            raise BadCheckpoint(
                f"{path} must be of this trainer's {what}, {', '.join(mine)} (got {', '.join(other)}): build the "
                "trainer with what was saved"
            )
    if manifest["ranks"][world.rank]["base"] != _base_digest(trainer):
        raise BadCheckpoint(
            f"{path} must be of a trainer with this frozen base (got another): build the trainer with the seed of then"
        )


def _read_tensors(trainer: RealTrainer, folder: Path, entry: dict[str, Any]) -> dict[str, torch.Tensor]:
    path = folder / entry["file"]
    fix = "restore it or start anew"
    try:
        whole = _sha256(path) == entry["sha256"]
        tensors = load_file(path) if whole else {}
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise BadCheckpoint(f"{path} must be readable (got {why}): {fix}") from None
    if not whole:
        raise BadCheckpoint(f"{path} must have the SHA-256 that {MANIFEST} names (got a damaged file): {fix}")
    needed = {**places(trainer), **_rng(trainer)}
    odd = sorted(needed.keys() ^ (tensors.keys() - {LOSSES}))
    odd += [n for n in needed.keys() & tensors.keys() if _kind(needed[n]) != _kind(tensors[n])]
    if odd:
        raise BadCheckpoint(
            f"{path} must hold this trainer's tensors (got others, as {odd[0]}): build it on the device of then"
        )
    return tensors


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _rng(trainer: RealTrainer) -> dict[str, torch.Tensor]:
    """Nothing here draws after the model was built; a model with dropout would."""
    states = {"rng.host": torch.get_rng_state()}
    if trainer.memory.managed.device == "cuda":
        states["rng.device"] = torch.cuda.get_rng_state()
    return states


def _set_rng(trainer: RealTrainer, states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["rng.host"])
    if trainer.memory.managed.device == "cuda":
        torch.cuda.set_rng_state(states["rng.device"])


def _base_digest(trainer: RealTrainer) -> str:
    """SHA-256 over the frozen parameters: once in a trainer's life, as nothing changes them."""
    if trainer.base_digest is None:
        digest, asleep = hashlib.sha256(), DEFAULT in trainer.released
        for name, parameter in trainer.parts.model.named_parameters():
            if not parameter.requires_grad:
                held = trainer.memory.backup(parameter.detach()) if asleep else parameter.detach()
                digest.update(name.encode())
                digest.update(held.cpu().contiguous().view(torch.uint8).numpy().data)
        trainer.base_digest = digest.hexdigest()
    return trainer.base_digest


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _everyone(trainer: RealTrainer, step: Callable[[], Any]) -> list[Any]:
    """What `step` returned on each rank. Raises on all of them where it raised on one, on that one what it raised."""
    mine: BaseException | None = None
    try:
        said: dict[str, Any] = {"ok": step()}
    except Exception as error:
        mine, said = error, {"error": str(error)}
    answers = trainer.groups.everyone(said)
    if mine is not None:
        raise mine
    failed = [(rank, answer["error"]) for rank, answer in enumerate(answers) if "error" in answer]
    if failed:
        raise PeerFailed(f"every rank must be able to (got of rank {failed[0][0]}: {failed[0][1]})")
    return [answer["ok"] for answer in answers]

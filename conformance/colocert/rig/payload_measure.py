"""What the rig of the sync-payload profile sees when it looks at tensors: contents, sharing, deltas, levels.

Knows trainer and engine from inside and the live tensors of the process. Does not know rules: it writes plain facts.
Contents are written as tokens ("#3"): equal tokens, equal bits; values never leave this module.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import os
import tracemalloc
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from colocert.rig import payload_model as model
from colocert.rig.payload_engine import PayloadEngine
from colocert.rig.payload_trainer import BASE, LOST, PayloadTrainer

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
BLOCK = 512
"""Bytes from which a block of Python's counts: names and small objects are left out."""

_older: list[weakref.ref[Any]] = []
"""Tensors that were there at the last `settle()`."""

KIT = str(Path(__file__).parents[1]) + os.sep
ONCE, TWICE, NONE, OTHER, UNKNOWN = "once", "twice", "none", "other", "unknown"
"""How often the delta is in the effective weights; `other`: they are neither; `unknown`: the trainer's are lost."""


class Measure:
    """Looks at one trainer and one engine. `served_as`: under which name the engine has what was synced for an adapter.

    Timeline: `settle()` before the rig is built; `begin()`; before each sync `state()`, after it `compared()` and
    `levels()`; `end()`.
    """

    def __init__(self, trainer: PayloadTrainer, engine: PayloadEngine) -> None:
        import torch

        self._torch = torch
        self.trainer, self.engine = trainer, engine
        self.served_as: dict[str, str] = {}
        self._tokens: dict[bytes, str] = {}
        self._start: dict[str, int] = {}
        self._python: list[int] = []
        self._tracing = False
        self._threads = 0

    def begin(self, *, levels: bool) -> None:
        """From here on; with `levels`, what Python allocates is traced too. One thread: the tensors are small."""
        self._threads = self._torch.get_num_threads()
        self._torch.set_num_threads(1)
        self._tracing = levels and not tracemalloc.is_tracing()
        if self._tracing:
            tracemalloc.start()
        self._start = {"device": self._device_bytes(), "files": open_files()}

    def end(self) -> None:
        if self._tracing:
            tracemalloc.stop()
        self._torch.set_num_threads(self._threads)

    # ---- state

    def state(self, asked: str | None) -> dict[str, Any]:
        """Where everything is, and what it holds. `asked` is the adapter in question, None without LoRA."""
        trainer, engine = self.trainer, self.engine
        return {
            "asked": asked or "",
            "where": {owner: trainer.where(owner) for owner in (BASE, *trainer.adapters)},
            "trainer_base": self._token(trainer.truth(BASE)),
            "trainer_adapters": {a: self._token(trainer.truth(a)) for a in trainer.adapters},
            "base_valid": engine.base_valid,
            "incarnation": engine.incarnation,
            "served": {a: self._token(_flat(s.tensors)) for a, s in engine.adapters.items()},
        }

    def compared(self, asked: str | None) -> dict[str, Any]:
        """The state, and how the engine's side of it compares with the trainer's."""
        gc.collect()
        name = self.served_as.get(asked or "", asked)
        plain, expected = self.trainer.expected(None), self.trainer.expected(asked)
        got = self.engine.effective(name)
        return {
            **self.state(asked),
            "base_differs": self._base_differs(plain),
            "absent": self._absent(name),
            **self._effective(asked, plain, expected, got),
            "aliased": self._aliased(),
        }

    def _base_differs(self, plain: Mapping[str, Any] | None) -> list[str]:
        """The frozen tensors whose bits in the engine are not the trainer's."""
        assert plain is not None, "the base is never lost"
        return [n for n in self.trainer.frozen if not self._torch.equal(plain[n], self.engine.base[n])]

    def _effective(self, asked: str | None, plain: Any, expected: Any, got: Mapping[str, Any]) -> dict[str, Any]:
        """Which effective weights are not the trainer's, and how often the delta is in those that are frozen."""
        if expected is None:
            return {"stale": [], "outside_differs": [], "delta": UNKNOWN}
        stale = [n for n in expected if not self._close(expected[n], got[n])]
        chosen = self.trainer.frozen or list(expected)
        delta = OTHER
        if not set(stale) & set(chosen):
            delta = ONCE
        elif asked and all(self._close(plain[n], got[n]) for n in chosen):
            delta = NONE
        elif asked and all(self._close(2 * expected[n] - plain[n], got[n]) for n in chosen):
            delta = TWICE
        return {"stale": stale, "outside_differs": [n for n in stale if n not in chosen], "delta": delta}

    def _close(self, one: Any, other: Any) -> bool:
        return bool(self._torch.allclose(one, other, **CLOSE))

    def _absent(self, name: str | None) -> list[str]:
        """The parts of the trainer's adapter that the engine does not have under this name."""
        if name is None:
            return []
        held = self.engine.adapters.get(name)
        names = {f"{m}.{p}" for m, p in held.tensors} if held else set()
        wanted = [m for linear, *_ in model.linears() for m in model.parts(linear)]
        return [f"{m}.{p}" for m in wanted for p in ("lora_A", "lora_B") if f"{m}.{p}" not in names]

    def _aliased(self) -> dict[str, str]:
        """Served adapters that share memory with the trainer, or with any other tensor outside the engine."""
        trainers = self.trainer.storages()
        mine = {id(t) for s in self.engine.adapters.values() for t in s.tensors.values()}
        mine |= {id(t) for t in self.engine.base.values()}
        others = {_address(t) for t in self._live() if id(t) not in mine}
        found = {}
        for name, served in self.engine.adapters.items():
            held = {_address(t) for t in served.tensors.values()}
            if held & trainers:
                found[name] = "trainer"
            elif held & others:
                found[name] = "transport"
        return found

    # ---- levels

    @contextlib.contextmanager
    def around_sync(self) -> Iterator[None]:
        """Wraps a sync: what it leaves allocated in Python is counted to `host`."""
        if not tracemalloc.is_tracing():
            yield
            return
        before = _python_bytes()
        yield
        self._python.append(_python_bytes() - before)

    def levels(self) -> dict[str, int]:
        """Bytes of tensors and open files above their level at the start, Python's bytes, loaded adapters.

        The rig has one memory, so that tensors count as the device's and what else a sync leaves allocated as the
        host's: the latter from the third sync on, in steps of half an adapter's bytes, below which it is noise.
        """
        step = 2 * model.buffer_length()
        return {
            "device": self._device_bytes() - self._start["device"],
            "host": max(0, sum(self._python[3:])) // step * step,
            "files": open_files() - self._start["files"],
            "adapters": len(self.engine.adapters),
        }

    def _device_bytes(self) -> int:
        return sum({_address(t): t.untyped_storage().nbytes() for t in self._live()}.values())

    def _live(self) -> list[Any]:
        """Every strided tensor of the process."""
        return [*_young(), *(t for ref in _older if (t := ref()) is not None)]

    # ---- contents

    def _token(self, tensors: Mapping[str, Any] | None) -> str:
        if tensors is None:
            return "lost"
        digest = hashlib.sha256()
        for name in sorted(tensors):
            digest.update(name.encode() + b"\0")
            digest.update(raw(tensors[name]))
        return self._tokens.setdefault(digest.digest(), f"#{len(self._tokens) + 1}")


def settle() -> None:
    """Leaves all objects of the process out of garbage collections from here on, so that looking for tensors is cheap.

    Called before a scenario's rig is built: what is built later is collected as ever.
    """
    gc.collect()
    _older[:] = [ref for ref in _older if ref() is not None]
    _older.extend(weakref.ref(t) for t in _young())
    gc.freeze()


def _young() -> list[Any]:
    """Strided tensors that came to be since `settle()`."""
    import torch

    found = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return [t for t in found if t.layout == torch.strided and t.device.type != "meta"]


def raw(tensor: Any) -> bytes:
    """The bytes of a tensor, row by row."""
    flat = tensor.detach().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""


def _python_bytes() -> int:
    """What Python has allocated in blocks that can hold a tensor's bytes, but for what the kit itself did."""
    gc.collect()
    blocks = (trace for trace in tracemalloc.take_snapshot().traces if trace.size >= BLOCK)
    return sum(block.size for block in blocks if not block.traceback[0].filename.startswith(KIT))


def open_files() -> int:
    """How many files this process has open; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1
    return 0


def lost(trainer: PayloadTrainer) -> dict[int, str]:
    """Addresses of adapters that are lost, with their names."""
    return {_address(a.buffer): n for n, a in trainer.adapters.items() if trainer.where(n) == LOST}


def _address(tensor: Any) -> int:
    address: int = tensor.untyped_storage().data_ptr()
    return address


def _flat(tensors: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
    return {f"{module}.{part}": tensor for (module, part), tensor in tensors.items()}

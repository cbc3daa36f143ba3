"""The reference for real: megatron-core, transformers and torch_memory_saver behind the ports of its logic.

The trainer: `trainer` (the ports put together), `memory` (the saver, and what lies in which region), `groups`
(process groups that go and come back), `model` (GPTModel, LoRA, DDP, optimizer), `policy` (rollouts as a batch),
`export` (what the engine loads), `checkpoint` (what outlives a process), `cpu_shims` (what megatron-core needs where
there is no GPU), `host_memory` (tensors on the stand-in device).

The pair: `loop` (rollouts, reward, steps) over `pair` (two processes under the driver), `engine_process` over
`llama_engine`, `learner_process` over `trainer_process`, `adapter_wire` between them; `processes` and `ray_sides` start
and lose them, `progress` and `pictures` show a run.

Importing this package imports neither torch nor megatron-core. It refuses to load after the saver was put to use and
before megatron-core was imported: that import sets the saver's mode to "torch" (0.16.1,
megatron/core/inference/contexts/dynamic_context.py), silently before the saver's first use and with an AttributeError
after it. Loaded in the right order, `memory.open_memory()` sets the mode back to "preload".
"""

from __future__ import annotations

import sys
from types import ModuleType

SWITCHES_THE_MODE = "megatron.core.inference.contexts.dynamic_context"


class SaverStartedFirst(ImportError):
    """The saver was put to use before megatron-core was imported, which then fails in the middle of its import."""


def _refuse_a_started_saver() -> None:
    package: ModuleType | None = sys.modules.get("torch_memory_saver")
    saver = getattr(package, "torch_memory_saver", None)
    if getattr(saver, "_impl", None) is not None and SWITCHES_THE_MODE not in sys.modules:
        raise SaverStartedFirst(
            "megatron-core must be imported before the saver's first use (got an initialised saver and no "
            "megatron-core): import colocert_reference.real first"
        )


_refuse_a_started_saver()

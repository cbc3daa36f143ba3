"""What megatron-core 0.16.1 takes from CUDA without asking, and what stands there on a machine without a GPU.

Knows three places. Does not know the model; nothing here is applied on a GPU.

1. `torch.cuda.current_device()` is passed as `device=` by the fused buffers of DDP, by the parallel linears and by
   GPTModel. It returns the CPU device here.
2. The CUDA RNG tracker is forked around weight initialisation and dropout. Initialisation on the CPU draws from torch's
   CPU generator anyway and dropout is off, so the stand-in forks nothing.
3. `device="cuda"` literals: the FP32 optimizer's constructor makes its loss scale there, and gradient clipping makes
   scalars for its norm. The first happens inside a region, whose placement reads "cuda" as the stand-in device
   (`host_memory`); there is no clipping (`model.build_optimizer`).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from megatron.core.tensor_parallel import random as tensor_parallel_random


class NoForkTracker:
    """Stands where the CUDA RNG tracker is looked up."""

    def fork(self, name: str = "") -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_initialized(self) -> bool:
        return True

    def get_states(self) -> dict[str, Any]:
        return {}


def apply() -> None:
    """Puts the stand-ins in place, for the life of the process."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    tensor_parallel_random._CUDA_RNG_STATE_TRACKER = NoForkTracker()
    tensor_parallel_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True

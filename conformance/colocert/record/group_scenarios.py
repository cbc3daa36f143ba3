"""The scenarios of the group profile, as data: which rank goes wrong how, in which call, and what comes next.

Knows which situations matter to a group of ranks. Does not know how a step is taken (`group`) or which rule looks at
it. Rank 1 is the one that fails, unless the point is that several do.
"""

from __future__ import annotations

from typing import Any

from colocert.record.scenarios import Scenario

HAND_OFFS = ("train", "clear_memory", "offload_grad_buffer", "offload", "update_weights", "onload", "train")
LAST_RANK = 3


def _scenario(name: str, *steps: str, ranks: int = 2, lora: bool = True, needs: str = "") -> Scenario:
    kind = "lora" if lora else "full"
    config: dict[str, Any] = {"lora": lora, "ranks": ranks}
    wanted = "; ".join(n for n in ("lora" if lora else "", needs) if n)
    return Scenario(f"group-{kind}-{ranks}-{name}", config, steps, wanted, "group", golden=False)


def _raising(way: str) -> tuple[str, ...]:
    """Rank 1 fails once in every call of a cycle; each time the next phase follows, or the same again."""
    return (
        *(f"plan 1 {m} {way}" for m in ("train", "sleep", "wake_up", "update_weights", "offload_grad_buffer")),
        "train",
        "train",
        "offload_grad_buffer",
        "update_weights",
        "offload",
        "update_weights",
        "onload",
        "train",
    )


GROUP_SCENARIOS: tuple[Scenario, ...] = (
    _scenario("cycle", *HAND_OFFS),
    _scenario("cycle", *HAND_OFFS, ranks=4),
    _scenario("raises-before", *_raising("before")),
    _scenario("raises-after", *_raising("after")),
    _scenario(
        "offload-fails",
        "plan 1 sleep before",
        "plan 1 wake_up before",
        "train",
        "offload",
        "update_weights",
        "onload",
        "train",
        "offload",
        "onload",
    ),
    _scenario("both-raise", "plan 0 train before", "plan 1 train after", "train", "train", "offload"),
    _scenario(
        "three-raise",
        "plan 0 sleep after",
        "plan 2 sleep before",
        f"plan {LAST_RANK} sleep before",
        "train",
        "offload",
        "update_weights",
        "onload",
        ranks=4,
    ),
    _scenario(
        "slow",
        *(f"plan {LAST_RANK} {m} slow" for m in ("train", "sleep", "wake_up")),
        *HAND_OFFS,
        ranks=4,
    ),
    _scenario("slow-and-raises", "plan 0 sleep before", "plan 1 sleep slow", "train", "offload", "offload", "onload"),
    _scenario("hangs", "plan 1 sleep hang", "train", "offload", "offload"),
    _scenario("killed", "plan 1 train killed", "train", "offload", "onload"),
    _scenario(
        "killed-and-raises",
        f"plan {LAST_RANK} sleep killed",
        "plan 1 sleep before",
        "train",
        "offload",
        "update_weights",
        ranks=4,
    ),
    _scenario("killed-closed", "plan 1 sleep killed-after", "train", "offload"),
    _scenario(
        "killed-replaced",
        "plan 1 train killed",
        "train",
        "replace 1",
        "train",
        "offload",
        "update_weights",
        "onload",
        "train",
        needs="replacement",
    ),
    _scenario(
        "killed-asleep-replaced",
        "plan 1 sleep killed",
        "offload_grad_buffer",
        "offload",
        "replace 1",
        "update_weights",
        "onload",
        "train",
        needs="replacement",
    ),
    _scenario(
        "killed-grads-out-replaced",
        f"plan {LAST_RANK} offload_grad_buffer killed-after",
        "train",
        "offload_grad_buffer",
        f"replace {LAST_RANK}",
        "offload",
        "update_weights",
        "onload",
        "train",
        ranks=4,
        needs="replacement",
    ),
    _scenario(
        "hangs-replaced",
        "plan 1 wake_up hang",
        "offload",
        "onload",
        "replace 1",
        "train",
        "offload",
        needs="replacement",
    ),
    _scenario(
        "replaced",
        "train",
        "offload_grad_buffer",
        "replace 1",
        "offload",
        "replace 0",
        "update_weights",
        "onload",
        "train",
        needs="replacement",
    ),
    _scenario("cycle", *(c for c in HAND_OFFS if c != "offload_grad_buffer"), lora=False),
    _scenario(
        "offload-fails",
        "plan 1 sleep before",
        "plan 0 wake_up before",
        "train",
        "offload",
        "update_weights",
        "onload",
        "train",
        lora=False,
    ),
    _scenario(
        "killed-replaced",
        "plan 1 sleep killed",
        "train",
        "offload",
        "replace 1",
        "update_weights",
        "onload",
        "train",
        lora=False,
        needs="replacement",
    ),
)

"""The scenarios of the frozen-offload profile, as data: which module and folder, and what happens in which order.

Knows which situations matter. Does not know how a step is taken (`frozen_offload`) or which rule looks at it.
"""

from __future__ import annotations

from typing import Any

from colocert.record.scenarios import Scenario

CYCLE = ("offload", "backload")
AGAIN = ("offload", "offload", "backload", "backload", "train 7", *CYCLE)
FILED = "lora; file_backed_frozen"


def _scenario(name: str, *steps: str, needs: str = FILED, lora: bool = True, **config: Any) -> Scenario:
    return Scenario(f"frozen-{name}", {"lora": lora, **config}, steps, needs, "frozen-offload")


FROZEN_SCENARIOS: tuple[Scenario, ...] = (
    _scenario("cycle", "start", *CYCLE, "train 5", *CYCLE, "end"),
    _scenario("three-cycles", "start", *AGAIN, *CYCLE, "train 8", *CYCLE, "end"),
    _scenario(
        "another-checkpoint", "start values=2", *CYCLE, "offload", "keep", "end", "plant", "start", *AGAIN, "end"
    ),
    _scenario("another-rank", "start rank=1 values=3", "offload", "keep", "end", "plant", "start", *AGAIN, "end"),
    _scenario("altered-files", "start", "offload", "keep", "end", "plant", "alter", "start", *AGAIN, "end"),
    _scenario(
        "two-ranks",
        "start rank=0 values=1",
        "start rank=1 values=2",
        "0: offload",
        "1: offload",
        "0: backload",
        "1: backload",
        "all offload",
        "all backload",
        "1: offload",
        "0: offload",
        "0: end",
        "1: backload",
        "1: end",
        ranks=2,
    ),
    _scenario("disk-full", f"start disk=full:{2 << 20}", *CYCLE, *CYCLE, "end", size="medium"),
    _scenario("file-size-limit", f"start disk=limit:{1 << 20}", *CYCLE, *CYCLE, "end", size="medium"),
    _scenario("read-only-folder", "start disk=read-only", *CYCLE, *CYCLE, "end"),
    _scenario("killed-writing", "start", "kill offload", "start", *AGAIN, "end", size="large"),
    _scenario("killed-offloaded", "start values=2", "offload", "kill", "start", *AGAIN, "end"),
    _scenario(
        "foreign-files", "foreign", "start values=2", "offload", "kill", "start", *CYCLE, *CYCLE, "end", "start", *CYCLE
    ),
    _scenario("left-behind", "start", *CYCLE, "offload", "end", "alter", "start", *CYCLE, "end"),
    _scenario("base-loaded", "start", *CYCLE, "load 2", *AGAIN, "load 3", *CYCLE, "end"),
    _scenario("base-replaced", "start", *CYCLE, "swap 2", *AGAIN, "swap 3", *CYCLE, "end"),
    _scenario("few-descriptors", "start files=few", *CYCLE, "offload", "end", size="many"),
    _scenario("large", "start", *CYCLE, *CYCLE, "end", size="large"),
    _scenario("host-memory", "start", *AGAIN, "load 2", *AGAIN, "end", needs="lora", file_backed=False),
    _scenario("host-memory-large", "start", *CYCLE, *CYCLE, "end", needs="lora", file_backed=False, size="large"),
    _scenario("full-cycle", "start", *CYCLE, "train 2", *AGAIN, "end", needs="full_parameter", lora=False),
    _scenario(
        "full-another-checkpoint",
        *("start values=2", *CYCLE, "offload", "keep", "end", "plant", "start", *AGAIN, "end"),
        needs="full_parameter",
        lora=False,
    ),
    _scenario(
        "full-host-memory",
        "start",
        *CYCLE,
        "train 2",
        *AGAIN,
        "end",
        needs="full_parameter",
        lora=False,
        file_backed=False,
    ),
)

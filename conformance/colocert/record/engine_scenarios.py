"""The scenarios of the engine profile, as data: what is released, sent and asked for, and what is under way meanwhile.

Knows which situations matter to an engine. Does not know how a step is taken (`engine`) or which rule looks at it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colocert.record.scenarios import Scenario

ALL = "kv_cache,cuda_graph,weights"
TWO = ("adapter a 1", "ask a p")
"""An adapter that has answered."""


def _scenario(name: str, *steps: str, lora: bool = True, needs: str = "", **more: Any) -> Scenario:
    kind = "lora" if lora else "full"
    config: Mapping[str, Any] = {"lora": lora, **more}
    wanted = "; ".join(n for n in ("lora" if lora else "", needs) if n)
    return Scenario(f"engine-{kind}-{name}", config, steps, wanted, "engine")


def _both(lora: bool) -> tuple[Scenario, ...]:
    """The situations that exist with LoRA and without. The requests are of the adapter, or of the base."""
    who = "a" if lora else "-"
    first = TWO if lora else ("ask - p",)

    def scenario(name: str, *steps: str, needs: str = "", **more: Any) -> Scenario:
        return _scenario(name, *first, *steps, lora=lora, needs=needs, **more)

    weights, kv, graph = (f"engine_releases∋{tag}" for tag in ("weights", "kv_cache", "cuda_graph"))
    return (
        scenario("cycle", f"release {ALL}", f"ask {who} p", f"resume {ALL}", f"ask {who} p"),
        scenario(
            "by-tag",
            *("release kv_cache", f"ask {who} q", "release weights", f"ask {who} q", "release cuda_graph"),
            *("resume weights", f"ask {who} q", "resume kv_cache", f"ask {who} q", "resume cuda_graph"),
            f"ask {who} q",
        ),
        scenario(
            "again",
            *("resume weights", "resume kv_cache", f"ask {who} q", "release weights", "release weights"),
            *(f"release {ALL}", f"ask {who} q", "resume weights", "resume weights", f"resume {ALL}"),
            *("resume kv_cache", "resume cuda_graph", f"ask {who} q"),
        ),
        scenario("refused-memory", "fault saver.pause refused", f"release {ALL}", f"release {ALL}", f"resume {ALL}"),
        scenario(
            "no-mirror",
            *("release weights", "resume weights", f"ask {who} q", "base 1", f"ask {who} q"),
            needs=weights,
            engine_mirror=False,
        ),
        scenario(
            "no-mirror-held",
            *("release weights", f"start ask {who} q", "wait 2", "resume weights", "wait 2", "base 1", "join"),
            f"ask {who} q",
            needs=weights,
            engine_mirror=False,
        ),
        scenario("base", "base 1", f"ask {who} q", f"start ask {who} r", "wait 1.5", "base 2", "join", f"ask {who} r"),
        *(
            scenario(f"base-fails-{name}", f"fault {fault}", "base 1", f"ask {who} q", "base 2", f"ask {who} q")
            for name, fault in (
                ("at-once", "wire before"),
                ("half-way", "engine.write after"),
                ("at-the-end", "engine.write after 2"),
            )
        ),
        scenario(
            "in-flight",
            f"start ask {who} q",
            "wait 1.5",
            f"release {ALL}",
            "join",
            f"resume {ALL}",
            "ask " + who + " q",
        ),
        scenario("held", f"release {ALL}", f"start ask {who} q", "wait 2", f"resume {ALL}", "join"),
        scenario("never-resumed", f"release {ALL}", f"ask {who} q"),
        scenario("fails-in-a-token", "fault engine.forward after 2", f"ask {who} q", f"release {ALL}", f"resume {ALL}"),
        scenario("flush", "flush", "release kv_cache", "resume kv_cache", f"ask {who} p", needs=kv),
        scenario("late-flush", "release kv_cache", "flush", "resume kv_cache", f"ask {who} p", needs=kv),
        scenario(
            "late-flush-of-all", f"release {ALL}", "resume weights", "flush", f"resume {ALL}", f"ask {who} p", needs=kv
        ),
        scenario(
            "graph-alone",
            "release kv_cache",
            "resume kv_cache",
            f"ask {who} q",
            "release cuda_graph",
            f"ask {who} q",
            needs=graph,
        ),
    )


ENGINE_SCENARIOS: tuple[Scenario, ...] = (
    *_both(True),
    *_both(False),
    _scenario("replace", *TWO, "adapter a 2", "ask a p", "adapter a 3 file", "ask a p", "ask a p"),
    _scenario("replace-in-flight", *TWO, "start ask a q", "wait 1.5", "adapter a 2", "join", "ask a q"),
    _scenario("asked-in-between", *TWO, "start adapter a 2", "wait 0.5", "start ask a q", "wait 1", "ask a r", "join"),
    _scenario("asked-at-the-end", *TWO, "start adapter a 2", "wait 1.5", "start ask a q", "wait 1", "ask a r", "join"),
    _scenario("adapter-fails", *TWO, "fault wire before 2", "adapter a 2", "ask a p", "adapter a 3", "ask a p"),
    _scenario("unknown", "ask a p", *TWO, "ask b p", "ask a q"),
    _scenario("without-adapter", "ask - p", *TWO, "ask - p", "ask - q"),
    _scenario(
        "two", *TWO, "adapter b 1", "ask b p", "ask a p", "adapter a 2", "ask b p", "ask a p", needs="multi_lora"
    ),
    _scenario(
        "two-at-once",
        *("adapter a 1", "adapter b 1 file", "start ask a p", "wait 0.5", "start ask b p", "wait 1", "adapter b 2"),
        *("join", "ask a p", "ask b p"),
        needs="multi_lora",
    ),
    _scenario("kept-through-a-cycle", *TWO, f"release {ALL}", f"resume {ALL}", "ask a p", "adapter a 2", "ask a p"),
)

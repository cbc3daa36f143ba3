"""A row's child processes: which function of a scenario runs, and how it ended in one word.

Over the kit's launcher, which builds the environment, proves the hook live and takes a verdict written as the child's
last act; return code and verdict must agree. A scenario is a function of `gpu_tests.scenarios` that takes the port, the
seeded fault (None: none) and JSON arguments, and returns JSON.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from colocert.device import Child, HookNotLive, Machine, Outcome, Stage, start
from gpu_tests.harness.port import Port

ROOT = Path(__file__).parents[2]
DEADLINE = 60.0


def inside(stage: Stage, scenario: str, fault: str | None, arguments: dict[str, Any]) -> Any:
    """What runs in the child."""
    module, _, name = scenario.partition(":")
    return getattr(importlib.import_module(module), name)(Port(stage), fault, **arguments)


def begin(
    scenario: Callable[..., Any],
    /,
    *,
    machine: Machine,
    fault: str | None,
    env: Mapping[str, str] | None = None,
    deadline: float = DEADLINE,
    **arguments: Any,
) -> Child:
    """Starts a scenario's function in a child of its own."""
    extra = dict(env or {})
    path = [extra.get("PYTHONPATH", ""), str(ROOT), machine.environment()["PYTHONPATH"]]
    return start(
        "gpu_tests.harness.child:inside",
        machine=machine,
        env={**extra, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        deadline=deadline,
        scenario=f"{scenario.__module__}:{scenario.__name__}",
        fault=fault,
        arguments=arguments,
    )


def ended(child: Child) -> tuple[str, Outcome | None]:
    """How a child ended, in a word, and all that it left; no outcome where the hook was not live.

    `ok`, `failed` (it raised), `hook abort` (rc 1, no verdict, no traceback: the saver ended it), `oom in resume` (the
    same, or SIGABRT from static destructors, and stderr names a resume that ran out of memory), a signal's name,
    `hang`, `vanished`, or the class of the error that says why the hook was not live.
    """
    try:
        outcome = child.wait()
    except HookNotLive as error:
        return type(error).__name__, None
    stopped = outcome.kind == "hook-abort" or outcome.signal == "SIGABRT"
    said = outcome.stderr.lower().replace("_", " ")
    if stopped and "func=resume" in outcome.stderr and "out of memory" in said:
        return "oom in resume", outcome
    if outcome.kind == "signal":
        return outcome.signal, outcome
    return outcome.kind.replace("-", " "), outcome


class Unmeasured(dict[str, Any]):
    """What a child measured that did not end well: None, whatever is asked."""

    def __missing__(self, name: str) -> None:
        return None


def measured(child: Child) -> tuple[str, dict[str, Any]]:
    """How a child ended and what it measured, for checks that say both."""
    how, outcome = ended(child)
    return how, outcome.value if outcome and how == "ok" else Unmeasured()


def last_words(child: Child) -> str:
    """Why a child ended as it did: its traceback and last lines on stderr, or what is said of its hook."""
    try:
        outcome = child.wait()
    except HookNotLive as error:
        return str(error)
    return "\n".join(filter(None, (outcome.traceback.strip(), last_lines(outcome))))


def last_lines(outcome: Outcome | None, count: int = 3) -> str:
    """The last lines on stderr: the only words of a child that the saver ended."""
    return "\n".join(outcome.stderr.strip().splitlines()[-count:]) if outcome else ""

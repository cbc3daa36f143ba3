"""What a runner child is asked, and what it answers: JSON objects, a line each.

Knows the fields. Does not know how a job is run (`child`) or how long it may take (`process`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from colocert.record.manifest import Problem


class Job(msgspec.Struct, frozen=True):
    """What the parent asks for: `load`, `scenario`, `explore`, `controls` or `selftest`. Paths are absolute."""

    kind: str
    impl: str = ""
    rules: tuple[str, ...] = ()
    id: str = ""
    folder: str = ""
    trace: str = ""
    depth: int = 0
    fault_depth: int = 0
    profiles: tuple[str, ...] = ()


class Answer(msgspec.Struct, frozen=True):
    """What the child answers. `progress` answers come before the final one of an exploration."""

    ok: bool = True
    progress: bool = False
    detail: str = ""
    problem: Problem | None = None
    body: dict[str, Any] = {}

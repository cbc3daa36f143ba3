"""What tests of the real reference share: what they need installed, and child processes under the saver."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
from pathlib import Path
from typing import Any

import pytest

import colocert
import colocert_reference
from colocert.device import Child, Machine, start

SOURCES = os.pathsep.join(str(Path(p.__file__ or "").parents[1]) for p in (colocert, colocert_reference))


def needs(*packages: str) -> list[pytest.MarkDecorator]:
    """The marks of tests that take long and need these packages: skipped, by name, where one is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name.partition(".")[0]) is None]
    reason = f"needs the extra `reference` (got no {', '.join(missing)})"
    return [pytest.mark.torch, pytest.mark.slow, pytest.mark.skipif(bool(missing), reason=reason)]


def child(scenarios: Path, body: str, machine: Machine | None = None, **arguments: Any) -> Child:
    """A function of a file of scenarios, in a process of its own."""
    env = {"PYTHONPATH": SOURCES, "PYTHONWARNINGS": "ignore"}
    return start(f"{scenarios}:{body}", machine=machine or Machine(), env=env, deadline=240, **arguments)


def free_port() -> int:
    """A port of this machine where ranks can meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ranks(scenarios: Path, body: str, count: int, /, **arguments: Any) -> list[Any]:
    """What each of so many ranks returned; none leaves before all are done."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(child(scenarios, body, rank=rank, port=port, **arguments)) for rank in range(count)
        ]
        for one in started:
            assert one.listen() == "done"
        for one in started:
            one.tell("leave")
        return [one.wait().expect("ok") for one in started]

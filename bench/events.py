"""Recording an event beside `unittest.mock`: nanoseconds and bytes a call, and the write to a crash-safe file.

A mock is what frameworks' own tests record calls with. All loops alternate in one process; medians of the rounds.
"""

from __future__ import annotations

import os
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from _rows import LIMIT, Bench, alternate

from colocert.rig.contract import Config
from colocert.rig.rank import RankRig
from colocert.trace import TraceWriter
from colocert.trace.events import Header, SaverPause

CALLS, ROUNDS = 20_000, 7


def through_a_mock(calls: int) -> list[Any]:
    recorder = Mock()
    for _ in range(calls):
        recorder.pause("grad_buffer")
    return [recorder]


def through_the_rig(calls: int) -> list[Any]:
    kept: list[Any] = []
    rig = RankRig(0, Config(lora=True), kept.append)
    for _ in range(calls):
        rig.emit(SaverPause("grad_buffer", "grads", 4, False, 1))
    return [rig, kept]


def into_a_file(calls: int) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="colocert-bench-") as folder:
        write = TraceWriter(Path(folder) / "t.jsonl", Header(schema=1, scenario="bench", profile="lifecycle"))
        event = SaverPause("grad_buffer", "grads", 4, False, 1)
        for _ in range(calls):
            write(event)
        write.close()
    return []


def bare_write(calls: int) -> list[Any]:
    with tempfile.TemporaryFile() as stream:
        fd = stream.fileno()
        for _ in range(calls):
            os.write(fd, b"x" * 110)
    return []


WAYS: dict[str, Callable[[int], list[Any]]] = {
    "unittest.mock.Mock": through_a_mock,
    "ours, in memory": through_the_rig,
    "ours, crash-safe file": into_a_file,
    "os.write alone": bare_write,
}


def nanoseconds(way: Callable[[int], list[Any]]) -> float:
    start = time.perf_counter()
    way(CALLS)
    return (time.perf_counter() - start) / CALLS * 1e9


def kept_bytes(way: Callable[[int], list[Any]]) -> float:
    tracemalloc.start()
    held = way(CALLS)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del held
    return size / CALLS


def main() -> None:
    bench = Bench.started(__file__, __doc__)
    found = alternate({name: partial(nanoseconds, way) for name, way in WAYS.items()}, bench.rounds(ROUNDS))
    mock, memory, file, write = (found[name] for name in WAYS)
    bench.beside("an event in the doubles", "ns", memory, "a call through unittest.mock.Mock", mock)
    bench.alone("an event in the doubles", "ns", memory, at_most=300)
    size = {name: kept_bytes(way) for name, way in WAYS.items()}
    bench.alone("an event in the doubles", "bytes", [size["ours, in memory"]], at_most=130)
    bench.alone("a call through unittest.mock.Mock", "bytes", [size["unittest.mock.Mock"]])
    bench.beside("an event into a trace file", "ns", file, "os.write alone", write, kind=LIMIT)
    bench.alone("an event into a trace file", "ns", file, at_most=2000)
    bench.finish()


if __name__ == "__main__":
    main()

"""Judging a trace beside reading its lines: `json`, `msgspec` typed and untyped, ours read, ours judged.

Traces of 1e5 and 1e6 events of the reference driver's own iterations, in files. Each reader goes
through the same file in the same round, in a process of its own, so that its peak memory is its own; a short trace
goes first, so that no reader pays for pages that a fork shares until they are touched. Figures are millions of events a
second of CPU time, and MiB of memory above an idle process that has imported the kit.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from _rows import LIMIT, PEER, Bench

from colocert.judge_trace import judge_events
from colocert.record.registry import BY_ID, run
from colocert.rules.catalogue import catalogue
from colocert.trace import AnyEvent, TraceWriter, read_trace
from colocert.trace.events import Header
from colocert_reference.colocert_impl import CLAIMS, implementation

ROUNDS, ROUNDS_SHORT = 3, 7
SHORT = 10_000
RULES = {p: [r for r in catalogue().values() if r.profile == p] for p in ("lifecycle", "handoff")}


def write(path: Path, wanted: int) -> int:
    """A trace of the reference's hand-offs with at least so many events; returns how many it has."""
    writer = TraceWriter(path, Header(schema=1, scenario="bench", profile="handoff"))
    written = 1

    def keep(event: AnyEvent) -> None:
        nonlocal written
        writer(event)
        written += 1

    per_iteration = 132
    scenario = msgspec.structs.replace(BY_ID["gpu-lora-three"], steps=(f"run {wanted // per_iteration}", "close"))
    run(implementation, CLAIMS, scenario, keep)
    writer.close()
    return written


def lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        yield from stream


def count(items: Iterator[Any]) -> None:
    for _ in items:
        pass


def orjson(path: Path) -> None:
    count(map(importlib.import_module("orjson").loads, lines(path)))


READERS: dict[str, Callable[[Path], None]] = {
    "json": lambda path: count(json.loads(line) for line in lines(path)),
    "msgspec, untyped": lambda path: count(map(msgspec.json.Decoder().decode, lines(path))),
    "msgspec, typed": lambda path: count(map(msgspec.json.Decoder(AnyEvent).decode, lines(path))),
    **({"orjson": orjson} if importlib.util.find_spec("orjson") else {}),
    "ours, read": lambda path: count(read_trace(path)),
    "ours, lifecycle judged": lambda path: judged(path, "lifecycle"),
    "ours, hand-off judged": lambda path: judged(path, "handoff"),
}


def judged(path: Path, profile: str) -> None:
    result = judge_events(read_trace(path), RULES[profile])
    assert profile == "lifecycle" or result.findings == (), "the reference driver conforms; the trainers are doubles"
    assert sum(sum(counts.values()) for counts in result.exercised.values()) > 1000


def measured(name: str, path: Path, short: Path, answer: Any) -> None:
    """In a process of its own: seconds of CPU, and KiB that its peak is above its start."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    READERS[name](short)
    start = time.process_time()
    READERS[name](path)
    answer.put((time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))


def once(name: str, path: Path, short: Path) -> tuple[float, int]:
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    process = context.Process(target=measured, args=(name, path, short, answer))
    process.start()
    found: tuple[float, int] = answer.get()
    process.join()
    return found


def nothing(event: Any) -> None:
    """The least that a fold can do."""


def calling(path: Path, calls: int) -> None:
    """What Python asks for a fold to be called at all: so many calls an event, of nothing."""
    folds = (nothing,) * calls
    for event in read_trace(path):
        for fold in folds:
            fold(event)


CALLS = 7
"""Folds that look at an event of a lifecycle, on average."""
READERS[f"read, and {CALLS} calls of nothing"] = partial(calling, calls=CALLS)

TARGETS = {"ours, read": 1.2, "ours, lifecycle judged": 0.8, "ours, hand-off judged": 0.8}


def main() -> None:
    bench = Bench.started(__file__, __doc__)
    with tempfile.TemporaryDirectory(prefix="colocert-bench-") as folder:
        short = Path(folder) / "short.jsonl"
        write(short, SHORT)
        for wanted in (100_000,) if bench.quick else (100_000, 1_000_000):
            path = Path(folder) / f"{wanted}.jsonl"
            events = write(path, wanted)
            rounds = [
                {name: once(name, path, short) for name in READERS}
                for _ in range(bench.rounds(ROUNDS if wanted > 100_000 else ROUNDS_SHORT))
            ]
            path.unlink()
            speed = {name: [events / r[name][0] / 1e6 for r in rounds] for name in READERS}
            for name, at_least in TARGETS.items():
                what = f"{name}, {wanted:.0e} events".replace("e+0", "e")
                bench.alone(what, "M events/s", speed[name], at_least=at_least)
                for other in READERS:
                    if other not in TARGETS:
                        kind = LIMIT if other.startswith("read") else PEER
                        bench.beside(what, "M events/s", speed[name], other, speed[other], kind=kind)
                bench.alone(f"{what}: memory", "MiB", [max(r[name][1] for r in rounds) / 1024], at_most=64)
    bench.finish()


if __name__ == "__main__":
    main()

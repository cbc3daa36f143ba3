"""Judging a trace beside reading its lines: `json`, `msgspec` typed and untyped, ours read, ours judged.

Traces of 1e5 and 1e6 events (`--large`: 1e7 too) of the reference driver's own iterations, in files. Each reader goes
through the same file in the same round, in a process of its own, so that its peak memory is its own. Figures are
millions of events a second of CPU time, and MiB of memory above an idle process that has imported the kit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from colocert.judge import judge_events
from colocert.record.registry import BY_ID, run
from colocert.rules.catalogue import catalogue
from colocert.trace import AnyEvent, TraceWriter, read_trace
from colocert.trace.events import Header
from colocert_reference.colocert_impl import CLAIMS, implementation

ROUNDS = 3
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


READERS: dict[str, Callable[[Path], None]] = {
    "json": lambda path: count(json.loads(line) for line in lines(path)),
    "msgspec, untyped": lambda path: count(map(msgspec.json.Decoder().decode, lines(path))),
    "msgspec, typed": lambda path: count(map(msgspec.json.Decoder(AnyEvent).decode, lines(path))),
    "ours, read": lambda path: count(read_trace(path)),
    "ours, lifecycle judged": lambda path: judged(path, "lifecycle"),
    "ours, hand-off judged": lambda path: judged(path, "handoff"),
}


def judged(path: Path, profile: str) -> None:
    result = judge_events(read_trace(path), RULES[profile])
    assert profile == "lifecycle" or result.findings == (), "the reference driver conforms; the trainers are doubles"
    assert sum(sum(counts.values()) for counts in result.exercised.values()) > 1000


def measured(name: str, path: Path, answer: Any) -> None:
    """In a process of its own: seconds of CPU, and KiB that its peak is above its start."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    READERS[name](path)
    answer.put((time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))


def once(name: str, path: Path) -> tuple[float, int]:
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    process = context.Process(target=measured, args=(name, path, answer))
    process.start()
    found: tuple[float, int] = answer.get()
    process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="a trace of 1e7 events too: 1.5 GB, some minutes")
    sizes = (100_000, 1_000_000, *([10_000_000] if parser.parse_args().large else []))
    print(f"{'events':>9}  {'reader':<24}{'M events/s':>11}{'of typed':>10}{'MiB':>7}")
    with tempfile.TemporaryDirectory(prefix="colocert-bench-") as folder:
        for wanted in sizes:
            path = Path(folder) / f"{wanted}.jsonl"
            events = write(path, wanted)
            rounds = [{name: once(name, path) for name in READERS} for _ in range(ROUNDS)]
            path.unlink()
            seconds = {name: statistics.median(r[name][0] for r in rounds) for name in READERS}
            for name in READERS:
                memory = max(r[name][1] for r in rounds) / 1024
                ratio = seconds["msgspec, typed"] / seconds[name]
                print(f"{events:>9}  {name:<24}{events / seconds[name] / 1e6:>11.2f}{ratio:>10.2f}{memory:>7.0f}")


if __name__ == "__main__":
    main()

"""Judging recordings of a thousand ranks, one file a process, with one fault planted: speed, memory and linearity.

Runs of 1e5, 1e6 and 1e7 events, some 1.2 GB (`--quick`: 1e5 alone). Each is read, merged and judged in a process of its
own, so that its peak memory is its own: the whole process's, with interpreter and kit. The fault has to be found, and
found alone.
"""

from __future__ import annotations

import multiprocessing
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from _rows import LIMIT, Bench

from colocert_fixtures.synthetic import EVENTS_PER_ITERATION, write_run

EXPECTED = {
    ("LC-01", "default-kept"),
    ("HO-01", "caches-before-trainer"),
    ("HO-06", "before-release"),
    ("HO-11", "trainer-resident"),
}
"""What follows from one trainer that stays where it is when it was put to sleep."""


def read(paths: list[Path], answer: Any) -> None:
    from colocert.trace.merge import merged, open_all

    start = time.process_time()
    events = sum(1 for _ in merged(open_all(paths)))
    answer.put((time.process_time() - start, events, _peak(), EXPECTED))


def judged(paths: list[Path], answer: Any) -> None:
    from colocert.judge_stream import judge_files

    start = time.process_time()
    result = judge_files(paths)
    answer.put((time.process_time() - start, result.events, _peak(), set(result.counts)))


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def once(work: Any, paths: list[Path]) -> tuple[float, int, float]:
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=work, args=(paths, answer))
    process.start()
    seconds, events, peak, found = answer.get()
    process.join()
    assert found == EXPECTED, f"one fault has these findings: {sorted(EXPECTED)} (got {sorted(found)})"
    return seconds, events, peak


RANKS = 1000
SIZES = (100_000, 1_000_000, 10_000_000)


def main() -> None:
    bench = Bench.started(__file__, __doc__)
    each: dict[int, float] = {}
    for wanted in SIZES[:1] if bench.quick else SIZES:
        folder = Path(tempfile.mkdtemp(prefix="colocert-bench-"))
        try:
            iterations = max(1, wanted // (RANKS * EVENTS_PER_ITERATION))
            paths = write_run(folder, RANKS, iterations, fault=(617, iterations // 2))
            read_s, events, _ = once(read, paths)
            seconds, events, peak = once(judged, paths)
        finally:
            shutil.rmtree(folder)
        what = f"{wanted:.0e} events in {len(paths)} files".replace("e+0", "e")
        each[wanted] = seconds / events
        reading, speed = events / read_s / 1e6, events / seconds / 1e6
        bench.beside(f"{what}, judged", "M events/s", [speed], "read and merged", [reading], kind=LIMIT)
        bench.alone(f"{what}: CPU seconds", "s", [seconds])
        bench.alone(f"{what}: peak of the process", "MiB", [peak], at_most=500)
    if len(each) > 1:
        last, before = max(each), sorted(each)[-2]
        bench.beside(
            "an event of the largest run",
            "us",
            [each[last]],
            "of the one before",
            [each[before]],
            kind=LIMIT,
            scale=1e6,
            at_most=1.25,
        )
    bench.finish()


if __name__ == "__main__":
    main()

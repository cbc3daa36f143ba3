"""Judging recordings of a thousand ranks, one file a process, with one fault planted: speed, memory and linearity.

Runs of 1e5 and 1e6 events (`--large`: 1e7 too, some 1.2 GB). Each is read, merged and judged in a process of its own,
so that its peak memory is its own: the whole process's, with interpreter and kit. The fault has to be found, and found
alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="1e7 events too")
    parser.add_argument("--ranks", type=int, default=1000)
    arguments = parser.parse_args()
    sizes = (100_000, 1_000_000, *([10_000_000] if arguments.large else []))
    print(f"{'events':>9}{'files':>7}  {'work':<18}{'CPU s':>8}{'M events/s':>12}{'ns/event':>10}{'peak MiB':>10}")
    for wanted in sizes:
        folder = Path(tempfile.mkdtemp(prefix="colocert-bench-"))
        try:
            iterations = max(1, wanted // (arguments.ranks * EVENTS_PER_ITERATION))
            paths = write_run(folder, arguments.ranks, iterations, fault=(617 % arguments.ranks, iterations // 2))
            for name, work in (("read and merged", read), ("and judged", judged)):
                seconds, events, peak = once(work, paths)
                print(
                    f"{events:>9}{len(paths):>7}  {name:<18}{seconds:>8.1f}{events / seconds / 1e6:>12.2f}"
                    f"{seconds / events * 1e9:>10.0f}{peak:>10.0f}"
                )
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()

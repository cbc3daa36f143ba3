"""Recording a real run: nanoseconds that an event adds to a call, beside `unittest.mock`, a write and the call itself.

The wrapped saver does nothing, so what is measured is the recording. All loops alternate in one process; medians of the
rounds. A wrapped `pause` and `resume` write two events each: the call, and that the tag moved.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from _rows import LIMIT, Bench, alternate

import colocert
from colocert.live.log import MappedLog
from colocert.trace.events import SaverPause

PAIRS, ROUNDS = 20_000, 7
LINE = b'{"ev":"saver.pause","tag":"grad_buffer","alloc":"grad_buffer","saver_call":1,"seq":7,"at":4992426724614}'


class Idle:
    """A saver that does nothing."""

    def region(self, tag: str = "default", enable_cpu_backup: bool = False) -> Any:
        return nullcontext()

    def pause(self, tag: str | None = None) -> None:
        return None

    def resume(self, tag: str | None = None) -> None:
        return None


def moves(saver: Any) -> None:
    for _ in range(PAIRS):
        saver.pause("grad_buffer")
        saver.resume("grad_buffer")


def timed(work: Callable[[], None], per: int) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) / per * 1e9


def unwrapped(folder: Path) -> float:
    return timed(lambda: moves(Idle()), 2 * PAIRS)


def through_a_mock(folder: Path) -> float:
    return timed(lambda: moves(Mock()), 2 * PAIRS)


def recorded(folder: Path) -> float:
    """Nanoseconds an event: a call writes two, and its own cost is not taken off."""
    with colocert.record(folder, rank=0, from_start=True) as recording:
        saver = recording.saver(Idle(), regions={"grad_buffer": False})
        found = timed(lambda: moves(saver), 4 * PAIRS)
    assert not recording.problem
    return found


def switched_off(folder: Path) -> float:
    with colocert.record(folder, rank=0) as recording:
        saver = recording.saver(Idle(), regions={"grad_buffer": False})
        recording.off()
        return timed(lambda: moves(saver), 2 * PAIRS)


def emitted(folder: Path) -> float:
    with colocert.record(folder, rank=0) as recording:

        def work() -> None:
            for _ in range(2 * PAIRS):
                recording.emit(SaverPause("grad_buffer", "grad_buffer", 0, False, 1))

        return timed(work, 2 * PAIRS)


def mapped(folder: Path) -> float:
    log = MappedLog(folder / "mapped.jsonl")

    def work() -> None:
        for _ in range(2 * PAIRS):
            log.append(LINE)

    found = timed(work, 2 * PAIRS)
    log.close()
    return found


def written(folder: Path) -> float:
    fd = os.open(folder / "written.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def work() -> None:
        for _ in range(2 * PAIRS):
            os.write(fd, LINE)

    found = timed(work, 2 * PAIRS)
    os.close(fd)
    return found


WAYS: dict[str, Callable[[Path], float]] = {
    "a call, not recorded": unwrapped,
    "a call, switched off": switched_off,
    "a call through a Mock": through_a_mock,
    "an event, recorded": recorded,
    "an event, without a wrapper": emitted,
    "a line, mapped": mapped,
    "a line, os.write": written,
}


def once(way: Callable[[Path], float]) -> float:
    with tempfile.TemporaryDirectory(prefix="colocert-bench-") as folder:
        return way(Path(folder))


def main() -> None:
    bench = Bench.started(__file__, __doc__)
    found = alternate({name: partial(once, way) for name, way in WAYS.items()}, bench.rounds(ROUNDS))
    event, mapped = found["an event, recorded"], found["a line, mapped"]
    bench.alone("an event of a real run, with its wrapper", "ns", event, at_most=2000)
    bench.beside(
        "an event of a real run, with its wrapper", "ns", event, "a call through a Mock", found["a call through a Mock"]
    )
    bench.beside(
        "an event of a real run, with its wrapper", "ns", event, "os.write of its line", found["a line, os.write"]
    )
    bench.beside(
        "an event of a real run, with its wrapper", "ns", event, "a store of its line into a map", mapped, kind=LIMIT
    )
    bench.alone("an event without a wrapper", "ns", found["an event, without a wrapper"])
    off = found["a call, switched off"]
    bench.beside(
        "a call with recording switched off", "ns", off, "the call alone", found["a call, not recorded"], kind=LIMIT
    )
    bench.finish()


if __name__ == "__main__":
    main()

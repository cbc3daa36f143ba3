"""Exploration beside a bare model: all sequences of four calls, with every single fault, in one process, alternating.

The bare model is the least that can be said of the lifecycle in Python: a tuple of flags and the four calls on it,
run from the start for each sequence and each fault, with one check of legality. It records nothing and judges no
rule. Both cover the same sequences, which is checked. Ours builds the reference over the doubles, records every event
and folds every rule over it.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator

from _rows import LIMIT, Bench

from colocert.record.explore import Explorer
from colocert.record.scenarios import LORA, Scenario
from colocert.rules.catalogue import catalogue
from colocert_reference.colocert_impl import implementation

CALLS = ("sleep", "wake_up", "train", "offload_grad_buffer")
ROUNDS = 5


class Fault(Exception):
    """The model's injected fault."""


class Model:
    """Two tags and three groups; `fuel` counts down to the point that fails, each point failing before and after."""

    __slots__ = ("fuel", "groups", "out")

    def __init__(self, fuel: int) -> None:
        self.out: set[str] = set()
        self.groups = {"world", "data", "control"}
        self.fuel = fuel

    def point(self) -> None:
        self.fuel -= 1
        if self.fuel == 0:
            raise Fault

    def release(self, tag: str) -> None:
        if tag not in self.out:
            self.point()
            self.out.add(tag)

    def resume(self, tag: str) -> None:
        if tag in self.out:
            self.point()
            self.out.discard(tag)

    def sleep(self) -> None:
        if len(self.out) < 2:
            self.point()
            self.point()
            for group in ("world", "data", "control"):
                if group in self.groups:
                    self.point()
                    self.groups.discard(group)
                    self.point()
            self.release("grad_buffer")
            self.release("default")

    def wake_up(self) -> None:
        self.resume("default")
        self.resume("grad_buffer")
        for group in ("world", "data", "control"):
            if group not in self.groups:
                self.point()
                self.groups.add(group)
                self.point()

    def train(self) -> None:
        self.wake_up()
        self.point()
        assert not self.out
        self.point()

    def offload_grad_buffer(self) -> None:
        self.release("grad_buffer")


def run(sequence: tuple[str, ...], fuel: int) -> int:
    """Runs one sequence with the fault at point number `fuel` (0: none); returns how many points it passed."""
    model = Model(fuel)
    for call in sequence:
        with contextlib.suppress(Fault):
            getattr(model, call)()
    return fuel - model.fuel


def bare(depth: int, faults: bool) -> int:
    """Every sequence to the depth, plainly and with a fault at each point that it passes; returns the runs."""
    runs = 0
    for sequence in sequences(depth):
        points = run(sequence, 0)
        runs += 1
        for fuel in range(1, points + 1) if faults else ():
            run(sequence, fuel)
            runs += 1
    return runs


def sequences(depth: int) -> Iterator[tuple[str, ...]]:
    for length in range(1, depth + 1):
        yield from itertools.product(CALLS, repeat=length)


def ours(depth: int, faults: bool) -> int:
    """The same sequences on the reference, judged; returns the sequences covered."""
    rules = list(catalogue().values())
    explorer = Explorer(implementation, implementation.claims, Scenario("bench", LORA, ()), rules, calls=CALLS)
    record = explorer.run(depth, depth if faults else 0)
    assert not explorer.discoveries
    return record.sequences + record.faulted


def timed(work: Callable[[], int]) -> tuple[float, int]:
    start = time.perf_counter()
    covered = work()
    return time.perf_counter() - start, covered


def measure(bench: Bench, depth: int, faults: bool, at_most: float | None) -> None:
    """One row: medians of alternating rounds, and the ratio."""
    rounds = range(bench.rounds(ROUNDS))
    pairs = [(timed(lambda: bare(depth, faults)), timed(lambda: ours(depth, faults))) for _ in rounds]
    assert pairs[0][0][1] == pairs[0][1][1], "both must cover the same sequences"
    what = f"depth {depth}, {'every single fault' if faults else 'no faults'}, {pairs[0][1][1]:,} sequences"
    theirs, mine = ([pair[i][0] for pair in pairs] for i in (0, 1))
    bench.beside(what, "ms", mine, "the bare model", theirs, kind=LIMIT, scale=1e3, at_most=at_most)


def main() -> None:
    bench = Bench.started(__file__, __doc__)
    for depth, faults, at_most in ((4, False, None), (6, False, None), (4, True, None), (6, True, 5)):
        if depth == 4 or not bench.quick:
            measure(bench, depth, faults, at_most)
    bench.finish()


if __name__ == "__main__":
    main()

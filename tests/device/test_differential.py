"""The strict saver answers as the real library does, and a double that does not is caught."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch_memory_saver")

from colocert.device.differential import Seen, Sequence, compare, explore_real
from colocert.rig.saver import Allocation, StrictSaver

Real = dict[Sequence, Seen]


def _silent(kind: type[StrictSaver]) -> Callable[[int], StrictSaver]:
    return lambda capacity: kind(lambda event: None, capacity=capacity)


@pytest.fixture(scope="module")
def real() -> Real:
    """Every sequence to depth 3."""
    return explore_real(depth=3)


def test_the_tree_visits_every_sequence_that_can_be(real: Real) -> None:
    assert len([sequence for sequence in real if len(sequence) == 1]) == 8  # no free, no touch: nothing is allocated
    assert len(real) == 640
    assert {seen.end for seen in real.values()} == {"", "exit", "SIGSEGV"}


def test_the_strict_saver_agrees_to_depth_3(real: Real) -> None:
    assert compare(_silent(StrictSaver), real) == []


@pytest.mark.slow
def test_the_strict_saver_agrees_to_depth_5() -> None:
    real = explore_real(depth=5)
    assert len(real) == 41_236
    differences = compare(_silent(StrictSaver), real)
    assert not differences, "\n".join(map(str, differences[:10]))


class ForgivesASecondPause(StrictSaver):
    """Takes a pause of what is paused for none, as many a wrapper does."""

    def pause(self, tag: str | None = None) -> None:
        if not any(allocation.paused for allocation in self._chosen(tag)):
            super().pause(tag)


class KeepsContentWithoutBackup(StrictSaver):
    """Gives memory without a backup back as it was."""

    def resume(self, tag: str | None = None) -> None:
        super().resume(tag)
        for allocation in self._chosen(tag):
            allocation.content = self._before.get(allocation.name, allocation.content)

    def pause(self, tag: str | None = None) -> None:
        self._before = {allocation.name: allocation.content for allocation in self._chosen(tag)}
        super().pause(tag)


class CountsRawBytes(StrictSaver):
    """Counts the bytes asked for and not whole granules."""

    def alloc(self, nbytes: int, *, name: str | None = None, kind: str | None = None) -> Allocation:
        allocation = super().alloc(nbytes, name=name, kind=kind)
        self.device_bytes -= allocation.size - nbytes
        allocation.size = nbytes
        return allocation


class LeaksTheHostCopy(StrictSaver):
    """Keeps host memory of a freed allocation."""

    def free(self, allocation: Allocation) -> None:
        host = self.host_bytes
        super().free(allocation)
        self.host_bytes = host


@pytest.mark.parametrize(
    ("double", "shortest", "said"),
    [
        (ForgivesASecondPause, ("alloc a", "pause a", "pause a"), "end: real 'exit', double ''"),
        (KeepsContentWithoutBackup, ("alloc b", "pause b", "resume b"), "contents: real (219,), double (1,)"),
        (CountsRawBytes, ("alloc a",), "own: real 2097152, double 6912"),
        (LeaksTheHostCopy, ("alloc a", "pause a", "free"), "host: real 0, double 6912"),
    ],
)
def test_a_wrong_double_is_caught_by_a_shortest_sequence(
    double: type[StrictSaver], shortest: Sequence, said: str, real: Real
) -> None:
    first = compare(_silent(double), real)[0]
    assert first.sequence == shortest
    assert str(first).startswith(f"after {', '.join(shortest)}:")
    assert said in str(first)

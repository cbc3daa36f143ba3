"""The reference on real memory: `python -m colocert_reference --peak-device gpu --device host --iterations 2`.

A trainer process and an engine process share one device; the reference driver takes them through the iterations. Prints
what both hold after each step, then the peaks. Exit codes: 0 all iterations ended, 1 the run failed, 2 wrong arguments,
3 the device or a package is not there. An error is one line on stderr.

Knows arguments and columns. Does not know the order of a hand-off, and imports neither torch nor the kit before the
arguments have been checked. On `cuda` it has not run yet.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from colocert_reference.real.pair import Pair, Sample

FAILED, WRONG_ARGUMENTS, NOT_THERE = 1, 2, 3
MIB = 1 << 20
NEEDED = ("torch", "megatron", "torch_memory_saver", "colocert")
COLUMNS = ("phase", "step", "trainer", "engine", "free", "trainer host", "engine host", "seconds")


class OneLine(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_ARGUMENTS, f"{self.prog}: {message}\n")


def positive(text: str) -> int:
    """A number of 1 or more; also as 248M or 1G."""
    units = {"K": 1 << 10, "M": MIB, "G": 1 << 30}
    scale = units.get(text[-1:].upper(), 1)
    try:
        number = int(text[:-1] if scale > 1 else text) * scale
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more (got {text!r})")
    return number


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = OneLine(prog="python -m colocert_reference", description=__doc__.splitlines()[0])
    parser.add_argument("--peak-device", choices=("gpu", "cpu"), default="gpu", help="the side that takes the overlap")
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    parser.add_argument("--iterations", type=positive, default=2, metavar="N")
    parser.add_argument("--capacity", type=positive, metavar="BYTES", help="of the device `host`: 260046848, or 248M")
    given = parser.parse_args(argv)
    if given.device == "cuda" and given.capacity:
        parser.error("argument --capacity: a GPU has its own (got --device cuda)")
    return given


def not_there(device: str) -> str:
    """What this machine lacks for the device, in a line; nothing where it lacks nothing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return f"needs the extra `reference` (got no {', '.join(missing)}): pip install 'colocert[reference]'"
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            return "--device cuda needs a GPU that torch can use (got none): use --device host"
    return ""


def mib(nbytes: int) -> str:
    return "?" if nbytes < 0 else f"{nbytes / MIB:.1f}"


def row(sample: Sample) -> tuple[str, ...]:
    """A step's line, in the order of `COLUMNS`; bytes in MiB."""
    on_device, on_host = (
        [mib(held.get(side, 0)) for side in ("trainer", "engine")] for held in (sample.device, sample.host)
    )
    return (sample.phase, sample.step, *on_device, mib(sample.free), *on_host, f"{sample.seconds:.2f}")


def peak_rows(pair: Pair) -> list[tuple[str, str, str]]:
    """The peaks: of what, MiB, and after which step."""
    rows = []
    for name, sample in pair.peaks().items():
        side, _, kind = name.rpartition(" ")
        held = sample.device if kind == "device" else sample.host
        nbytes = held.get(side, 0) if side else sum(held.values())
        rows.append((name if side else f"both {kind}", mib(nbytes), f"{sample.phase}: {sample.step}"))
    rows.append(("high-water mark", mib(pair.device_peak()), "the device's own, at any time"))
    return rows


def plain(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], words: frozenset[int]) -> str:
    """A table in fixed columns, for where rich is not installed."""
    widths = [max(len(line[i]) for line in (columns, *rows)) for i in range(len(columns))]
    lines = (
        "  ".join(cell.ljust(w) if i in words else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths)))  # noqa: B905
        for line in (columns, *rows)
    )
    return "\n".join((title, *(line.rstrip() for line in lines)))


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], words: frozenset[int]) -> None:
    """Prints a table; by rich on a terminal."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(plain(title, columns, rows, words))
        return
    console = Console()
    if not console.is_terminal:
        print(plain(title, columns, rows, words))
        return
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i in words else "right", no_wrap=True)
    for line in rows:
        table.add_row(*line)
    console.print(table)


def run(given: argparse.Namespace, tell: Callable[[str], None]) -> int:
    """The run and its tables. After a failure the table shows how far it came."""
    from colocert_reference.real.pair import Pair, Sizes
    from colocert_reference.real.processes import NoDevice, PairError

    sizes = Sizes(capacity=given.capacity) if given.capacity else Sizes()
    try:
        with Pair(sizes, peak_device=given.peak_device, device=given.device) as pair:
            failure = None
            try:
                pair.run(given.iterations)
            except PairError as error:
                failure = error
            capacity = f", capacity {mib(sizes.capacity)} MiB" if given.device == "host" else ""
            title = f"{given.peak_device}-peak on {given.device}{capacity}; MiB after each step"
            show(title, COLUMNS, [row(s) for s in pair.samples], frozenset({0, 1}))
            if failure is not None:
                raise failure
            show("peaks", ("of", "MiB", "after"), peak_rows(pair), frozenset({0, 2}))
            print(f"adapter bytes a sync: {' '.join(map(str, pair.adapter_bytes))}")
    except NoDevice as error:
        tell(str(error))
        return NOT_THERE
    except PairError as error:
        tell(str(error))
        return FAILED
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    given = arguments(argv)

    def tell(text: str) -> None:
        print(f"colocert_reference: {' '.join(text.split())}", file=sys.stderr)

    if lack := not_there(given.device):
        tell(lack)
        return NOT_THERE
    return run(given, tell)


if __name__ == "__main__":
    sys.exit(main())

"""The reference for real: `python -m colocert_reference --peak-device gpu --device host --iterations 16`.

A trainer process and an engine process share one device; the reference driver takes them through the iterations. With
`--engine llama` (the default) the engine samples, the trainer learns from the reward of what was sampled, and only the
adapter crosses: a line an iteration. With `--engine blocks` the engine is memory alone: what both hold after each step,
then the peaks. Exit codes: 0 all iterations ended, 1 the run failed, 2 wrong arguments, 3 the device or a package is
not there, 130 interrupted. An error is one line on stderr.

Knows arguments and columns. Does not know the order of a hand-off, and imports neither torch nor the kit before the
arguments have been checked. On `cuda` it has not run yet.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from colocert_reference.real.loop import LearningPair
    from colocert_reference.real.pair import Pair, Sample

FAILED, WRONG_ARGUMENTS, NOT_THERE, INTERRUPTED = 1, 2, 3, 130
MIB = 1 << 20
NEEDED = {
    "blocks": ("torch", "megatron", "torch_memory_saver", "colocert"),
    "llama": ("torch", "megatron", "torch_memory_saver", "transformers", "peft", "safetensors", "colocert"),
}
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
    parser.add_argument(
        "--engine", choices=("llama", "blocks"), default="llama", help="one that samples, or memory alone"
    )
    parser.add_argument("--processes", choices=("ray", "plain"), help="default: under Ray where it is installed")
    loop = parser.add_argument_group("with --engine llama")
    loop.add_argument("--seed", type=int, metavar="S", help="of the base, the prompts and the sampling (default: 0)")
    loop.add_argument("--checkpoint", type=Path, metavar="DIR", help="keep the last iteration there")
    loop.add_argument("--resume", type=Path, metavar="DIR", help="go on from there, N iterations more")
    loop.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="the bytes of both sides over the steps, as SVG; its opening in FILE's name with -opening",
    )
    loop.add_argument("--reward", type=Path, metavar="FILE", help="the reward over the iterations, as SVG")
    loop.add_argument(
        "--trace", type=Path, metavar="FILE", help="the steps as a trace (.jsonl): `colocert timeline FILE`"
    )
    loop.add_argument(
        "--transcript", type=Path, metavar="FILE", help="the lines of the run, whatever the terminal shows"
    )
    given = parser.parse_args(argv)
    if given.device == "cuda" and given.capacity:
        parser.error("argument --capacity: a GPU has its own (got --device cuda)")
    for name in ("seed", "checkpoint", "resume", "timeline", "reward", "trace", "transcript"):
        if given.engine == "blocks" and getattr(given, name) is not None:
            parser.error(f"argument --{name}: needs an engine that samples (got --engine blocks)")
    if given.processes is None:
        under_ray = given.engine == "llama" and importlib.util.find_spec("ray") is not None
        given.processes = "ray" if under_ray else "plain"
    return given


def not_there(device: str, engine: str, processes: str) -> str:
    """What this machine lacks for the device, in a line; nothing where it lacks nothing."""
    needed = (*NEEDED[engine], *(("ray",) if processes == "ray" else ()))
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
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
        with Pair(sizes, peak_device=given.peak_device, device=given.device, processes=given.processes) as pair:
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


def learn(given: argparse.Namespace, tell: Callable[[str], None]) -> int:
    """The loop. What was asked to be written is written after a failure too, as far as the run came."""
    from colocert_reference.real.loop import LearningPair, LoopSettings
    from colocert_reference.real.processes import NoDevice, PairError
    from colocert_reference.real.progress import progress

    settings = LoopSettings(seed=given.seed or 0)
    if given.capacity:
        settings = replace(settings, capacity=given.capacity)
    on_host = f", capacity {mib(settings.capacity)} MiB" if given.device == "host" else ""
    title = f"{given.peak_device}-peak on {given.device}{on_host}, seed {settings.seed}, processes {given.processes}"
    try:
        with (
            progress(title, settings.capacity if on_host else 0) as shown,
            LearningPair(
                settings,
                peak_device=given.peak_device,
                device=given.device,
                processes=given.processes,
                checkpoint=given.checkpoint,
                resume=given.resume,
                observe=shown.step,
                on_iteration=shown.iteration,
            ) as pair,
        ):
            try:
                pair.run(given.iterations)
            finally:
                told = said_of(pair) if pair.samples else []
                written = write(given, pair, [*shown.transcript(), *told])
    except NoDevice as error:
        tell(str(error))
        return NOT_THERE
    except (PairError, OSError) as error:
        tell(str(error))
        return FAILED
    print("\n".join((*told, *written)))
    return 0


def write(given: argparse.Namespace, pair: LearningPair, transcript: list[str]) -> list[str]:
    """The files that were asked for, as far as the run came; a line for each."""
    from colocert_reference.real import pictures

    title = f"reference pair, {given.peak_device}-peak on {given.device}"
    capacity = pair.settings.capacity if given.device == "host" else 0
    texts: dict[Path, str] = {}
    if given.timeline is not None:
        opening = given.timeline.with_name(f"{given.timeline.stem}-opening{given.timeline.suffix}")
        for path, steps, what in (
            (given.timeline, None, ""),
            (opening, pictures.opening(pair.samples, 2), ": start and first two iterations"),
        ):
            texts[path] = pictures.timeline_svg(pair.samples, title=title + what, capacity=capacity, steps=steps)
    if given.transcript is not None:
        texts[given.transcript] = "".join(f"{line}\n" for line in transcript)
    if given.reward is not None and pair.iterations:
        texts[given.reward] = pictures.reward_svg(pair.iterations, title=title)
    written = []
    for path, drawn in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(drawn, encoding="utf-8")
        written.append(f"wrote {path}")
    if given.trace is not None:
        pictures.write_trace(given.trace, pair.samples, peak_device=given.peak_device, iterations=pair.iterations)
        written.append(f"wrote {given.trace}")
    return written


def said_of(pair: LearningPair) -> list[str]:
    """What a run came to."""
    device, host = pair.peaks()["device"], pair.peaks()["host"]
    sent = [f"{kind} {len(n)} times {mib(max(n, default=0))} MiB" for kind, n in pair.sent_bytes().items()]
    peaks = f"device {mib(device.on_device)} MiB after {device.step}, host {mib(host.on_host)} MiB after {host.step}"
    lines = [f"peaks: {peaks}", f"sent: {', '.join(sent)}"]
    if len(pair.iterations) >= 4:
        quarter = len(pair.iterations) // 4
        first, last = (
            sum(i.reward for i in some) / quarter for some in (pair.iterations[:quarter], pair.iterations[-quarter:])
        )
        lines.insert(0, f"reward: first quarter {first:.3f}, last quarter {last:.3f}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    given = arguments(argv)

    def tell(text: str) -> None:
        print(f"colocert_reference: {' '.join(text.split())}", file=sys.stderr)

    if lack := not_there(given.device, given.engine, given.processes):
        tell(lack)
        return NOT_THERE
    try:
        return (learn if given.engine == "llama" else run)(given, tell)
    except KeyboardInterrupt:
        tell("interrupted")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())

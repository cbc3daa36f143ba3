"""The strict saver against the real library, on every operation sequence to a depth.

Knows the operations, what may be observed of them, and how the two sides are run and compared. Does not know how
either side does it: the double comes as a factory, the real library runs under `csrc/fork_tree.c` in a process tree.

    real = explore_real(depth=5)                 once; a millisecond a sequence
    for difference in compare(StrictSaver, real): ...      the shortest sequence first

After every operation both sides say: bytes of the device held and free, host bytes held, and the content of every
allocation. An operation that ends the process is observed as `exit` or `SIGSEGV`, and is not extended.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from colocert.device.build import FORK_TREE
from colocert.device.launcher import start
from colocert.device.link import LinkClosed
from colocert.device.machine import Machine
from colocert.device.ports import Stage
from colocert.trace.events import POISON as POISON_TOKEN

GRANULE = 2 << 20
CAPACITY = 3 * GRANULE
"""One allocation in `a` and one in `b` fill the device, so out-of-memory is met on both ways."""

OPERATIONS = (
    *("pause a", "pause b", "pause", "resume a", "resume b", "resume"),
    *("alloc a", "alloc b", "free", "touch"),
)
ON_LIVE = ("free", "touch")
"""Those on the newest allocation; where there is none they are no operation. `touch` reads, then writes."""

SIZES = {"a": 6_912, "b": GRANULE + 5}  # below a granule, and just above one
BACKED_UP = {"a": True, "b": False}
PAUSED, MIXED, POISON = -1, -2, 0xDB
"""What is said in place of a content: not readable; not one value throughout; the fill of new memory. Other contents
count the writes of a sequence from 1."""

Sequence = tuple[str, ...]


class Seen(NamedTuple):
    """One observation. `end` is empty while the process lives, and then it is all there is."""

    end: str = ""
    refused: bool = False
    own: int = 0
    free: int = 0
    host: int = 0
    contents: tuple[int, ...] = ()


@dataclass(frozen=True)
class Difference:
    """A sequence whose last operation the two sides answer differently."""

    sequence: Sequence
    real: Seen
    double: Seen

    def __str__(self) -> str:
        fields = [name for name in Seen._fields if getattr(self.real, name) != getattr(self.double, name)]
        rows = "".join(f"\n    {f}: real {getattr(self.real, f)!r}, double {getattr(self.double, f)!r}" for f in fields)
        return f"after {', '.join(self.sequence)}:{rows}"


class Double(Protocol):
    """What the comparer needs of a strict saver."""

    device_bytes: int
    host_bytes: int

    def region(self, tag: str, enable_cpu_backup: bool) -> Any: ...
    def pause(self, tag: str | None = None) -> None: ...
    def resume(self, tag: str | None = None) -> None: ...
    def alloc(self, nbytes: int) -> Any: ...
    def free(self, allocation: Any) -> None: ...
    def touch(self, allocation: Any, how: str = "read", content: str | None = None) -> Any: ...
    def free_bytes(self) -> int: ...


def explore_real(depth: int = 5) -> dict[Sequence, Seen]:
    """What the real library over the stand-in does on every sequence to `depth`.

    In one process tree, not several: forks on two cores at once were measured slower than one after another.
    """
    seen: dict[Sequence, Seen] = {}
    machine = Machine(capacity=CAPACITY, snapshot=True)
    with start(f"{__name__}:{tell_tree.__name__}", machine=machine, deadline=600, depth=depth) as child:
        with contextlib.suppress(LinkClosed):  # the outcome says why
            while (lines := child.listen()) is not None:
                seen.update(map(_parse, lines))
        child.wait().expect()
    return seen


def tell_tree(stage: Stage, depth: int) -> None:
    """The body of a child whose hook was just probed: starts `csrc/fork_tree.c` under it and passes on its lines."""
    regions = [f"{tag}:{SIZES[tag]}:{BACKED_UP[tag]:d}" for tag in SIZES]
    program = Path(os.environ["COLOCERT_STANDIN_LIBRARIES"]) / FORK_TREE
    command = [str(program), str(depth), *regions, "--", *OPERATIONS]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as tree,
    ):
        assert tree.stdout is not None
        while lines := tree.stdout.readlines(1 << 16):
            stage.tell(lines)
        if tree.wait():
            said.seek(0, os.SEEK_END)
            said.seek(max(0, said.tell() - 500))
            raise RuntimeError(f"the fork tree must end with 0, got {tree.returncode}: {said.read().decode()!r}")
    stage.tell(None)


def _parse(line: str) -> tuple[Sequence, Seen]:
    path, end, *rest = line.split()
    sequence = tuple(OPERATIONS[int(number)] for number in path.split(","))
    if end != "alive":
        return sequence, Seen(end if end == "exit" else signal.Signals(int(end)).name)
    refused, own, free, host, *contents = rest
    values = tuple(int(value) for value in contents[0].split(",")) if contents else ()
    return sequence, Seen("", refused == "1", int(own), int(free), int(host), values)


def explore_double(make: Callable[[int], Double], depth: int) -> dict[Sequence, Seen]:
    """What a double does on every sequence to `depth`; `make` takes the capacity in bytes."""
    seen: dict[Sequence, Seen] = {(): Seen()}
    level: list[Sequence] = [()]
    for _ in range(depth):
        longer = [(*prefix, op) for prefix in level for op in OPERATIONS if seen[prefix].contents or op not in ON_LIVE]
        seen.update({sequence: _replay(make, sequence) for sequence in longer})
        level = [sequence for sequence in longer if not seen[sequence].end]
    del seen[()]
    return seen


def compare(make: Callable[[int], Double], real: dict[Sequence, Seen]) -> list[Difference]:
    """Where the double differs from what was seen of the real library; shortest first.

    A sequence whose prefix differs already is left out: only the first operation that differs says anything.
    """
    double = explore_double(make, max(map(len, real)))
    differ: dict[Sequence, Difference] = {}
    for sequence in sorted(real.keys() | double.keys(), key=lambda s: (len(s), [OPERATIONS.index(o) for o in s])):
        if any(sequence[:n] in differ for n in range(1, len(sequence))):
            continue
        if real.get(sequence) != double.get(sequence):
            differ[sequence] = Difference(sequence, real[sequence], double[sequence])
    return list(differ.values())


def _replay(make: Callable[[int], Double], sequence: Sequence) -> Seen:
    run = _DoubleRun(make(CAPACITY))
    for operation in sequence[:-1]:
        run.apply(operation)
    try:
        return run.look(refused=run.apply(sequence[-1]))
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException:
        return Seen(end="SIGSEGV" if sequence[-1] == "touch" else "exit")


class _DoubleRun:
    def __init__(self, saver: Double) -> None:
        self.saver = saver
        self.live: list[Any] = []
        self.written = 0

    def apply(self, operation: str) -> bool:
        """Applies one operation; true where it was refused and the process goes on."""
        verb, _, tag = operation.partition(" ")
        if verb == "pause":
            self.saver.pause(tag or None)
        elif verb == "resume":
            self.saver.resume(tag or None)
        elif verb == "alloc":
            return self._alloc(tag)
        elif verb == "free":
            self.saver.free(self.live.pop())
        else:
            self.saver.touch(self.live[-1])
            self._write()
        return False

    def _alloc(self, tag: str) -> bool:
        try:
            with self.saver.region(tag, BACKED_UP[tag]):
                self.live.append(self.saver.alloc(SIZES[tag]))
        except MemoryError:
            return True
        self._write()
        return False

    def _write(self) -> None:
        self.written += 1
        self.saver.touch(self.live[-1], "overwrite", str(self.written))

    def look(self, refused: bool) -> Seen:
        saver = self.saver
        contents = tuple(PAUSED if a.paused else _token(a.content) for a in self.live)
        return Seen("", refused, saver.device_bytes, saver.free_bytes(), saver.host_bytes, contents)


def _token(content: str) -> int:
    if content.isdigit():
        return int(content)
    return POISON if content == POISON_TOKEN else MIXED

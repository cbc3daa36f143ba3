"""Release and resume of memory on the device `host`, beside copies of the same bytes within memory.

The real torch_memory_saver over the stand-in driver, in a process of its own: 512 MiB with a host backup go out and
come back, which moves each byte once each way; 512 MiB without one move none. Beside it two copies of 512 MiB between
memory that is there, in the same process and alternating. The stand-in's memory is of 4 KiB pages, or, where it is
private (`snapshot`), of huge pages if the kernel gives them.

What has been given back comes back as fresh pages, which the kernel has to find, to clear and to map, once for the host
copy and once for the device: that is measured beside it, as the least that any implementation pays which really gives
its memory back. Before each step as much memory is touched and let go, since a page that the machine below has taken
away in the meantime costs up to 9 us to get again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from _rows import LIMIT, Bench, alternate

from colocert.device import Machine, NoCompiler, NoSaver, run
from colocert.device.ports import Stage

MIB = 1 << 20
ROUNDS = 7
PAGES = {"4 KiB pages": (False, 3.0), "huge pages": (True, 1.4)}
"""Whether the stand-in's memory is private, and what is asked of a release and resume beside two copies."""


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measured(stage: Stage, mib: int, rounds: int, private: bool) -> dict[str, list[float]]:
    """In the child: seconds of each way in each round."""
    device, nbytes = stage.device, mib * MIB
    device.alloc("default", True, nbytes, fill=0x5A)
    device.alloc("grad_buffer", False, nbytes, fill=0x5A)
    source, target = mmap.mmap(-1, nbytes), mmap.mmap(-1, nbytes)
    for memory in (source, target):
        memory.madvise(mmap.MADV_HUGEPAGE)
        ctypes.memset(address(memory), 1, nbytes)
    steps: dict[str, Callable[[], Any]] = {
        "release": lambda: device.pause("default"),
        "resume": lambda: device.resume("default"),
        "copy": lambda: ctypes.memmove(address(target), address(source), nbytes),
        "release, no backup": lambda: device.pause("grad_buffer"),
        "resume, no backup": lambda: device.resume("grad_buffer"),
        "copy back": lambda: ctypes.memmove(address(source), address(target), nbytes),
        "host pages": lambda: pages(nbytes),
    }
    taken, given = "device pages", "device pages given back"
    found: dict[str, list[float]] = {taken: [], given: []}

    def warm(step: Callable[[], Any]) -> float:
        pages(2 * nbytes)
        return seconds(step)

    def device_pages() -> float:
        start = time.perf_counter()
        back = pages(nbytes, -1 if private else os.memfd_create("bench"))
        found[taken].append(time.perf_counter() - start)
        found[given].append(back)
        return back

    rest = alternate({**{n: partial(warm, step) for n, step in steps.items()}, taken: device_pages}, rounds)
    return {**rest, **{name: each[-rounds:] for name, each in found.items()}}


def pages(nbytes: int, file: int = -1) -> float:
    """What the kernel does for memory that comes and goes: pages taken, cleared, mapped, filled and given back.

    Returns the seconds of giving them back.
    """
    if file >= 0:
        os.posix_fallocate(file, 0, nbytes)
        memory = mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    else:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE)
        memory.madvise(mmap.MADV_HUGEPAGE)
    ctypes.memset(address(memory), 0xDB, nbytes)
    start = time.perf_counter()
    memory.close()
    if file >= 0:
        os.close(file)
    return time.perf_counter() - start


def address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def host_bytes(stage: Stage, mib: int) -> list[int]:
    """In the child: pinned host bytes with the trainer's backup, then with the engine's mirror in its place."""
    device: Any = stage.device
    device.alloc("default", True, mib * MIB, fill=1)
    device.alloc("weights", True, 2 * mib * MIB, fill=2)
    found = []
    for out, back in (("default", "default"), ("weights", "weights")):
        device.pause(out)
        found.append(device.hook.standin("pinned_bytes"))
        device.resume(back)
    return found


def main() -> None:
    bench = Bench.started(__file__, __doc__)
    mib = 64 if bench.quick else 512
    for kind, (private, at_most) in PAGES.items():
        machine = Machine(capacity=8 << 30, snapshot=private)
        try:
            found = run(
                f"{__file__}:measured", machine=machine, mib=mib, rounds=bench.rounds(ROUNDS), private=private
            ).expect("ok")
        except (NoCompiler, NoSaver) as error:
            print(f"without release and resume: {error}")
            return
        both = [a + b for a, b in zip(found["release"], found["resume"], strict=True)]
        copies = [a + b for a, b in zip(found["copy"], found["copy back"], strict=True)]
        what = f"out and back, {mib} MiB with backup, {kind}"
        bench.beside(what, "ms", both, "two copies within memory", copies, kind=LIMIT, scale=1e3, at_most=at_most)
        fresh = ("copy", "copy back", "host pages", "device pages")
        bound = [sum(ways) for ways in zip(*(found[name] for name in fresh), strict=True)]
        bench.beside(what, "ms", both, "two copies, and fresh pages", bound, kind=LIMIT, scale=1e3, at_most=1.4)
        each = [value * 1e3 / (mib / 1024) for value in found["release, no backup"]]
        what = f"release without backup, {kind}"
        bench.alone(what, "ms/GiB", each, at_most=5)
        back = [value * 1e3 / (mib / 1024) for value in found["device pages given back"]]
        bench.beside(what, "ms/GiB", each, "such pages given back", back, kind=LIMIT, at_most=None if private else 1.4)
    held = run(f"{__file__}:host_bytes", machine=Machine(capacity=8 << 30), mib=mib).expect("ok")
    bench.beside(
        "host bytes at most, one side at a time",
        "MiB",
        [max(held)],
        "the larger copy",
        [2 * mib * MIB],
        kind=LIMIT,
        scale=1 / MIB,
        at_most=1.01,
    )
    bench.finish()


if __name__ == "__main__":
    main()

"""Release and resume of memory on the device `host`, beside copies of the same bytes within memory.

The real torch_memory_saver over the stand-in driver, in a process of its own: 512 MiB with a host backup go out and
come back, which moves each byte once each way; 512 MiB without one move none. Beside it two copies of 512 MiB between
memory that is there, in the same process and alternating. The stand-in's memory is of 4 KiB pages, or, where it is
private (`snapshot`), of huge pages if the kernel gives them. What 4 KiB pages cost by themselves is measured beside it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
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


def measured(stage: Stage, mib: int, rounds: int) -> dict[str, list[float]]:
    """In the child: seconds of each way in each round."""
    device, nbytes = stage.device, mib * MIB
    device.alloc("default", True, nbytes, fill=0x5A)
    device.alloc("grad_buffer", False, nbytes, fill=0x5A)
    source, target = mmap.mmap(-1, nbytes), mmap.mmap(-1, nbytes)
    for memory in (source, target):
        memory.madvise(mmap.MADV_HUGEPAGE)
        ctypes.memset(address(memory), 1, nbytes)
    ways: dict[str, Callable[[], float]] = {
        "release": lambda: seconds(lambda: device.pause("default")),
        "resume": lambda: seconds(lambda: device.resume("default")),
        "copy": lambda: seconds(lambda: ctypes.memmove(address(target), address(source), nbytes)),
        "release, no backup": lambda: seconds(lambda: device.pause("grad_buffer")),
        "resume, no backup": lambda: seconds(lambda: device.resume("grad_buffer")),
        "copy back": lambda: seconds(lambda: ctypes.memmove(address(source), address(target), nbytes)),
        "pages": lambda: seconds(lambda: pages_of_a_file(nbytes)),
    }
    return alternate(ways, rounds)


def pages_of_a_file(nbytes: int) -> None:
    """What the kernel does for the stand-in at each release and resume: pages of a memfd taken, filled, given back."""
    file = os.memfd_create("bench")
    os.posix_fallocate(file, 0, nbytes)
    memory = mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    ctypes.memset(address(memory), 0xDB, nbytes)
    memory.close()
    os.close(file)


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
    for pages, (private, at_most) in PAGES.items():
        machine = Machine(capacity=8 << 30, snapshot=private)
        try:
            found = run(f"{__file__}:measured", machine=machine, mib=mib, rounds=bench.rounds(ROUNDS)).expect("ok")
        except (NoCompiler, NoSaver) as error:
            print(f"without release and resume: {error}")
            return
        both = [a + b for a, b in zip(found["release"], found["resume"], strict=True)]
        copies = [a + b for a, b in zip(found["copy"], found["copy back"], strict=True)]
        what = f"release and resume, {mib} MiB with backup, {pages}"
        bench.beside(what, "ms", both, "two copies within memory", copies, kind=LIMIT, scale=1e3, at_most=at_most)
        if not private:
            bound = [c + p for c, p in zip(copies, found["pages"], strict=True)]
            what = f"release and resume, {mib} MiB with backup, as the kernel's pages allow"
            bench.beside(
                what, "ms", both, "two copies, and pages of a memfd", bound, kind=LIMIT, scale=1e3, at_most=1.4
            )
        each = [value * 1e3 / (mib / 1024) for value in found["release, no backup"]]
        bench.alone(f"release without backup, {pages}", "ms/GiB", each, at_most=5)
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

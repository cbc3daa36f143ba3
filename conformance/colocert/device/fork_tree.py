"""Every operation sequence on the real library, in a tree of processes that share their prefixes. A script.

A node of the tree is a process in the state that its sequence leads to. For each operation it forks a child, which
applies it, says what it sees, and goes on as a node: an operation runs once however many sequences begin with it, and
one that ends its process costs that process only. The stand-in's device forks with it (COLOCERT_STANDIN_FORK=snapshot).

Run by colocert.device.differential, which holds the plan. It imports nothing of colocert on purpose: the time of the
whole is the time of a fork, and that grows with every module that a process has loaded.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any, NoReturn

PAUSED, MIXED = -1, -2  # as in colocert.device.differential
END = 2048  # bytes at either end of a block that are written and compared
_BROKEN = 70  # exit code of a node that failed by itself; it travels up to the root

_calls = ctypes.CDLL(None)  # the preload library, the stand-in and libc, by symbol
for _name in ("own_bytes", "pinned_bytes"):
    getattr(_calls, f"colocert_standin_{_name}").restype = ctypes.c_uint64


class Block:
    """One allocation of the process."""

    def __init__(self, address: int, tag: str, nbytes: int) -> None:
        self.address, self.tag, self.nbytes, self.paused = address, tag, nbytes, False

    def write(self, value: int) -> None:
        """Sets both ends. A whole block would be copied page by page after a fork, for nothing more to compare."""
        for at in self._ends():
            ctypes.memset(at, value, END)

    def content(self) -> int:
        """The one value of both ends, found by comparing each with itself shifted by one byte."""
        if self.paused:
            return PAUSED
        values = set()
        for at in self._ends():
            differs = _calls.memcmp(ctypes.c_void_p(at), ctypes.c_void_p(at + 1), ctypes.c_size_t(END - 1))
            values.add(MIXED if differs else ctypes.c_uint8.from_address(at).value)
        return values.pop() if len(values) == 1 else MIXED

    def _ends(self) -> tuple[int, int]:
        return self.address, self.address + self.nbytes - END


class Node:
    """The state of one process. After a fork the child's copy is the child's."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.operations, self.regions = plan["operations"], plan["regions"]
        self.depth, self.out = plan["depth"], plan["out"]
        self.live: list[Block] = []
        self.writes = 0

    def extend(self, path: list[int]) -> None:
        """Forks a child for each operation, one after another, and says which of them ended it."""
        for number, operation in enumerate(self.operations):
            longer = [*path, number]
            if not self.live and operation in ("free", "touch"):
                continue
            child = os.fork()
            if child == 0:
                self._become(longer)
            end = _end(os.waitpid(child, 0)[1])
            if end:
                self._say(longer, end)

    def _become(self, path: list[int]) -> NoReturn:
        try:
            refused = not self._apply(*self.operations[path[-1]].split())
            own, host = _calls.colocert_standin_own_bytes(), _calls.colocert_standin_pinned_bytes()
            self._say(path, "", refused, own, _free_bytes(), host, [block.content() for block in self.live])
            if len(path) < self.depth:
                self.extend(path)
            os._exit(0)
        finally:
            os._exit(_BROKEN)

    def _say(self, path: list[int], *seen: object) -> None:
        line = json.dumps([path, seen]).encode() + b"\n"
        assert os.write(self.out, line) == len(line) < 4096, "one line is one atomic write"

    def _apply(self, verb: str, tag: str = "") -> bool:
        """Applies one operation; false where it was refused and the process goes on."""
        if verb in ("pause", "resume"):
            (_calls.tms_pause if verb == "pause" else _calls.tms_resume)(tag.encode() or None)
            for block in self.live:
                if tag in ("", block.tag):
                    block.paused = verb == "pause"
        elif verb == "alloc":
            return self._alloc(tag)
        elif verb == "free":
            return not _calls.cudaFree(ctypes.c_void_p(self.live.pop().address))
        else:
            ctypes.string_at(self.live[-1].address, 1)
            self._write()
        return True

    def _alloc(self, tag: str) -> bool:
        nbytes, backup = self.regions[tag]
        address = ctypes.c_void_p()
        _calls.tms_set_current_tag(tag.encode())
        _calls.tms_set_enable_cpu_backup(backup)
        _calls.tms_set_interesting_region(True)
        status = _calls.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(nbytes))
        _calls.tms_set_interesting_region(False)
        if status or not address.value:
            return False
        self.live.append(Block(address.value, tag, nbytes))
        self._write()
        return True

    def _write(self) -> None:
        self.writes += 1
        self.live[-1].write(self.writes)


def _free_bytes() -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _calls.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    return free.value


def _end(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    code = os.WEXITSTATUS(status)
    if code not in (0, 1):
        sys.exit(f"a node of the tree must end with 0 or by the saver's exit(1), got {code}")
    return "exit" if code else ""


if __name__ == "__main__":
    Node(json.loads(sys.argv[1])).extend([])

"""Ends what is left of a local Ray once its owner is gone, however that ended: `python ray_reaper.py FOLDER < pipe`.

Knows processes by the variable that they inherited, and the folder. Does not know Ray, and imports nothing of ours.

Ray's raylet ends with its owner; its agents notice only after a minute (2.60.0), and nobody removes the folder. The
pipe is the owner's: it closes when the owner has ended, killed or not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

MARK = "COLOCERT_RAY_FOLDER"


def marked(folder: str) -> list[int]:
    """The processes that inherited this folder's mark."""
    mark, found = f"{MARK}={folder}".encode(), []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
    return found


def main(folder: str) -> None:
    """Waits for the owner's end, then ends its Ray."""
    while sys.stdin.buffer.read(1):
        pass
    for pid in marked(folder):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])

"""The folder of a frozen-offload scenario: what lies in it, and what the suite puts there.

Knows named files. Does not know processes, or what a file is for.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from colocert.trace.events import Event, FolderSeen

FOREIGN = {
    "notes.txt": b"not yours\n",
    "weights.bin": b"\1" * 8192,
    "frozen-rank0.bin": b"\2" * 8192,
    "rank0/model.safetensors": b"\3" * 4096,
    "tmpforeign": b"\4" * 4096,
}
"""Files of somebody else, under names as an offload might choose them."""


class Folder:
    """`look` writes what has changed since it last looked. `keep` and `plant` bring files back that are gone since."""

    def __init__(self, path: Path, kept: Path, emit: Callable[[Event], None]) -> None:
        self.path, self._kept, self._emit = path, kept, emit
        self._seen: dict[str, str] = {}

    def look(self, by: str) -> None:
        """Writes the folder's files if they are not as they were."""
        now = {name: self._content(name) for name in self._names()}
        if now != self._seen:
            self._seen = now
            self._emit(FolderSeen(by, dict(now)))

    def foreign(self) -> None:
        """Puts somebody else's files there."""
        for name, content in FOREIGN.items():
            path = self.path / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)

    def keep(self) -> None:
        """Copies the files as they are, for `plant`."""
        shutil.copytree(self.path, self._kept, dirs_exist_ok=True)

    def plant(self) -> None:
        """Puts the copies back under their names."""
        if self._kept.exists():
            shutil.copytree(self._kept, self.path, dirs_exist_ok=True)

    def alter(self) -> None:
        """Changes the content of every file that an implementation left, and neither its size nor its times."""
        for name in self._names():
            if name not in FOREIGN:
                path = self.path / name
                facts = path.stat()
                data = bytes(b ^ 0x5A for b in path.read_bytes())
                with path.open("r+b") as stream:
                    stream.write(data)
                os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))

    def _names(self) -> list[str]:
        return sorted(str(p.relative_to(self.path)) for p in self.path.rglob("*") if p.is_file() and not p.is_symlink())

    def _content(self, name: str) -> str:
        path = self.path / name
        try:
            return "#" + hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest()
        except OSError:
            return ""

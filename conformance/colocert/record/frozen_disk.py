"""What a process of a frozen-offload scenario is denied: a disk of its own that is full or read-only, file size, files.

Knows Linux namespaces, tmpfs and resource limits. Does not know who writes, or why.

A full disk is a tmpfs of few bytes, mounted on the scenario's folder in a mount namespace that only this process is in;
an ordinary user gets one through a user namespace. Its size is kept however a file is written, by stores into a
mapping too: those end in SIGBUS. A limit on the size of a file needs no namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from pathlib import Path

_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_PRIVATE, _RECURSIVE, _READ_ONLY, _REMOUNT = 1 << 18, 1 << 14, 1, 32
SPARE_FILES = 64
"""Descriptors that a process may open beside those it has, where files are few."""


class DiskNotHad(Exception):
    """This machine gives no such disk; the text says why."""


class Limits:
    """Limits that hold while it is entered: the suite's own looking is not bound by them."""

    def __init__(self) -> None:
        self._soft: dict[int, int] = {}
        self._before: dict[int, tuple[int, int]] = {}

    def set(self, kind: int, value: int) -> None:
        self._soft[kind] = value

    def disk(self, folder: Path, what: str) -> None:
        """`full:BYTES`, `read-only`, or `limit:BYTES` on the size of a file. Raises `DiskNotHad`."""
        word, _, number = what.partition(":")
        if word == "limit":
            self.set(resource.RLIMIT_FSIZE, int(number))
        elif word == "full":
            own_mounts()
            mount_tmpfs(folder, int(number))
        else:
            make_read_only(folder)

    def __enter__(self) -> Limits:
        for kind, value in self._soft.items():
            self._before[kind] = resource.getrlimit(kind)
            resource.setrlimit(kind, (value, self._before[kind][1]))
        return self

    def __exit__(self, *exc: object) -> None:
        for kind, before in self._before.items():
            resource.setrlimit(kind, before)


def limit_files(word: str) -> Limits:
    """The limits of a process: with "few", of its open files."""
    limits = Limits()
    if word == "few":
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208
        limits.set(resource.RLIMIT_NOFILE, highest + 1 + SPARE_FILES)
    return limits


def own_mounts() -> None:
    """Puts this process into a mount namespace of its own. Raises `DiskNotHad`."""
    uid, gid = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEWUSER | _NEWNS) == 0:
        with contextlib.suppress(OSError):
            Path("/proc/self/setgroups").write_text("deny")
        try:
            Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
            Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
        except OSError as error:
            raise DiskNotHad(f"no user namespace ({error.strerror})") from error
    elif libc.unshare(_NEWNS) != 0:
        raise DiskNotHad(f"no mount namespace ({os.strerror(ctypes.get_errno())})")
    _mount(None, "/", None, _PRIVATE | _RECURSIVE, None)


def mount_tmpfs(folder: Path, nbytes: int) -> None:
    """A tmpfs of that size on the folder. Raises `DiskNotHad`."""
    _mount("tmpfs", str(folder), "tmpfs", 0, f"size={nbytes},mode=0777")


def make_read_only(folder: Path) -> None:
    """Makes the folder read-only for this process, for the superuser too. Raises `DiskNotHad`."""
    try:
        own_mounts()
        mount_tmpfs(folder, 1 << 20)
        _mount("tmpfs", str(folder), "tmpfs", _REMOUNT | _READ_ONLY, "size=1048576,mode=0555")
    except DiskNotHad:
        if os.geteuid() == 0:
            raise
        folder.chmod(0o555)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    texts = [text.encode() if text is not None else None for text in (source, target, kind, options)]
    if libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]) != 0:
        raise DiskNotHad(f"mount {target}: {os.strerror(ctypes.get_errno())}")

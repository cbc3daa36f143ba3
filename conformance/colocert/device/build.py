"""Compiles the stand-in at its first use, into a cache that every environment of this user shares.

Knows the sources, a compiler and a cache folder. Does not know torch_memory_saver, nor who loads the result.

The compiler is `$CC`, else `cc`, else the one in the PyPI package `ziglang`. The folder is named by a digest of the
sources, the flags and the compiler, so a change of any of them builds anew, and an unchanged one never does.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from colocert.device.errors import BuildFailed, NoCompiler

SOURCES = Path(__file__).with_name("csrc")
CUDA, CUDART, FORK_TREE = "libcuda.so.1", "libcudart.so.13", "fork-tree"
FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-fvisibility=hidden", "-pthread")


@dataclass(frozen=True)
class StandIn:
    """The two compiled libraries, and the program beside them. `folder` goes first on the library path."""

    folder: Path

    @property
    def cuda(self) -> Path:
        return self.folder / CUDA

    @property
    def cudart(self) -> Path:
        return self.folder / CUDART

    @property
    def fork_tree(self) -> Path:
        return self.folder / FORK_TREE

    @property
    def complete(self) -> bool:
        return self.cuda.exists() and self.cudart.exists() and self.fork_tree.exists()


def build() -> StandIn:
    """The compiled stand-in, from the cache or made now. Safe when several processes build at once."""
    compiler = find_compiler()
    folder = cache_folder() / f"standin-{_digest(compiler)}"
    built = StandIn(folder)
    if built.complete:
        return built
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".build-", dir=folder.parent))
    except OSError as error:
        raise BuildFailed(
            "The stand-in's cache folder must be writable",
            got=f"{error}",
            fix="Set XDG_CACHE_HOME to a folder that is.",
        ) from None
    try:
        _compile(compiler, StandIn(scratch))
        _publish(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return built


def find_compiler() -> list[str]:
    """The command that compiles C here."""
    named = shlex.split(os.environ.get("CC", ""))
    if named and shutil.which(named[0]):
        return named
    if not named and (cc := shutil.which("cc")):
        return [cc]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise NoCompiler(
        "Device `host` needs a C compiler for its stand-in driver",
        got=f"CC={os.environ['CC']!r}, which is not on PATH" if named else "neither $CC, nor `cc`, nor `ziglang`",
        fix="Install a compiler, or `pip install ziglang`.",
    )


def cache_folder() -> Path:
    """Where compiled stand-ins are kept: `$XDG_CACHE_HOME/colocert`, else `~/.cache/colocert`."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(named) if Path(named).is_absolute() else Path.home() / ".cache") / "colocert"


def _digest(compiler: list[str]) -> str:
    sha = hashlib.sha256()
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    for part in (platform.machine().encode(), "\0".join((*compiler, *FLAGS)).encode(), version):
        sha.update(part + b"\0")
    for source in sorted(SOURCES.iterdir()):
        if source.is_file():
            sha.update(source.name.encode() + b"\0" + source.read_bytes())
    return sha.hexdigest()[:16]


def _compile(compiler: list[str], out: StandIn) -> None:
    def cc(target: Path, *options: str) -> None:
        _cc([*compiler, *FLAGS, "-o", str(target), *options])

    driver = (str(SOURCES / name) for name in ("ledger.c", "memory.c", "driver.c"))
    versions = f"-Wl,--version-script={SOURCES / 'libcudart.map'}"
    libraries = str(out.cudart), str(out.cuda)
    cc(out.cuda, "-shared", f"-Wl,-soname,{CUDA}", *driver)
    cc(out.cudart, "-shared", f"-Wl,-soname,{CUDART}", versions, str(SOURCES / "runtime.c"), str(out.cuda))
    cc(out.fork_tree, str(SOURCES / "fork_tree.c"), *libraries, "-ldl")


def _cc(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildFailed(
            "The stand-in must compile as C11",
            got=f"exit {done.returncode} of `{shlex.join(command)}`:\n{done.stderr.strip()}\n",
            fix="Set CC to another compiler, or `pip install ziglang` and unset CC.",
        )


def _publish(scratch: Path, folder: Path) -> None:
    try:
        scratch.rename(folder)
    except OSError:
        if not StandIn(folder).complete:  # else: another process was first, with the same bytes
            raise

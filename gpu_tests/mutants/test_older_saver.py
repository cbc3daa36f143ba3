"""Row G02 under torch_memory_saver 0.0.9.post1, which does not round an allocation up to granules (miles #2670).

The library is that of the published wheel: from the folder that COLOCERT_OLDER_SAVER names, else from the cache folder,
into which it is fetched with pip. A fault of our own with the same effect is among the seeded ones.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from colocert.device.machine import PRELOAD
from gpu_tests.harness.checks import RowRed
from gpu_tests.harness.row import Row
from gpu_tests.test_release import test_release_returns_every_byte as row_g02

VERSION = "0.0.9.post1"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "colocert", f"torch_memory_saver-{VERSION}")


@pytest.fixture(scope="module")
def older(needs_the_saver: None) -> Path:
    """The preload library of the older saver."""
    if given := os.environ.get("COLOCERT_OLDER_SAVER"):
        return Path(given, PRELOAD)
    if not (CACHE / PRELOAD).exists():
        _fetch()
    return CACHE / PRELOAD


def _fetch() -> None:
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        wanted = ["--only-binary=:all:", "--timeout", "20", "-d", folder, f"torch_memory_saver=={VERSION}"]
        done = subprocess.run([*command, *wanted], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"torch_memory_saver {VERSION} cannot be fetched: {(done.stderr.splitlines() or ['?'])[-1]}")
        (wheel,) = Path(folder).glob("*.whl")
        tree = Path(folder, "tree")
        zipfile.ZipFile(wheel).extractall(tree)
        shutil.rmtree(CACHE, ignore_errors=True)
        tree.replace(CACHE)


def test_the_older_saver_turns_the_raw_blocks_red(older: Path, tmp_path: Path) -> None:
    with Row("G02", "host", tmp_path) as row:
        row.shaped(preload=older)
        with pytest.raises(RowRed) as caught:
            row_g02(row)
    assert "raw blocks end" in caught.value.names
    words = dict(row.properties)["last words"]
    assert "invalid argument" in words, words

"""Each record of docs/certified/, run again: the verdict, every rule's outcome and every code are those stored.

Needs the source where the record says, below the user's cache (`make fetch-miles` and the others put wheels there;
checkouts are cloned there by hand), or named by the adapter's variable if it is of that version.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from colocert.judge import Evidence, judge
from colocert.record.manifest import COMPLETE, Options
from colocert.record.resolve import resolve
from colocert.record.runner import record
from colocert.report import certified

FOLDER = Path(__file__).parents[2] / "docs" / "certified"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "colocert")
NEEDS = ("torch", "megatron.core", "torch_memory_saver", "ray", "transformers", "peft", "numpy")
RECORDS = certified.records(FOLDER)


def absent(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:
        return True


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("kept", RECORDS, ids=[kept.folder for kept in RECORDS])
def test_a_complete_run_gives_what_is_stored(
    kept: certified.Certified, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing := [name for name in NEEDS if absent(name)]:
        pytest.skip(f"needs {', '.join(missing)}: pip install 'colocert[reference]'")
    if sys.version_info < (3, 11):
        pytest.skip(f"{kept.title} needs Python 3.11 at least")
    root = CACHE / kept.folder
    if root.is_dir():
        monkeypatch.setenv(kept.variable, str(root))
    impl = f"colocert.adapters.{kept.impl}"
    if (got := resolve(impl).version) != kept.of:
        pytest.skip(f"{kept.title} must be in {root}, or named by {kept.variable} (got {got})")
    options = Options(profiles=tuple(kept.profiles), workers=2, controls=False)
    made = record(impl, tmp_path / "evidence", options)
    assert made.problem is None
    assert {scenario.status for scenario in made.scenarios} == {COMPLETE}
    assert certified.results(judge(Evidence(tmp_path / "evidence"))) == kept.profiles

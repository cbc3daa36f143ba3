"""Evidence of an implementation that breaks rules, recorded once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from colocert.record.manifest import Options
from colocert.record.runner import record

IMPLS = Path(__file__).parents[1] / "plugin" / "impls"


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lifecycle of one whose early release forgets what it released, explored to depth 2, with transcripts."""
    from colocert.report.transcript import write_transcripts

    folder = tmp_path_factory.mktemp("releases-again") / "evidence"
    options = Options(profiles=("lifecycle",), depth=2, fault_depth=1, asked_fault_depth=1, controls=False)
    write_transcripts(folder, record(str(IMPLS / "releases_again.py"), folder, options))
    return folder


@pytest.fixture
def evidence(recorded: Path, tmp_path: Path) -> Path:
    """The same, to be tampered with."""
    return Path(shutil.copytree(recorded, tmp_path / "evidence"))


@pytest.fixture(scope="session")
def failing(recorded: Path) -> tuple[tuple[str, str], ...]:
    """Every rule and code that it fails with, in the order of the catalogue."""
    from colocert.judge import FAIL, Evidence, judge

    rows = [row for row in judge(Evidence(recorded)).rules if row.outcome == FAIL]
    return tuple(dict.fromkeys((row.id, code) for row in rows for case in row.cases for code in case.codes))

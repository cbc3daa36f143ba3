"""docs/gpu.md and the workflow beside it say what is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from colocert.device.kinds import KINDS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "gpu.md"


def test_the_tables_are_current() -> None:
    command = [sys.executable, "-m", "gpu_tests.docs", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_pins_of_torch_are_those_of_tox() -> None:
    pins = dict(re.findall(r"^    (h200|b200|b300): torch==([\d.]+)$", (ROOT / "tox.ini").read_text(), flags=re.M))
    shown = dict(re.findall(r"^\| (\w+) \|.*\| ([\d.]+) cu130 \|", PAGE.read_text(), flags=re.M))
    assert set(shown) == set(KINDS)
    assert {kind: shown[kind] for kind in pins} == pins


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docs" / "gpu-workflow.yml").read_text())
    return loaded


class TestWorkflow:
    def test_its_environments_are_declared_and_its_labels_fit(self, workflow: dict[str, Any], tmp_path: Path) -> None:
        # A short PATH: probing the shims of pyenv takes tox ten seconds.
        env = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), "/usr/bin", "/bin"])}
        command = [sys.executable, "-m", "tox", "list", "--no-desc", "--workdir", str(tmp_path)]
        listed = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
        declared = listed.stdout.split()
        jobs = workflow["jobs"]["rows"]["strategy"]["matrix"]["include"]
        assert sorted(job["kind"] for job in jobs) == sorted(KINDS)
        for job in jobs:
            kind = KINDS[job["kind"]]
            assert job["environment"] in declared
            assert job["environment"].endswith(f"-{kind.name}-w{job['world']}")
            arch = {"x86_64": "x64", "aarch64": "arm64"}[kind.arch]
            assert job["runner"] == ["self-hosted", "linux", arch, "gpu", kind.name, f"{job['world']}gpu"]

    def test_a_fork_never_reaches_a_runner(self, workflow: dict[str, Any]) -> None:
        triggers = workflow[True]  # YAML 1.1 reads the key `on` as a boolean
        assert set(triggers) == {"schedule", "workflow_dispatch", "pull_request"}
        assert triggers["pull_request"] == {"types": ["labeled"]}
        for job in workflow["jobs"].values():
            assert "github.event.pull_request.head.repo.full_name == github.repository" in job["if"]
            assert "github.event.label.name == 'gpu'" in job["if"]
        assert workflow["permissions"] == {"contents": "read"}

    def test_two_jobs_never_share_a_gpu_and_the_last_step_is_the_report_check(self, workflow: dict[str, Any]) -> None:
        job = workflow["jobs"]["rows"]
        assert job["concurrency"] == {"group": "gpu-${{ matrix.kind }}", "cancel-in-progress": False}
        runs = [step["run"] for step in job["steps"] if "run" in step]
        assert "-m gpu_tests.report check" in runs[-1]
        assert "tox -e ${{ matrix.environment }}" in runs[-2]

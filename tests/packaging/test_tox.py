"""The tox matrix: what is declared, and that every other name goes red."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GPU = [f"gpu-{kind}-w{world}" for kind in ("h200", "b200", "b300") for world in (1, 2, 4, 8)]
GRACE = [f"grace-gb300-w{world}" for world in (1, 2, 4)]
CPU = ["cpu-py310", "cpu-py311", "cpu-py312", "cpu-py313"]
OTHER = ["cpu-mutants", "certify", "lint", "typing", "docs"]


def tox(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs tox outside of any tox that runs us, with a short PATH: probing a pyenv's shims takes it ten seconds."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TOX_", "_TOX", "VIRTUAL_ENV", "COLOCERT_"))}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), "/usr/bin", "/bin"])
    command = [sys.executable, "-m", "tox", *arguments, "--workdir", str(folder)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


def core(folder: Path, key: str) -> list[str]:
    """The lines of one setting of the `[tox]` section, expanded."""
    found = tox(folder, "config", "--core", "-k", key)
    assert found.returncode == 0, found.stdout + found.stderr
    lines = found.stdout.split("[tox]")[1].split(f"{key} =")[1].splitlines()
    return [line.strip() for line in lines if line.strip()]


def test_the_declared_environments(tmp_path: Path) -> None:
    found = tox(tmp_path, "list", "--no-desc")
    assert found.returncode == 0, found.stdout + found.stderr
    assert sorted(found.stdout.split()) == sorted(CPU + OTHER + GPU + GRACE)


def test_only_cpu_environments_run_unnamed(tmp_path: Path) -> None:
    assert core(tmp_path, "env_list") == CPU


@pytest.mark.parametrize(
    "name",
    [
        "gpu-b300",
        "gpu-b300-w3",
        "b300",
        "gpu-w8-b300",
        "gpu-gb300-w4",
        "grace-gb300-w8",
        "grace",
        "gpu-b3000-w1",
        "mutants",
    ],
)
def test_an_unknown_name_goes_red(name: str, tmp_path: Path) -> None:
    found = tox(tmp_path, "run", "-e", name)
    assert found.returncode == 254, found.stdout + found.stderr


def test_a_bare_factor_is_refused(tmp_path: Path) -> None:
    found = tox(tmp_path, "run", "-e", "cpu")
    assert found.returncode == 1
    assert "refusing cpu: not a declared environment" in found.stdout + found.stderr


def test_each_gpu_environment_requires_its_kind_and_world(tmp_path: Path) -> None:
    keys = ["base_python", "package", "extras", "deps", "disallow_pass_env", "commands"]
    found = tox(tmp_path, "config", "-e", ",".join(GPU + GRACE), "-k", *keys)
    assert found.returncode == 0, found.stdout + found.stderr
    sections = dict(part.split("]", 1) for part in found.stdout.split("[testenv:") if "]" in part)
    assert sorted(sections) == sorted(GPU + GRACE)
    for name, text in sections.items():
        _, kind, world = name.split("-")
        assert f"--device=cuda --require-gpu={kind} --require-world={world[1:]}" in text, name
        assert ("torch==2.11.0" if kind == "h200" else "torch==2.14.1") in text, name
        assert "base_python = python3.12" in text, name
        assert "package = wheel" in text, name
        assert {"LD_PRELOAD", "TMS_*", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} <= set(text.split()), name


@pytest.mark.parametrize("name", ["gpu-b300-w1", "gpu-h200-w8", "grace-gb300-w4"])
def test_a_gpu_environment_without_its_gpu_fails_in_the_preflight(name: str, tmp_path: Path) -> None:
    """Without what it would install (torch, gigabytes): the preflight finds no driver, and no test is started."""
    if has_driver():
        pytest.skip("this machine has a driver")
    settings = {"deps": "", "package": "skip", "base_python": "python3", "set_env": set_env(name)}
    overrides = [word for k, v in settings.items() for word in ("-x", f"testenv:{name}.{k}={v}")]
    found = tox(tmp_path, "run", "-e", name, *overrides)
    _, kind, world = name.split("-")
    assert found.returncode == 1, found.stdout + found.stderr
    assert f"preflight: {world[1:]} x {kind} must be here: driver:" in found.stdout + found.stderr
    assert "test session starts" not in found.stdout


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def set_env(name: str) -> str:
    """What the environment sets, and the path of this checkout in place of the wheel."""
    _, kind, world = name.split("-")
    site = [str(ROOT / "conformance"), *(path for path in sys.path if path.endswith("site-packages"))]
    settings = (
        f"COLOCERT_REQUIRE_KIND={kind}",
        f"COLOCERT_REQUIRE_WORLD={world[1:]}",
        f"PYTHONPATH={os.pathsep.join(site)}",
    )
    return "\n".join(settings)


def commands(folder: Path, name: str, key: str = "commands") -> list[str]:
    """The commands of one environment, each a line."""
    found = tox(folder, "config", "-e", name, "-k", key)
    assert found.returncode == 0, found.stdout + found.stderr
    return [line.strip() for line in found.stdout.split(f"{key} =")[1].splitlines() if line.strip()]


def test_the_rows_run_on_the_stand_in_where_torch_is_and_the_mutants_beside_ours(tmp_path: Path) -> None:
    rows = "python -m pytest gpu_tests --device=host --require-world=4 -n 2"
    assert [rows in commands(tmp_path, name) for name in CPU] == [False, True, False, False]
    assert commands(tmp_path, "cpu-mutants") == ["python -m pytest tests/mutants gpu_tests/mutants -n 2"]


def test_the_preflight_comes_before_the_rows(tmp_path: Path) -> None:
    for name in ("gpu-b300-w8", "grace-gb300-w2"):
        _, kind, world = name.split("-")
        expected = [f"python -m colocert.preflight --kind {kind} --world {world[1:]}"]
        assert commands(tmp_path, name, "commands_pre") == expected


def test_results_go_where_the_caller_says(tmp_path: Path) -> None:
    found = tox(tmp_path, "config", "-e", "gpu-b300-w1", "-k", "set_env", "pass_env")
    assert "COLOCERT_REPORT_DIR=" in found.stdout
    assert "build/gpu" in found.stdout
    assert {"COLOCERT_SHARD", "CUDA_VISIBLE_DEVICES", "NCCL_*"} <= set(found.stdout.split())


def test_no_label_spans_kinds(tmp_path: Path) -> None:
    labels: dict[str, list[str]] = {}
    for line in core(tmp_path, "labels"):
        label, _, first = line.rpartition("=")
        labels.setdefault(label or list(labels)[-1], []).append(first)
    assert labels.pop("ci") == [*CPU, "cpu-mutants", "lint", "typing", "docs", "certify"]
    assert labels == {"gpu-h200": GPU[:4], "gpu-b200": GPU[4:8], "gpu-b300": GPU[8:], "gpu-gb300": GRACE}

"""What the wheel installs, what the metadata promises, and what importing the kit loads."""

from __future__ import annotations

import configparser
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"colocert", "colocert_reference", "colocert_fixtures"}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def names(wheel: zipfile.ZipFile) -> list[str]:
    return [name for name in wheel.namelist() if ".dist-info/" not in name]


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


def test_the_top_level_is_the_three_packages(names: list[str]) -> None:
    assert {PurePosixPath(name).parts[0] for name in names} == PACKAGES


def test_each_package_is_typed(names: list[str]) -> None:
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)


@pytest.mark.parametrize(
    "source", ["conformance/colocert", "reference/colocert_reference", "fixtures/colocert_fixtures"]
)
def test_every_tracked_file_of_a_package_is_in_the_wheel(names: list[str], source: str) -> None:
    listed = subprocess.run(["git", "ls-files", source], cwd=ROOT, capture_output=True, text=True, check=True)
    kept = [line for line in listed.stdout.splitlines() if (ROOT / line).exists()]
    assert kept
    assert {PurePosixPath(line).relative_to(PurePosixPath(source).parent).as_posix() for line in kept} <= set(names)


def test_the_rule_catalogue_and_the_c_sources_are_package_data(names: list[str]) -> None:
    assert "colocert/rules/lifecycle.toml" in names
    assert any(name.startswith("colocert/device/csrc/") and name.endswith(".c") for name in names)
    assert any(name.startswith("colocert/device/csrc/") and name.endswith(".h") for name in names)


def test_no_build_product_is_in_the_wheel(names: list[str]) -> None:
    wrong = [
        n for n in names if "__pycache__" in n or "_cache/" in n or PurePosixPath(n).suffix in {".so", ".o", ".pyc"}
    ]
    assert wrong == []


def test_entry_points(wheel: zipfile.ZipFile) -> None:
    (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/entry_points.txt")]
    found = configparser.ConfigParser(delimiters=("=",))
    found.read_string(wheel.read(name).decode())
    assert {section: dict(found[section]) for section in found.sections()} == {
        "console_scripts": {"colocert": "colocert.cli:main"},
        "pytest11": {"colocert.plugin": "colocert.plugin"},
        "colocert.implementations": {
            "miles": "colocert.adapters.miles",
            "reference": "colocert_reference.colocert_impl",
            "skyrl": "colocert.adapters.skyrl",
            "verl": "colocert.adapters.verl",
            "areal": "colocert.adapters.areal",
        },
    }


def test_the_modules_of_the_entry_points_are_in_the_wheel(names: list[str]) -> None:
    adapters = ("colocert/adapters/miles", "colocert/adapters/skyrl")
    modules = ("colocert/cli", "colocert/plugin", *adapters, "colocert_reference/colocert_impl")
    absent = [m for m in modules if f"{m}.py" not in names and f"{m}/__init__.py" not in names]
    assert absent == []


def test_extras(metadata: Message) -> None:
    assert set(metadata.get_all("Provides-Extra", [])) == {"dev", "gpu", "reference", "report"}


def test_the_kit_requires_no_framework(metadata: Message) -> None:
    core = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    heavy = ("torch", "ray", "megatron", "transformers", "peft", "numpy", "matplotlib")
    assert core
    assert [r for r in core if r.startswith(heavy)] == []


def test_licence_and_python(metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"


@pytest.mark.parametrize("module", ["colocert", "colocert.plugin", "colocert.cli", "colocert_reference"])
def test_importing_the_kit_loads_no_framework(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "heavy = ('torch', 'ray', 'megatron', 'transformers', 'peft', 'matplotlib', 'torch_memory_saver')\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & set(heavy)))\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.returncode, found.stdout.strip()) == (0, "[]"), found.stderr

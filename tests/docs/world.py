"""The folder in which the commands of a page are run: a copy of the checkout, and what the pages take for granted.

Knows the names that pages use: `mypkg`, `EVIDENCE-A`, `certificate.json` … Does not know the pages.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from .blocks import ROOT
from .shell import Shell

COPIED = ("tests/docs", "conformance", "fixtures", "reference", "pyproject.toml", "docs", "mkdocs.yml", "gpu_tests")
PACKAGE = '''"""What a reader's package is here: the smallest trainer that conforms, with the reference's loop."""

from dataclasses import replace
from types import SimpleNamespace

from colocert_reference.colocert_impl import implementation as reference
from mypkg.smallest_impl import Trainer, implementation as smallest

claims = replace(smallest.claims, engine_releases=frozenset({"weights", "kv_cache", "cuda_graph"}))
implementation = SimpleNamespace(
    name="mypkg", version="1", claims=claims, trainer=Trainer, driver=reference.driver
)
'''


def copy_of_the_checkout(folder: Path) -> None:
    """The parts of it that commands name."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", ".*")
            shutil.copytree(source, folder / name, ignore=ignored)
        elif source.exists():
            shutil.copy(source, folder / name)
    mutants = folder / "fixtures" / "colocert_fixtures" / "mutants" / "lifecycle"
    chosen = next(m for m in sorted(mutants.glob("*.py")) if not m.name.startswith("_"))
    shutil.copy(chosen, mutants / "NAME.py")


def variables(folder: Path, programs: Path) -> dict[str, str]:
    """The environment: this interpreter under the names that pages use, over the copy of the checkout."""
    programs.mkdir()
    start = "import sys; sys.path[:] = [p for p in sys.path if p]; from {} import {} as main; sys.exit(main())"
    for name, words in {
        "python": "",
        "python3": "",
        "colocert": f'-c "{start.format("colocert.cli", "main")}"',
        "pytest": f'-c "{start.format("pytest", "console_main")}"',
    }.items():
        script = programs / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        script.chmod(0o755)
    roots = os.pathsep.join(str(folder / name) for name in ("conformance", "reference", "fixtures"))
    summary = str(programs / "summary.md")
    return {"GITHUB_STEP_SUMMARY": summary, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": roots}


def package(folder: Path) -> None:
    """`mypkg`, which conforms."""
    (folder / "mypkg").mkdir()
    (folder / "mypkg" / "__init__.py").touch()
    (folder / "mypkg" / "colocert_impl.py").write_text(PACKAGE)
    shutil.copy(ROOT / "tests" / "docs" / "smallest_impl.py", folder / "mypkg")


def recordings(folder: Path) -> None:
    """`TRACES/` and the like: a hand-off of the reference over two ranks, recorded as a real run is."""
    from tests.live import handoffs

    from colocert.record.handoff_scenarios import HANDOFF_SCENARIOS
    from colocert_reference.colocert_impl import implementation

    scenario = next(s for s in HANDOFF_SCENARIOS if s.id == "gpu-lora-three")
    _, made = handoffs.of_a_driver(implementation, scenario, folder / "TRACES")
    for path, name in zip(made, ("a.jsonl", "b.jsonl"), strict=True):
        shutil.copy(path, folder / name)
    shutil.copy(made[0], folder / "TRACE.jsonl")


def evidence(shell: Shell) -> None:
    """A certificate, its evidence, and the same under the names that pages give to two of them."""
    done = shell.run(
        "colocert certify mypkg --profile handoff --certificate certificate.json --evidence evidence >/dev/null"
        " && for name in EVIDENCE-A EVIDENCE-B A B build/evidence; do mkdir -p build && cp -r evidence $name; done"
    )
    assert done.returncode == 0, done.stdout + done.stderr


def make(folder: Path, page: str) -> Shell:
    """A folder for one page, with what its text takes for granted."""
    copy_of_the_checkout(folder)
    shell = Shell(folder, folder.with_name(folder.name + "-state"), variables(folder, folder.with_name("programs")))
    if re.search(r"TRACES?\b|\ba\.jsonl", page):
        recordings(folder)
    if re.search(r"EVIDENCE-A|certificate\.json --evidence|build/evidence|\bdiff A B\b", page):
        package(folder)
        evidence(shell)
        shutil.rmtree(folder / "mypkg")
    if "colocert new mypkg" not in page:
        package(folder)
    return shell


RECORDED = """
import sys
from types import ModuleType, SimpleNamespace

from colocert.rig.saver import StrictSaver
from colocert_reference.colocert_impl import implementation

sys.modules["torch_memory_saver"] = ModuleType("torch_memory_saver")
sys.modules["torch_memory_saver"].torch_memory_saver = StrictSaver(lambda event: None)
rank, CLAIMS = 0, implementation.claims
actor = SimpleNamespace(offload=print, onload=print, train_step=print, update_weights=print)
client = SimpleNamespace(
    release_memory_occupation=print, resume_memory_occupation=print, load_lora_adapter=print, generate=print
)
"""
DONE = """
with torch_memory_saver.region("default", enable_cpu_backup=True):
    torch_memory_saver.alloc(1 << 20)
torch_memory_saver.pause("default")
torch_memory_saver.resume("default")
actor.train_step()
recording.close()
assert not recording.problem, recording.problem
"""
AROUND = {"docs/recording.md": (RECORDED, DONE)}
"""What the Python blocks of a page take for granted, and what makes use of what they did."""

"""Which modules of the reference know the kit, and which need torch."""

from __future__ import annotations

import ast
from pathlib import Path

import colocert_reference

ROOT = Path(colocert_reference.__file__).parent


def imports(path: Path) -> set[str]:
    """The top-level packages that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def users(package: str) -> set[str]:
    return {str(p.relative_to(ROOT)) for p in ROOT.rglob("*.py") if package in imports(p)}


def test_eight_modules_know_the_kit() -> None:
    """Five put the logic on a rig; two put real memory on the kit's stand-in device; one draws."""
    on_a_rig = {"colocert_impl.py", "driver_ports.py", "engine_ports.py", "payload_ports.py", "real/llama_impl.py"}
    assert users("colocert") == {*on_a_rig, "real/host_memory.py", "real/processes.py", "real/pictures.py"}


def test_torch_and_megatron_stay_under_real() -> None:
    """The command line only asks whether torch sees a device, where one is asked for."""
    heavy = users("torch") | users("megatron") | users("torch_memory_saver") | users("ray")
    assert {name for name in heavy if not name.startswith("real/")} == {"__main__.py"}


def test_the_package_real_imports_without_torch() -> None:
    assert not imports(ROOT / "real" / "__init__.py") & {"torch", "megatron", "torch_memory_saver", "numpy"}

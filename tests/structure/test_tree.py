"""The shape of the source tree: which part may import which, no cycle anywhere, and modules that fit in a head."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "colocert": ROOT / "conformance" / "colocert",
    "colocert_reference": ROOT / "reference" / "colocert_reference",
    "colocert_fixtures": ROOT / "fixtures" / "colocert_fixtures",
}
LONGEST = 500

SIDES = {"cli", "plugin", "suite", "report", "baseline", "verify"}
ALLOWED: dict[str, set[str]] = {
    "trace": set(),
    "extras": set(),
    "svg": set(),
    "rules": {"trace"},
    "rig": {"trace", "extras", "device"},
    "expected": {"rules"},
    "judge_trace": {"trace", "rules"},
    "judge_apart": {"trace", "rules"},
    "judge": {"trace", "rules", "record", "expected", "judge_trace"},
    "judge_stream": {"trace", "rules", "record", "expected", "judge", "judge_apart", "judge_trace"},
    "record": {"trace", "rules", "rig", "judge_trace", "extras", "device"},
    "device": {"trace", "extras"},
    "preflight": {"device"},
    "live": {"trace", "rig"},
    "shapes": {"rig"},
    "plan": {"trace", "rules", "rig", "shapes"},
    "plan_svg": {"rules", "plan", "svg"},
    "adapters": {"rig", "extras"},
}
"""A part of the kit, and the parts that its modules may import. Those of `SIDES` sit on top, and are imported by none.

Exploration and controls run the folds in the child that records.
"""


def modules() -> dict[str, Path]:
    """Every module by its name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path) -> Iterator[str]:
    """What a module imports when it is imported: not inside functions, not for a type checker."""

    def of(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                yield from (f"{child.module}.{alias.name}" for alias in child.names)
            yield from of(child)

    yield from of(ast.parse(path.read_text()))


def ours(name: str) -> str:
    """The module of this project that an imported name is, or lies in; empty for others."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


GRAPH = {module: {ours(name) for name in imports(path)} - {"", module} for module, path in MODULES.items()}


def part(module: str) -> str:
    """The part of the kit that a module belongs to; empty for its root and for other packages."""
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] if package == "colocert" else ""


def test_no_module_imports_itself_through_others() -> None:
    graphlib.TopologicalSorter(GRAPH).prepare()


@pytest.mark.parametrize("name", [p for p in dict.fromkeys(map(part, MODULES)) if p])
def test_a_part_of_the_kit_imports_only_what_it_may(name: str) -> None:
    """Rules never import a double, and nothing imports the plugin, the command line or a report."""
    if name.partition("_")[0] in SIDES:
        return
    used = {part(other) for module, others in GRAPH.items() if part(module) == name for other in others}
    assert used - {name, ""} <= ALLOWED[name]


def test_the_kit_imports_neither_the_reference_nor_the_fixtures() -> None:
    """What runs mutants asks for them by name, when it is asked to."""
    kit = [(module, other) for module, others in GRAPH.items() for other in others if module.startswith("colocert.")]
    assert [pair for pair in kit if not f"{pair[1]}.".startswith("colocert.")] == []


def test_every_module_says_what_it_is() -> None:
    """A package that only groups may be empty."""
    texts = {module: path.read_text() for module, path in MODULES.items()}
    assert [m for m, text in texts.items() if text.strip() and not ast.get_docstring(ast.parse(text))] == []


def test_every_module_fits_in_a_head() -> None:
    """The vocabulary of a trace is one list, to be read from top to bottom."""
    lengths = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    assert {m: n for m, n in lengths.items() if n > LONGEST}.keys() <= {"colocert.trace.events"}

"""Source trees of an invented version of a framework, for what an adapter reads off the source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

MakeTree = Callable[[str, str, Mapping[str, str]], Path]


@pytest.fixture
def make_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeTree:
    """Makes a folder with a package of these modules, and names it in a variable of the environment."""

    def make(package: str, variable: str, modules: Mapping[str, str]) -> Path:
        root = tmp_path / f"tree{len(list(tmp_path.iterdir()))}"
        for name, text in {"__init__": "", **modules}.items():
            path = root / package / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setenv(variable, str(root))
        return root

    return make

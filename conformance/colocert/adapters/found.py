"""Where a framework is: named by an environment variable, else installed. Reads its text without importing it.

Knows packages, folders and versions. Does not know any framework.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType


class Framework:
    """A package of the distribution `distribution`, in the folder that `variable` names or among what is installed.

    The folder holds an unpacked wheel or a checkout.
    """

    def __init__(self, package: str, *, distribution: str, variable: str) -> None:
        self.package, self.distribution, self.variable = package, distribution, variable

    def root(self) -> Path | None:
        """The folder that holds the package, or None where there is none."""
        if given := os.environ.get(self.variable):
            return Path(given) if Path(given, self.package, "__init__.py").is_file() else None
        spec = importlib.util.find_spec(self.package)
        return Path(spec.origin).parents[1] if spec and spec.origin else None

    def source(self, module: str) -> str:
        """The text of a module, empty where there is none."""
        root = self.root()
        return _text(root / (module.replace(".", "/") + ".py")) if root else ""

    def version(self) -> str:
        """From the metadata beside the package, else the commit of the checkout."""
        root = self.root()
        if root is None:
            return "not found"
        for distribution in importlib.metadata.distributions(name=self.distribution, path=[str(root)]):
            return distribution.version
        if not (root / ".git").exists():
            return "unknown"
        commit = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
        )
        return f"commit {commit.stdout.strip()}" if commit.returncode == 0 else "unknown"

    def load(self, module: str) -> ModuleType:
        """Imports a module of the framework. Its folder comes last on the path: it hides nothing that is installed.

        Raises `ImportError`, naming what is missing and how to get it.
        """
        root = self.root()
        if root is None:
            given = os.environ.get(self.variable)
            raise ImportError(
                f"{self.package} must be installed ({self.distribution}), or {self.variable} must name a folder that "
                f"holds {self.package}/__init__.py: an unpacked wheel or a checkout (got {given or 'neither'})"
            )
        if str(root) not in sys.path:
            sys.path.append(str(root))
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as missing:
            raise ImportError(
                f"{module} imports {missing.name}, which is not installed: pip install 'colocert[reference]'"
            ) from missing


@functools.cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""

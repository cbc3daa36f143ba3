"""From `--impl` to an implementation object, in the process that will drive it.

Knows the forms that `--impl` takes and every way each can be wrong. Does not know what an implementation does.

    NAME                      an entry point of the group `colocert.implementations`
    pkg.module[:attr]         a module, or an attribute of it
    pkg                       as above, after trying `pkg.colocert_impl`
    path/to/file.py[:attr]    a file
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from colocert.record.manifest import Problem
from colocert.rig.contract import ContractError

GROUP = "colocert.implementations"
DEFAULT_ATTRIBUTES = ("implementation", "Implementation")
USAGE, HARNESS = 4, 11


class ResolveError(Exception):
    """The implementation cannot be had. Carries the `Problem` that the record keeps."""

    def __init__(self, stage: str, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.problem = Problem(stage, " ".join(message.split()), exit_code)


def resolve(impl: str) -> Any:
    """The implementation object that `--impl` names. Raises `ResolveError` with one line that says how to fix it."""
    place, attribute = _split(impl)
    entry = _entry_point(place)
    if entry:
        place, named = _split(entry)
        attribute = attribute or named
    looks_like_path = place.endswith(".py") or os.sep in place or _plain_folder(Path(place))
    module = _from_file(impl, place) if looks_like_path else _from_name(impl, place, bool(attribute))
    return _object(impl, module, attribute)


def _plain_folder(path: Path) -> bool:
    """A folder that no name can import: the package of a checkout, named where it lies, is not one."""
    return path.is_dir() and not any((path / name).is_file() for name in ("__init__.py", "colocert_impl.py"))


def _split(impl: str) -> tuple[str, str]:
    place, colon, attribute = impl.rpartition(":")
    return (place, attribute) if colon else (impl, "")


def _entry_point(name: str) -> str:
    found = [e.value for e in metadata.entry_points(group=GROUP) if e.name == name]
    return found[0] if found else ""


def _known() -> str:
    return ", ".join(sorted({e.name for e in metadata.entry_points(group=GROUP)})) or "none installed"


def _from_file(impl: str, place: str) -> ModuleType:
    path = Path(place)
    if path.is_dir():
        raise ResolveError(
            "find", f"--impl={impl} must name a module or a .py file (got a folder): name a file in it", USAGE
        )
    if not path.is_file():
        raise ResolveError("find", f"--impl={impl} must name a file that exists (got none at {path})", USAGE)
    name = f"colocert_impl_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ResolveError("find", f"--impl={impl} must name a .py file (got {path.name})", USAGE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent.resolve()))
    loader = spec.loader
    _guarded(impl, lambda: loader.exec_module(module), wanted=())
    return module


def _from_name(impl: str, place: str, attribute_given: bool) -> ModuleType:
    names = [place] if attribute_given else [f"{place}.colocert_impl", place]
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ResolveError(
                "find", f"--impl={impl} must be an entry point, a module or a .py file (got {place!r})", USAGE
            )
        module = _guarded(impl, lambda name=name: importlib.import_module(name), wanted=_parents(name))
        if module is not None:
            assert isinstance(module, ModuleType)
            return module
    raise ResolveError(
        "find",
        f"--impl={impl} must be an entry point ({_known()}), a module on the path or a .py file "
        f"(got no module {place})",
        USAGE,
    )


def _parents(name: str) -> tuple[str, ...]:
    parts = name.split(".")
    return tuple(".".join(parts[: i + 1]) for i in range(len(parts)))


def _guarded(impl: str, load: Any, wanted: tuple[str, ...]) -> Any:
    """Runs an import; None if exactly the wanted module is absent; everything else is a `ResolveError`."""
    try:
        return load()
    except SyntaxError as error:
        where = f"{error.filename}:{error.lineno}"
        raise ResolveError(
            "import", f"--impl={impl} must be valid Python (got a syntax error at {where}: {error.msg})", USAGE
        ) from error
    except ModuleNotFoundError as error:
        if error.name in wanted:
            return None
        raise ResolveError(
            "import",
            f"--impl={impl} imports {error.name}, which is not installed: install it, or import it inside the factory",
            HARNESS,
        ) from error
    except ContractError as error:
        raise ResolveError("import", f"--impl={impl}: {error}", USAGE) from error
    except Exception as error:
        raise ResolveError(
            "import", f"--impl={impl} must import without an error (got {type(error).__name__}: {error})", HARNESS
        ) from error


def _object(impl: str, module: ModuleType, attribute: str) -> Any:
    if attribute:
        found: Any = module
        for part in attribute.split("."):
            if not hasattr(found, part):
                raise ResolveError(
                    "find", f"--impl={impl}: {module.__name__} must have {attribute} (got no {part})", USAGE
                )
            found = getattr(found, part)
    else:
        candidates = [getattr(module, name) for name in DEFAULT_ATTRIBUTES if hasattr(module, name)]
        if candidates:
            found = candidates[0]
        elif hasattr(module, "claims"):
            found = module
        else:
            raise ResolveError(
                "find",
                f"--impl={impl}: {module.__name__} must have an `implementation` (got none): "
                "add one, or name it with :attr",
                USAGE,
            )
    return _instance(impl, found)


def _instance(impl: str, found: Any) -> Any:
    if not inspect.isclass(found):
        return found
    if inspect.isabstract(found):
        missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        raise ResolveError(
            "find", f"--impl={impl}: {found.__name__} must define its abstract methods (got none for {missing})", USAGE
        )
    try:
        return found()
    except Exception as error:
        raise ResolveError(
            "import",
            f"--impl={impl}: {found.__name__}() must build without arguments (got {type(error).__name__}: {error})",
            HARNESS,
        ) from error

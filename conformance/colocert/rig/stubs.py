"""Stand-ins for modules that a framework imports unguarded and that are absent here.

Knows how to answer `import` and attribute access. Does not know any framework: names are always given, never guessed,
so that `try: import x` keeps saying no for everything else.

    install(["sglang", "!pkg.kernels"])            sglang and what lies below it, if absent; pkg.kernels in any case
    preset("sglang.srt.constants", KV="kv_cache")  real values where a class will not do

An attribute of a stand-in is a class: it can be subclassed, called, used as a decorator with and without arguments,
subscripted and put into a union. It computes nothing; code that needs a value from it needs a `preset`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import sys
from abc import ABCMeta
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, NoReturn

NEVER = {
    "triton": "torch's compiler probes for it and takes a stand-in for the real one",
    "tabulate": "torch's compiler asks it for a table when the process ends",
}
"""Modules that third parties probe for: stub the module that imports them unguarded instead."""


class _StandInMeta(ABCMeta):
    """The class of stand-in classes. From `ABCMeta`, so that a class may inherit from a stand-in and an ABC."""

    def __getattr__(cls, name: str) -> Any:
        if _is_dunder(name):
            raise AttributeError(name)
        child = _stand_in(name, cls.__module__)
        setattr(cls, name, child)
        return child

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        # A class derived from a stand-in is the framework's own and is built as usual.
        if "_colocert_stand_in" in cls.__dict__ and _decorates(args, kwargs):
            return args[0]
        return super().__call__(*args, **kwargs)

    def __getitem__(cls, item: object) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class _StandIn(metaclass=_StandInMeta):
    """The base of every stand-in attribute."""

    _colocert_stand_in = True

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __init_subclass__(cls, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if _is_dunder(name):
            raise AttributeError(name)
        return getattr(type(self), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if _decorates(args, kwargs) else self

    def __getitem__(self, item: object) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None: ...


class _StandInModule(ModuleType):
    __version__ = "0.0.0"

    def __init__(self, name: str) -> None:
        super().__init__(name, "A stand-in by colocert; nothing in it computes.")
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if _is_dunder(name):
            raise AttributeError(name)
        child = _stand_in(name, self.__name__)
        setattr(self, name, child)
        return child


def _stand_in(name: str, module: str) -> Any:
    return _StandInMeta(name, (_StandIn,), {"_colocert_stand_in": True, "__module__": module})


def _decorates(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return len(args) == 1 and not kwargs and (inspect.isfunction(args[0]) or inspect.isclass(args[0]))


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the names it was given and everything below them."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(fullname == name or fullname.startswith(name + ".") for name in self.names):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_presets.get(module.__name__, {}))


_absent, _replaced = _Finder(), _Finder()
_presets: dict[str, dict[str, Any]] = {}


def install(names: Iterable[str]) -> None:
    """Answers imports of `names` and of modules below them from here on, in this process.

    A plain name is answered only where nothing else finds it; `"!name"` replaces a module that exists. Raises
    `ValueError` for `triton` and `tabulate`, and for a `"!name"` that is already imported.
    """
    for name in names:
        bare = name.removeprefix("!")
        _check(name, bare)
        (_replaced if name != bare else _absent).names.add(bare)
    if _absent not in sys.meta_path:
        sys.meta_path.append(_absent)
    if _replaced not in sys.meta_path:
        sys.meta_path.insert(0, _replaced)


def preset(name: str, **attributes: Any) -> None:
    """Gives the stand-in module `name` these attributes, before or after it is imported.

    Raises `ValueError` where `name` is not below an installed name.
    """
    if not any(finder.find_spec(name) for finder in (_absent, _replaced)):
        raise ValueError(f"preset needs a module that a stand-in answers for (got {name}): install it first")
    _presets.setdefault(name, {}).update(attributes)
    loaded = sys.modules.get(name)
    if isinstance(loaded, _StandInModule):
        vars(loaded).update(attributes)


def is_stand_in(module: ModuleType) -> bool:
    """Whether an imported module is a stand-in."""
    return isinstance(module, _StandInModule)


def _check(name: str, bare: str) -> None:
    root = bare.partition(".")[0]
    if root in NEVER:
        _refuse(f"{root} must never be a stand-in: {NEVER[root]}. Name the module that imports it, as !module")
    if not all(part.isidentifier() for part in bare.split(".")):
        _refuse(f"a stand-in needs a dotted module name, with ! in front to replace a module (got {name!r})")
    loaded = sys.modules.get(bare)
    if name != bare and loaded is not None and not is_stand_in(loaded):
        _refuse(f"{name} must be named before {bare} is imported (it is imported already)")


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)

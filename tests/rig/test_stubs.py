"""Stand-in modules: what they answer, what they leave alone, what they refuse."""

from __future__ import annotations

import abc
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any, Generic, Optional, TypeVar

import pytest

from colocert.rig import stubs

T = TypeVar("T")


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    """Stand-ins stay for a process; a test run is one process, so each test puts everything back."""
    path, modules = list(sys.meta_path), set(sys.modules)
    yield
    sys.meta_path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    for finder in (stubs._absent, stubs._replaced):
        finder.names.clear()
    stubs._presets.clear()


@pytest.fixture
def absent() -> Any:
    stubs.install(["not_here"])
    return importlib.import_module("not_here")


def test_an_absent_name_and_everything_below_it_imports(absent: Any) -> None:
    below = importlib.import_module("not_here.deep.down")
    assert stubs.is_stand_in(absent)
    assert stubs.is_stand_in(below)
    assert absent.deep.down is below


def test_a_name_that_was_not_given_stays_absent(absent: Any) -> None:
    assert importlib.util.find_spec("not_here_either") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("not_here_either")


def test_a_module_that_exists_is_not_touched() -> None:
    stubs.install(["wave"])
    assert not stubs.is_stand_in(importlib.import_module("wave"))


def test_an_exclamation_mark_replaces_a_module_that_exists() -> None:
    sys.modules.pop("wave", None)
    stubs.install(["!wave"])
    assert stubs.is_stand_in(importlib.import_module("wave"))


def test_replacing_a_module_that_is_imported_is_refused() -> None:
    with pytest.raises(ValueError, match="before sys is imported"):
        stubs.install(["!sys"])


def test_replacing_twice_is_fine() -> None:
    sys.modules.pop("wave", None)
    stubs.install(["!wave"])
    importlib.import_module("wave")
    stubs.install(["!wave"])


def test_installing_twice_answers_once(absent: Any) -> None:
    stubs.install(["not_here"])
    assert sys.meta_path.count(stubs._absent) == 1


@pytest.mark.parametrize("name", ["triton", "triton.language", "!triton", "tabulate"])
def test_probed_modules_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ValueError, match="must never be a stand-in: torch's compiler"):
        stubs.install([name])
    assert not stubs._absent.names


@pytest.mark.parametrize("name", ["", "!", "a..b", "a/b"])
def test_only_module_names_are_taken(name: str) -> None:
    with pytest.raises(ValueError, match="dotted module name"):
        stubs.install([name])


def test_a_preset_has_real_values_before_and_after_the_import() -> None:
    stubs.install(["not_here"])
    stubs.preset("not_here.constants", KV="kv_cache")
    constants = importlib.import_module("not_here.constants")
    stubs.preset("not_here.constants", GRAPH="cuda_graph")
    assert (constants.KV, constants.GRAPH) == ("kv_cache", "cuda_graph")


def test_a_preset_outside_the_installed_names_is_refused() -> None:
    with pytest.raises(ValueError, match="install it first"):
        stubs.preset("not_here.constants", KV="kv_cache")


def test_an_attribute_is_a_class_and_the_same_one_each_time(absent: Any) -> None:
    assert absent.Thing is absent.Thing
    assert absent.Thing.Inner is absent.Thing.Inner
    assert isinstance(absent.Thing.Inner, type)


def test_dunder_attributes_stay_absent(absent: Any) -> None:
    for owner in (absent, absent.Thing, absent.Thing()):
        assert not hasattr(owner, "__wrapped__")
    assert absent.__version__ == "0.0.0"


def test_it_decorates_with_and_without_arguments(absent: Any) -> None:
    def one() -> int:
        return 1

    class Two: ...

    for decorated in (one, Two):
        assert absent.bare(decorated) is decorated
        assert absent.called(option=True)(decorated) is decorated
        assert absent.deco.rator("name")(decorated) is decorated


def test_it_can_be_subclassed_beside_other_bases(absent: Any) -> None:
    class Own(absent.Base, abc.ABC, Generic[T], option=True):  # type: ignore[misc, call-arg]
        def __init__(self, value: int) -> None:
            self.value = value

    class TakesAClass(absent.Base):  # type: ignore[misc]
        def __init__(self, cls: type) -> None:
            self.cls = cls

    assert Own(7).value == 7
    assert TakesAClass(int).cls is int


def test_it_serves_in_annotations(absent: Any) -> None:
    assert absent.Thing[int] is absent.Thing
    assert (absent.Thing | None).__args__ == (absent.Thing, type(None))
    assert (None | absent.Thing[int]).__args__ == (type(None), absent.Thing)
    assert Optional[absent.Thing] == (absent.Thing | None)  # noqa: UP045


def test_it_is_an_empty_iterable_and_a_context(absent: Any) -> None:
    assert list(absent.Kind) == []
    assert list(absent.Kind()) == []
    with absent.Kind("x") as entered:
        assert entered.anything() is not None
    assert not isinstance(3, absent.Kind)


def test_from_import_works() -> None:
    stubs.install(["not_here"])
    names: dict[str, Any] = {}
    exec("from not_here.sub import A, b; from not_here import C", names)
    assert all(isinstance(names[n], type) for n in "AbC")

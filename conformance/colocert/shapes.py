"""Shapes: what a colocated run is made of, as figures that each say where they come from.

Knows the TOML of a shape, its fields and how a formula is worked out. Does not know doubles, phases or what fits.

A figure is `measured` (a value with the source that states it) or `computed` (a formula over other figures, with
`section.field` for names; a choice is a formula of one number and a note). Sizes are bytes.
"""

from __future__ import annotations

import ast
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec

from colocert.rig.contract import Region

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = "colocert_fixtures"
MEASURED, COMPUTED = "measured", "computed"


class ShapeError(ValueError):
    """The shape cannot be used; the text is one line."""


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One number, and where it comes from: `source`, or `formula`. `note` says what a reader cannot see from these."""

    kind: Literal["measured", "computed"]
    value: float | None = None
    source: str = ""
    formula: str = ""
    note: str = ""

    @property
    def number(self) -> float:
        """The value; formulas are worked out when the shape is loaded."""
        assert self.value is not None, "the shape was not loaded with load()"
        return self.value

    @property
    def nbytes(self) -> int:
        """The value as whole bytes."""
        return round(self.number)

    @property
    def origin(self) -> str:
        """Source or formula, with the note."""
        return (self.source or self.formula) + (f" ({self.note})" if self.note else "")


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`gpu_reserved` are the bytes of a GPU that neither side can have: contexts."""

    nodes: Figure
    gpus_per_node: Figure
    gpu_bytes: Figure
    gpu_reserved: Figure
    host_bytes: Figure


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    parameters: Figure


class Lora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`parameters` are the adapter parameters that one GPU holds."""

    rank: Figure
    parameters: Figure


class Dtypes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes a parameter."""

    base: Figure
    adapter: Figure
    grads: Figure
    optimizer: Figure
    engine: Figure


class Parallelism(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """GPUs in one group of each kind; `engine`: of one engine."""

    tensor: Figure
    pipeline: Figure
    context: Figure
    expert: Figure
    data: Figure
    engine: Figure


class TrainerBytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes on one GPU. `rest`: what else is backed up; `communicators`: taken by the first step, until a sleep."""

    base: Figure
    adapter: Figure
    optimizer: Figure
    rest: Figure
    grads: Figure
    communicators: Figure
    activations: Figure


class EngineBytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes on one GPU."""

    weights: Figure
    kv_cache: Figure
    cuda_graph: Figure


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run: machine, model, adapter and what each side holds. `facts` are figures that formulas are made of."""

    name: str
    title: str
    machine: Machine
    facts: dict[str, Figure]
    model: Model
    lora: Lora
    dtypes: Dtypes
    parallelism: Parallelism
    trainer: TrainerBytes
    engine: EngineBytes

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """Every figure by its name, `section.field`."""
        for section in self.__struct_fields__:
            held = getattr(self, section)
            fields = held if isinstance(held, dict) else msgspec.structs.asdict(held) if not _plain(held) else {}
            for field, figure in fields.items():
                if isinstance(figure, Figure):
                    yield f"{section}.{field}", figure


def regions_of(shape: Shape) -> Mapping[str, tuple[Region, ...]]:
    """The regions of one trainer rank, for `Config.regions`: the sizes of the shape under the tags of the saver."""
    sizes = shape.trainer
    backed = (
        ("base", "base", sizes.base),
        ("adapter", "adapter", sizes.adapter),
        ("optimizer", "optimizer", sizes.optimizer),
        ("rest", "other", sizes.rest),
    )
    return {
        "default": tuple(Region(name, kind, size.nbytes, True) for name, kind, size in backed if size.nbytes),
        "grad_buffer": (Region("grads", "grads", sizes.grads.nbytes, False),),
    }


def engine_sizes_of(shape: Shape) -> Mapping[str, int]:
    """The bytes of each engine tag on one GPU."""
    return {tag: getattr(shape.engine, tag).nbytes for tag in shape.engine.__struct_fields__}


# ---- finding and reading


def names() -> list[str]:
    """The shapes that ship with the fixtures."""
    if find_spec(PACKAGE) is None:
        return []
    found = (entry.name for entry in (resources.files(PACKAGE) / "shapes").iterdir())
    return sorted(name[:-5] for name in found if name.endswith(".toml"))


def load(shape: str) -> Shape:
    """The shape of that name, or of that path to a TOML file. Raises `ShapeError`."""
    if shape.endswith(".toml") or "/" in shape:
        try:
            text = Path(shape).read_bytes()
        except OSError as error:
            raise ShapeError(f"{shape}: cannot be read ({error.strerror})") from error
        return parse(text, shape)
    known = names()
    if shape not in known:
        have = ", ".join(known) or f"none, as {PACKAGE} is not installed"
        raise ShapeError(f"SHAPE must be a path to a .toml or one of {have} (got {shape!r})")
    return parse((resources.files(PACKAGE) / "shapes" / f"{shape}.toml").read_bytes(), f"{shape}.toml")


def parse(text: bytes, where: str) -> Shape:
    """The shape that a TOML text holds, with its formulas worked out. Raises `ShapeError`."""
    try:
        raw = tomllib.loads(text.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ShapeError(f"{where}: not a TOML file: {error}") from error
    try:
        shape = msgspec.convert(raw, Shape)
    except msgspec.ValidationError as error:
        raise ShapeError(f"{where}: {error}") from error
    try:
        numbers = _Numbers(dict(shape.figures()))
        values = {name: numbers.of(name) for name in numbers.figures}
        _check_counts(values)
    except ShapeError as error:
        raise ShapeError(f"{where}: {error}") from error
    return _filled(shape, values)


def _plain(held: object) -> bool:
    return not isinstance(held, msgspec.Struct)


def _filled(shape: Shape, values: Mapping[str, float]) -> Shape:
    """The shape with every figure's value in it."""

    def fill(section: str, held: Any) -> Any:
        if isinstance(held, dict):
            return {f: msgspec.structs.replace(v, value=values[f"{section}.{f}"]) for f, v in held.items()}
        if _plain(held):
            return held
        fields = msgspec.structs.asdict(held)
        whole = {
            f: msgspec.structs.replace(v, value=values[f"{section}.{f}"]) if isinstance(v, Figure) else v
            for f, v in fields.items()
        }
        return type(held)(**whole)

    return Shape(**{section: fill(section, getattr(shape, section)) for section in Shape.__struct_fields__})


def _check_counts(values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if not math.isfinite(value) or value < 0:
            raise ShapeError(f"{name} must be 0 or more (got {value:g})")
        counted = name.startswith("parallelism.") or name in ("machine.nodes", "machine.gpus_per_node", "lora.rank")
        if counted and (value < 1 or value != int(value)):
            raise ShapeError(f"{name} must be a whole number of 1 or more (got {value:g})")


# ---- formulas

_OPERATORS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_LARGEST_POWER = 64


class _Numbers:
    """Works formulas out, each when it is asked for; a formula that leads back to itself is refused."""

    def __init__(self, figures: Mapping[str, Figure]) -> None:
        self.figures = figures
        self._known: dict[str, float] = {}
        self._open: list[str] = []

    def of(self, name: str) -> float:
        if name in self._known:
            return self._known[name]
        figure = self.figures[name]
        if figure.kind == MEASURED and (figure.value is None or not figure.source or figure.formula):
            raise ShapeError(f"{name} is measured, and must have a value and its source and no formula")
        if figure.kind == COMPUTED and (figure.value is not None or not figure.formula or figure.source):
            raise ShapeError(f"{name} is computed, and must have a formula and neither value nor source")
        if name in self._open:
            raise ShapeError(f"{name} leads back to itself: {' -> '.join([*self._open, name])}")
        self._open.append(name)
        self._known[name] = figure.value if figure.value is not None else self._formula(name, figure.formula)
        self._open.pop()
        return self._known[name]

    def _formula(self, name: str, text: str) -> float:
        try:
            return float(self._value(ast.parse(text, mode="eval").body))
        except SyntaxError as error:
            raise ShapeError(f"{name}: the formula {text!r} cannot be read") from error
        except (ArithmeticError, TypeError) as error:
            raise ShapeError(f"{name}: the formula {text!r} has no value ({error})") from error
        except LookupError as error:
            raise ShapeError(f"{name}: the formula {text!r} may hold numbers, figures and + - * / // ** ()") from error

    def _value(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node.value
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if name not in self.figures:
                raise ShapeError(f"{self._open[-1]}: its formula names {name}, which the shape does not have")
            return self.of(name)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = self._value(node.left), self._value(node.right)
            if isinstance(node.op, ast.Pow) and abs(right) > _LARGEST_POWER:
                raise ArithmeticError(f"power of {right}")
            return _OPERATORS[type(node.op)](left, right)
        raise LookupError

"""The catalogue: the rules as data, read from the TOML files that ship beside this module.

Knows sentences, levels, codes, conditions and reports. Does not know how a rule is judged beyond the fold's name.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import sys
from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

import msgspec

from colocert.rules.conditions import holds

if TYPE_CHECKING:
    from colocert.rules.fold import BaseFold

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROFILES: tuple[str, ...] = (
    "lifecycle",
    "handoff",
    "adapter-sync",
    "sync-payload",
    "frozen-offload",
    "group",
    "engine",
    "live",
)

RUNNER_CODES: Mapping[str, str] = {
    "hang": "the implementation did not return within the deadline",
    "died": "the implementation's process ended",
    "untestable": "a claim was made, and none of the rules it binds was exercised",
}
"""Codes that any rule can fail with, given by the runner and the judge instead of a fold."""


class Code(msgspec.Struct, frozen=True):
    """One way to break a rule, with the claims under which it is judged."""

    name: str
    text: str
    binds: str


class Rule(msgspec.Struct, frozen=True):
    """One rule of the catalogue. `scenarios` are those that exercise it; `explore` whether exploration judges it."""

    id: str
    profile: str
    level: str
    binds: str
    sentence: str
    breaks: str
    fix: str
    seen: tuple[str, ...]
    codes: tuple[Code, ...]
    scenarios: tuple[str, ...]
    explore: bool = True

    def bound(self, claims: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of the codes that these claims bind; none if the rule is not applicable."""
        if not holds(self.binds, claims):
            return ()
        return tuple(code.name for code in self.codes if holds(code.binds, claims))


def _rule(profile: str, raw: dict[str, Any]) -> Rule:
    codes = tuple(
        Code(name, c if isinstance(c, str) else c["text"], "" if isinstance(c, str) else c["binds"])
        for name, c in raw.pop("codes").items()
    )
    raw["seen"], raw["scenarios"] = tuple(raw["seen"]), tuple(raw["scenarios"])
    return Rule(profile=profile, codes=codes, **raw)


def _sources() -> list[tuple[str, bytes]]:
    folder = resources.files("colocert.rules")
    return [(p, file.read_bytes()) for p in PROFILES if (file := folder / f"{p.replace('-', '_')}.toml").is_file()]


@functools.cache
def catalogue() -> dict[str, Rule]:
    """Every rule by id, in the order of the profiles and then of the files."""
    rules: dict[str, Rule] = {}
    for profile, source in _sources():
        for raw in tomllib.loads(source.decode())["rule"]:
            rules[raw["id"]] = _rule(profile, raw)
    return rules


@functools.cache
def catalogue_digest() -> str:
    """SHA-256 over the catalogue's files."""
    digest = hashlib.sha256()
    for profile, source in _sources():
        digest.update(profile.encode() + b"\0" + source + b"\0")
    return digest.hexdigest()


FOLDS: Mapping[str, type[BaseFold]]
"""The fold of each rule. Imported when it is first asked for: who only reads the catalogue does without."""

_FOLDED_IN = (
    "lifecycle",
    "recovery",
    "handoff",
    "handoff_state",
    "adapter_sync",
    "adapter_sync_served",
    "sync_payload",
    "frozen_offload",
    "group",
    "engine",
    "live",
    "live_same",
)


def __getattr__(name: str) -> Any:
    if name != "FOLDS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _folds()


@functools.cache
def _folds() -> dict[str, type[BaseFold]]:
    from colocert.rules.fold import BaseFold

    found: dict[str, type[BaseFold]] = {}
    for module in (importlib.import_module(f"colocert.rules.{name}") for name in _FOLDED_IN):
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, BaseFold) and value.__module__ == module.__name__:
                found[value.rule] = value
    return found


def profiles_with_rules() -> tuple[str, ...]:
    """The profiles that this version has rules for."""
    return tuple(dict.fromkeys(rule.profile for rule in catalogue().values()))

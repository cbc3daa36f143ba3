"""What an implementation is: claims, configuration, and one factory a profile.

Knows the shapes and checks them when an implementation is loaded. Does not know scenarios, rules or any framework.

An implementation is any object with `name`, `version`, `claims` and one factory a profile; inheriting from
`Implementation` only helps a type checker. The timeline of one scenario, in a process of the suite's own:

    implementation imported once -> claims read
    rig built (fresh doubles) -> trainer(rig) -> sleep() wake_up() train() ... -> close()
    rig undone (patches, stubs)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, get_type_hints

FACTORIES: Mapping[str, str] = MappingProxyType(
    {
        "lifecycle": "trainer",
        "handoff": "driver",
        "adapter-sync": "weight_sync",
        "sync-payload": "payload_sync",
        "frozen-offload": "frozen_offload",
        "group": "train_group",
        "engine": "engine",
        "live": "live",
    }
)
"""The factory that a profile needs; an implementation without it does not claim the profile."""


class ContractError(Exception):
    """The implementation does not have the shape of one: what must hold, what was got, how to fix it."""


@dataclass(frozen=True, kw_only=True)
class Claims:
    """What an implementation says it supports. Each claim binds rules; nothing is assumed, so nothing has a default.

    Sets are given as any collection of the named members. See the contract page for what each one binds.
    """

    lora: bool
    multi_lora: bool
    full_parameter: bool
    early_grad_release: bool
    offload_train_optional: bool
    rematerialize: bool
    group_teardown: bool
    peak_device: frozenset[str]
    gpu_peak_with_critic: bool
    engine_releases: frozenset[str]
    resident_while_released: frozenset[str]
    adapter_source: str
    file_backed_frozen: bool
    versions: bool
    base_requests_in_lora_mode: bool
    sync_strategies: frozenset[str]
    disaggregated: bool
    replacement: bool
    retained_backup: bool
    gradients_traced: bool

    def __new__(cls, *values: object, **stated: object) -> Claims:
        """Says in one line what is missing and what does not exist, as `of` does, before the claims are set."""
        if stated and not values:
            cls._check_names(stated)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for name, members in _SETS.items():
            object.__setattr__(self, name, _as_set(name, getattr(self, name), members))
        for name, hint in hints.items():
            value = getattr(self, name)
            if hint is bool and not isinstance(value, bool):
                raise ContractError(f"claim {name} must be True or False (got {value!r})")
        if self.adapter_source not in ("resident", "host", "reloaded"):
            raise ContractError(
                f"claim adapter_source must be resident, host or reloaded (got {self.adapter_source!r})"
            )

    @classmethod
    def of(cls, stated: object) -> Claims:
        """The claims that an implementation states: a `Claims`, a mapping, or any object with those attributes.

        Raises `ContractError` naming every missing and every unknown claim.
        """
        if isinstance(stated, cls):
            return stated
        facts = dict(stated) if isinstance(stated, Mapping) else _public(stated)
        cls._check_names(facts)
        return cls(**facts)

    @classmethod
    def _check_names(cls, stated: Mapping[str, object]) -> None:
        names = {f.name for f in dataclasses.fields(cls)}
        missing, unknown = sorted(names - set(stated)), sorted(set(stated) - names)
        if missing or unknown:
            raise ContractError(
                "claims must state each of the "
                + str(len(names))
                + " claims and nothing else (got"
                + (f" none for {', '.join(missing)}" if missing else "")
                + (" and" if missing and unknown else "")
                + (f" unknown {', '.join(unknown)}" if unknown else "")
                + "): `colocert new` writes the full list"
            )

    def facts(self) -> dict[str, Any]:
        """The claims as plain data, sets sorted."""
        return {
            f.name: sorted(v) if isinstance(v := getattr(self, f.name), frozenset) else v
            for f in dataclasses.fields(self)
        }


_SETS = {
    "peak_device": ("cpu", "gpu"),
    "engine_releases": ("weights", "kv_cache", "cuda_graph"),
    "resident_while_released": ("adapters", "grads", "optimizer", "params"),
    "sync_strategies": ("adapter", "merged", "full", "fsdp"),
}


def _as_set(name: str, value: object, members: tuple[str, ...]) -> frozenset[str]:
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise ContractError(f"claim {name} must be a set of {', '.join(members)} (got {value!r})")
    found = frozenset(value)
    if unknown := sorted(str(v) for v in found - set(members)):
        raise ContractError(f"claim {name} may only name {', '.join(members)} (got {', '.join(unknown)})")
    return found


def _public(stated: object) -> dict[str, Any]:
    return {name: getattr(stated, name) for name in dir(stated) if not name.startswith("_")}


@dataclass(frozen=True)
class Region:
    """One allocation that the saver starts with: what it holds (`kind`), its size in bytes, whether it is backed up."""

    name: str
    kind: str
    nbytes: int
    backup: bool


MIB = 1 << 20

ENGINE_SIZES: Mapping[str, int] = MappingProxyType({"weights": 64 * MIB, "kv_cache": 128 * MIB, "cuda_graph": 8 * MIB})
"""Bytes of each tag of an engine where no shape says otherwise."""

LORA_REGIONS: Mapping[str, tuple[Region, ...]] = MappingProxyType(
    {
        "default": (
            Region("base", "base", 64 * MIB, True),
            Region("adapter", "adapter", 4 * MIB, True),
            Region("optimizer", "optimizer", 8 * MIB, True),
        ),
        "grad_buffer": (Region("grads", "grads", 4 * MIB, False),),
    }
)

FULL_REGIONS: Mapping[str, tuple[Region, ...]] = MappingProxyType(
    {
        "default": (Region("base", "base", 64 * MIB, True), Region("optimizer", "optimizer", 128 * MIB, True)),
        "grad_buffer": (Region("grads", "grads", 64 * MIB, False),),
    }
)

REMATERIALIZE_REGIONS: Mapping[str, tuple[Region, ...]] = MappingProxyType(
    {
        "default": (Region("master", "optimizer", 192 * MIB, True),),
        "grad_buffer": (Region("grads", "grads", 64 * MIB, False),),
        "param_buffer": (Region("params", "params", 64 * MIB, False),),
    }
)

MULTI_LORA_REGIONS: Mapping[str, tuple[Region, ...]] = MappingProxyType(
    {
        "default": (
            Region("base", "base", 64 * MIB, True),
            Region("adapter.a", "adapter", 4 * MIB, True),
            Region("adapter.b", "adapter", 4 * MIB, True),
            Region("optimizer", "optimizer", 16 * MIB, True),
        ),
        "grad_buffer": (Region("grads.a", "grads", 4 * MIB, False), Region("grads.b", "grads", 4 * MIB, False)),
    }
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """What a scenario is. An implementation reads it in its factory and builds itself accordingly.

    `accumulate` is the number of `train()` calls that make one optimizer step: gradients are live in between.
    `evaluate`: an evaluation and a checkpoint come between iterations; `resample`: an iteration has a second rollout
    without a sync in between. `ranks` trainers share the device with `engines` engines; with `use_critic`, as many
    critic ranks do too. `engine_mirror`: the engine keeps its weights on the host while released. `groups` says whether
    process groups exist when the factory runs. Sizes in `regions` and `engine_sizes` are bytes.
    """

    lora: bool
    multi_lora: bool = False
    peak_device: str = "gpu"
    colocated: bool = True
    strategy: str = "megatron"
    merge_lora: bool = False
    offload_train: bool = True
    offload_rollout: bool = True
    use_critic: bool = False
    evaluate: bool = False
    resample: bool = False
    rematerialize: bool = False
    role: str = "actor"
    regions: Mapping[str, tuple[Region, ...]] = field(default_factory=lambda: LORA_REGIONS)
    ranks: int = 1
    engines: int = 1
    engine_mirror: bool = True
    engine_sizes: Mapping[str, int] = field(default_factory=lambda: ENGINE_SIZES)
    engine_server: str = "strict"
    engine_releases: frozenset[str] = frozenset({"weights", "kv_cache", "cuda_graph"})
    groups: str = "present"
    accumulate: int = 1

    def facts(self) -> dict[str, Any]:
        """The configuration as plain data; regions as tag to [name, kind, bytes, backup]."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "regions"}
        plain["engine_releases"] = sorted(self.engine_releases)
        plain["engine_sizes"] = dict(self.engine_sizes)
        plain["regions"] = {tag: [[r.name, r.kind, r.nbytes, r.backup] for r in rs] for tag, rs in self.regions.items()}
        return plain


class Trainer(Protocol):
    """What `trainer(rig)` returns: the training worker of one rank. Any method may be a coroutine.

    Optional beside these: `offload_grad_buffer()`, `clear_memory()`, `believed()` (tag to released, from the
    framework's own flags; a tag it does not name is not judged) and `fingerprint()` (a hashable value; equal
    fingerprints promise equal behaviour from here on, which lets exploration merge sequences).
    """

    def sleep(self) -> Any: ...
    def wake_up(self) -> Any: ...
    def train(self) -> Any: ...
    def update_weights(self) -> Any: ...
    def close(self) -> Any: ...


TRAINER_METHODS = ("sleep", "wake_up", "train", "update_weights", "close")


class Implementation:
    """A base for implementations that like type checking; `--impl` takes any object of this shape.

    Define `name`, `version`, `claims`, and of the factories `trainer driver weight_sync payload_sync frozen_offload
    train_group engine live` those that you have; a missing one means the profile is not claimed. `build_cost` may be
    "high" where building a trainer takes over a millisecond or so: exploration then injects faults to a lower depth.
    """

    name: str
    version: str
    claims: Claims | Mapping[str, Any]
    build_cost: str = "low"


def check_implementation(found: object, where: str) -> tuple[str, str, Claims, tuple[str, ...]]:
    """Name, version, claims and claimed profiles of an implementation object.

    Raises `ContractError` if it has no name, version or valid claims, or a factory that is not callable.
    """
    for attribute in ("name", "version", "claims"):
        if not hasattr(found, attribute):
            raise ContractError(f"{where}: an implementation has name, version and claims (got no {attribute})")
    claims = Claims.of(found.claims)  # type: ignore[attr-defined]
    profiles = []
    for profile, factory in FACTORIES.items():
        made = getattr(found, factory, None)
        if made is not None and not callable(made):
            raise ContractError(f"{where}: {factory} must be a callable that takes the rig (got {made!r})")
        if made is not None:
            profiles.append(profile)
    return str(found.name), str(found.version), claims, tuple(profiles)  # type: ignore[attr-defined]

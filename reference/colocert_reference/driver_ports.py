"""The driver's ports over a colocert rig: all ranks and all engines, called remotely and awaited together.

Knows the rig's handles. Does not know the order of a hand-off.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from colocert import Rig
from colocert_reference.driver import Driver, DriverSettings
from colocert_reference.group import GroupError


class Everyone:
    """A call to each of several remote objects, returning when all have answered."""

    def __init__(self, rig: Rig, members: list[Any]) -> None:
        self.rig = rig
        self.members = members
        self.handles = [rig.remote(member) for member in members]

    def call(self, method: str, *args: Any) -> list[Any]:
        """Awaits every member, then raises `GroupError` if any raised."""
        issued = [getattr(handle, method).remote(*args) for handle in self.handles]
        results: list[Any] = []
        errors: dict[int, Exception] = {}
        for i, ref in enumerate(issued):
            try:
                results.append(self.rig.get(ref))
            except Exception as error:
                errors[i] = error
        if errors:
            raise GroupError(method, errors)
        return results


class RigTrainers:
    """The trainer ranks of a rig, or these of its ranks."""

    def __init__(self, rig: Rig, members: list[Any] | None = None) -> None:
        self.everyone = Everyone(rig, rig.trainers if members is None else members)

    def init(self) -> None:
        self.everyone.call("init")

    def offload_grad_buffer(self) -> None:
        self.everyone.call("offload_grad_buffer")

    def clear_memory(self) -> None:
        self.everyone.call("clear_memory")

    def sleep(self) -> None:
        self.everyone.call("sleep")

    def update_weights(self) -> None:
        self.everyone.call("update_weights")

    def wake_up(self) -> None:
        self.everyone.call("wake_up")

    def train(self) -> None:
        self.everyone.call("train")


class RigEngines:
    """The engines of a rig. A call that some engine has already carried out goes to the others only."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.everyone = Everyone(rig, rig.engines)

    def released(self) -> Collection[str]:
        return set().union(*(engine.released for engine in self.rig.engines))

    def release(self, tags: Collection[str]) -> None:
        self._move("release", tags, released=False)

    def resume(self, tags: Collection[str]) -> None:
        self._move("resume", tags, released=True)

    def _move(self, call: str, tags: Collection[str], *, released: bool) -> None:
        for tag in tags:
            due = [e for e in self.rig.engines if (tag in e.released) is released]
            Everyone(self.rig, due).call(call, [tag])

    def drain(self) -> None:
        self.everyone.call("drain")

    def flush(self) -> None:
        self.everyone.call("flush")

    def admit(self) -> None:
        self.everyone.call("admit")

    def generate(self) -> None:
        self.everyone.call("generate")


def settings_of(rig: Rig, kind: type[DriverSettings] = DriverSettings) -> DriverSettings:
    """What the scenario asks of a driver, checked. Raises `ImpossibleConfiguration`."""
    config = rig.config
    settings = kind(
        peak_device=config.peak_device,
        lora=config.lora,
        releasable=config.engine_releases,
        offload_train=config.offload_train,
        offload_rollout=config.offload_rollout,
        use_critic=config.use_critic,
        rollouts=1 + config.resample + config.evaluate,
    )
    settings.check()
    return settings


def critics_of(rig: Rig) -> RigTrainers | None:
    """The critic ranks of a rig; None where it has none."""
    return RigTrainers(rig, list(rig.critics)) if rig.critics else None


def driver(rig: Rig) -> Driver:
    """The reference driver on a rig."""
    settings = settings_of(rig)
    return Driver(RigTrainers(rig), RigEngines(rig), settings, critics_of(rig))

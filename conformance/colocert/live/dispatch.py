"""What stands in the place of a weight sync's, a group's and a worker group's methods: the same call, with events.

Knows them by the names of their methods. Does not know what a call does, files or frameworks. Of a worker group it is
seen that a call which moves memory returned: the kinds that it names are then where it put them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from colocert.live.wrap import Patches, _calls, _named, _spanning
from colocert.trace.events import Move, SaverAlloc

if TYPE_CHECKING:
    from colocert.live.recording import Recording

SYNC_CALLS = ("after_build", "train_step", "forward", "sync")
GROUP_CALLS = ("onload", "offload", "offload_grad_buffer", "clear_memory", "train", "update_weights")
WORKER_CALLS = ("offload", "backload")
KINDS = ("model", "adapters", "optimizer", "grads")


def wrap_weight_sync(recording: Recording, patches: Patches, sync: Any, methods: Mapping[str, str]) -> None:
    """Records the calls of the object that decides who is on the device for a weight sync."""
    _wrap(recording, patches, sync, "weight_sync", SYNC_CALLS, methods)
    recording.watch("syncs", "served")


def wrap_group(recording: Recording, patches: Patches, group: Any, methods: Mapping[str, str]) -> None:
    """Records the calls of a group of trainers."""
    _wrap(recording, patches, group, "group", GROUP_CALLS, methods)
    recording.watch("group")


def _wrap(
    recording: Recording,
    patches: Patches,
    target: Any,
    actor: str,
    known: tuple[str, ...],
    methods: Mapping[str, str],
) -> None:
    for call, method in _named(target, methods, known, actor.replace("_", " ")).items():
        patches.put(target, method, _calls(recording, getattr(target, method), actor, call, recording.owner))


class Storages:
    """The storages of one role, a kind at a time, as calls that returned have left them."""

    def __init__(self, recording: Recording, role: str, kinds: Mapping[str, int], offloaded: Iterable[str]) -> None:
        self._recording, self.role, self.kinds = recording, role, dict(kinds)
        self._off = set(offloaded)

    def forget(self) -> None:
        """A forked child's workers are the same."""

    def state(self) -> list[Any]:
        """What there is, and what of it is off the device, as events."""
        place: dict[str, Any] = {"rank": self._recording.rank, "owner": self.role}
        found: list[Any] = [SaverAlloc(self.role, kind, n, False, kind, **place) for kind, n in self.kinds.items()]
        return [*found, *(Move(self.role, kind, [kind], "host", 0, rank=place["rank"]) for kind in sorted(self._off))]

    def moved(self, call: str, kinds: Iterable[str]) -> None:
        """A call returned: these kinds are off the device, or on it. What was there already is not moved."""
        for kind in kinds:
            if kind in self.kinds and (kind in self._off) is (call == "backload"):
                (self._off.add if call == "offload" else self._off.discard)(kind)
                to = "host" if call == "offload" else "device"
                self._recording.emit(Move(self.role, kind, [kind], to, self.kinds[kind], rank=self._recording.rank))


def wrap_worker(
    recording: Recording,
    patches: Patches,
    worker: Any,
    role: str,
    kinds: Mapping[str, int],
    offloaded: Iterable[str],
    kinds_of: Callable[..., Iterable[str]] | None,
    methods: Mapping[str, str],
) -> None:
    """Records what a role's workers move. Raises `TypeError` for an unknown call, `ValueError` for another kind."""
    found = _named(worker, methods, WORKER_CALLS, "worker group")
    if role in ("", "engine", "driver") or not kinds or set(kinds) - set(KINDS):
        raise ValueError(
            f"a worker group has a role of its own and bytes of {', '.join(KINDS)} (got {role!r}, {', '.join(kinds)})"
        )
    storages = Storages(recording, role, kinds, offloaded)
    patches.keep(storages)
    if recording.started:
        for event in storages.state():
            recording.emit(event)
    for call, method in found.items():

        def start(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
            return list(storages.kinds if kinds_of is None else kinds_of(*args, **kwargs))

        def after(named: list[str] | None, result: object, call: str = call) -> None:
            storages.moved(call, named or ())

        patches.put(worker, method, _spanning(recording, getattr(worker, method), start, after, lambda m, e: None))
    recording.watch("moves")

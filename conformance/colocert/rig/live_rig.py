"""The rig of a live pair: a real device, processes started on it, and what they hold.

Knows what `live(rig)` is given and what it must return. Does not know scenarios or rules.

    live(rig) -> a pair in training: the trainer on the device, the engine's releasable tags released
        train_step(batch) ... to_rollout() generate(prompt, seed, adapter) ... to_training() ... close()
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from colocert.device import Child, DeviceError, Machine, Outcome
from colocert.device import ledger as device_ledger
from colocert.device import start as start_child
from colocert.rig.contract import Claims, Config
from colocert.rig.live_device import LiveDevice
from colocert.rig.live_host import HostHeld, host_held
from colocert.rig.rig import Rig
from colocert.trace.events import AnyEvent, LevelsSeen

TRAINER, ENGINE = "trainer", "engine"
GIB = 1 << 30
CHILD_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class LiveConfig(Config):
    """What a live scenario is. `adapters`: the names of the adapters that are trained and served; none without LoRA.

    `device` is `host` (the real saver over a stand-in) or `cuda`; `capacity`, the bytes of the stand-in. `size` is
    small where a scenario has many cycles: a pair that can be small is then.
    """

    device: str = "host"
    capacity: int = GIB
    adapters: tuple[str, ...] = ("policy",)
    size: str = "medium"


class Pair(Protocol):
    """What `live(rig)` returns. Any method may be a coroutine.

    The batch of a training step depends on its number alone, and so does what is generated on prompt, seed and weights.
    With several adapters also `adapter_state(name)` (digests of params, masters, moments and gradients; what there is
    not is left out) and `renew_adapter(name)` (drops the adapter and gives its slot to a new one of that name), and
    `train_step(batch, adapter, step=False)` leaves its gradients pending for that adapter's next step.
    """

    def train_step(self, batch: int) -> float: ...
    def to_rollout(self) -> Any: ...
    def to_training(self) -> Any: ...
    def generate(self, prompt: Sequence[int], seed: int, adapter: str | None) -> Sequence[int]: ...
    def regions(self) -> Mapping[str, Mapping[str, Sequence[int]]]: ...
    def release(self, owner: str, tags: Sequence[str]) -> Any: ...
    def resume(self, owner: str, tags: Sequence[str]) -> Any: ...
    def fingerprint(self) -> Mapping[str, str]: ...
    def close(self) -> Any: ...


PAIR_METHODS = (
    *("train_step", "to_rollout", "to_training", "generate", "regions", "release", "resume", "fingerprint", "close"),
)
ADAPTER_METHODS = ("adapter_state", "renew_adapter")


class LiveRig(Rig):
    """What `live` gets.

    `process(owner, body, ...)`: a process of the trainer or the engine on the device, as `colocert.device.start`.
    `machine`: the same for who starts processes by itself (`machine.environment()`), and then tells the rig with
    `adopt(owner, pid)`. `limit(nbytes)`: makes the stand-in that small, before anything has started, where a hand-off
    is to fit and no more.
    """

    def __init__(self, config: LiveConfig, claims: Claims, sink: Callable[[AnyEvent], None]) -> None:
        self.config: LiveConfig
        self._device: LiveDevice | None = None
        self._owners: dict[int, list[str]] = {}
        self._children: list[Child] = []
        super().__init__(config, claims, sink)

    def start(self) -> None:
        """Nothing: the memory is that of the processes."""

    def process(
        self, owner: str, body: Callable[..., Any] | str, /, *, env: Mapping[str, str] | None = None, **arguments: Any
    ) -> Child:
        """A process of `owner` on the device, which runs `body(stage, **arguments)`; it dies with the scenario."""
        known = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path for path in sys.path if path))}
        child = start_child(
            body,
            machine=self.machine,
            env={**known, **(env or {})},
            own_group=False,
            deadline=CHILD_SECONDS,
            **arguments,
        )
        self._children.append(child)
        self.adopt(owner, child.pid)
        return child

    def adopt(self, owner: str, *pids: int) -> None:
        """These processes hold memory of the trainer or of the engine; one process may be both."""
        if owner not in (TRAINER, ENGINE):
            raise ValueError(f"owner must be {TRAINER} or {ENGINE} (got {owner!r})")
        for pid in pids:
            if owner not in self._owners.setdefault(pid, []):
                self._owners[pid].append(owner)

    def limit(self, nbytes: int) -> None:
        """The stand-in is that small; on `cuda` nothing."""
        if self._device is not None:
            raise RuntimeError("limit() comes before the first process starts (got one that has)")
        if self.config.device == "host":
            self._device = LiveDevice("host", min(nbytes, self.config.capacity))

    @property
    def machine(self) -> Machine:
        """The device that processes start on: `colocert.device.Machine`."""
        return self.device.machine

    @property
    def device(self) -> LiveDevice:
        """The device, at its capacity if nothing has asked for less."""
        if self._device is None:
            self._device = LiveDevice(self.config.device, self.config.capacity)
        return self._device

    # ---- what the suite asks

    def levels(self, when: str) -> LevelsSeen:
        """What every process holds now."""
        by_owner: dict[str, list[int]] = {}
        for pid, owners in self._owners.items():
            if _alive(pid):
                by_owner.setdefault("+".join(sorted(owners, reverse=True)), []).append(pid)
        held = self.device.held([pid for pids in by_owner.values() for pid in pids])
        host = {owner: sum(map(host_held, pids), HostHeld()) for owner, pids in by_owner.items()}
        return LevelsSeen(
            when,
            self.device.free(),
            {o: sum(held[pid] for pid in pids) for o, pids in by_owner.items() if all(pid in held for pid in pids)},
            {owner: seen.host for owner, seen in host.items()},
            {owner: seen.locked for owner, seen in host.items()},
            {owner: seen.files for owner, seen in host.items()},
            {owner: seen.maps for owner, seen in host.items()},
        )

    def died(self) -> Death | None:
        """The first process that has ended."""
        for pid, owners in self._owners.items():
            if not _alive(pid):
                child = next((c for c in self._children if c.pid == pid), None)
                return Death("+".join(owners), *(("gone", "") if child is None else _how(child)))
        return None

    def forget(self) -> None:
        """Ends the processes of a pair that was closed and the device, so that another can be built."""
        for child in self._children:
            with child:
                pass
        self._children.clear()
        self._owners.clear()
        if self._device is not None:
            self._device.close()
            self._device = None

    def close(self) -> None:
        self.forget()
        super().close()


def _alive(pid: int) -> bool:
    return device_ledger.start_time(pid) != 0


@dataclass(frozen=True)
class Death:
    """How a process of the pair ended: `out-of-memory` where the saver ended it in what does not fit."""

    owner: str
    how: str
    last_words: str


def _how(child: Child) -> tuple[str, str]:
    try:
        outcome = child.wait()
    except DeviceError as error:
        return "hook-not-live", " ".join(str(error).split())
    words = outcome.traceback.strip().splitlines()[-1:] or [outcome.last_words]
    if did_not_fit(outcome):
        return "out-of-memory", words[0]
    return outcome.signal or f"{outcome.kind} {outcome.returncode}", words[0]


def did_not_fit(outcome: Outcome) -> bool:
    """Whether the saver ended the process because what it had to resume does not fit."""
    return outcome.kind == "hook-abort" and "out of memory" in outcome.stderr.lower().replace("_", " ")

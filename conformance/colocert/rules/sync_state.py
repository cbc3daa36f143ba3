"""What the rules of the adapter-sync profile look at: storages, the engine and the call under way, after each event.

Knows who holds what where, what was sent and is served, and what a call has moved. Does not know any rule's sentence.
"""

from __future__ import annotations

from collections.abc import Collection

from colocert.rules.fold import RunFold
from colocert.rules.run import ENGINE, RunView
from colocert.rules.view import RESIDENT_KINDS
from colocert.trace.events import (
    AnyEvent,
    Believed,
    CallBegin,
    CallEnd,
    CallRaise,
    ClaimsStated,
    Config,
    Data,
    EngineFlush,
    EngineServe,
    Fault,
    Move,
    RequestBegin,
    SaverAlloc,
    SaverTouch,
    Send,
)

POLICY, DEVICE, HOST = "policy", "device", "host"
MODEL, ADAPTERS, OPTIMIZER = "model", "adapters", "optimizer"
ACTOR = "weight_sync"
BASE = ""
"""What merged and full weights are served as."""

SEEN = (
    Believed,
    CallBegin,
    CallEnd,
    CallRaise,
    ClaimsStated,
    Config,
    Data,
    EngineFlush,
    EngineServe,
    Fault,
    Move,
    RequestBegin,
    SaverAlloc,
    SaverTouch,
    Send,
)

Place = tuple[str, str]
"""A role and the name of one of its storages."""


class SyncState:
    """The world after each event.

    `kinds`, `sizes`, `contents`: by place. `on`: the places that are on the device. `moved`: whether anything was moved
    so far. `served`, `versions`: by name, as the engine last said. `call`, `subject`: the call under way, or the last
    one. Since that call began: `on_before` (what was on the device then), `sends`, `faulted`. `syncs`: how many syncs
    ended, normally or not.
    """

    def __init__(self) -> None:
        self.config: dict[str, object] = {}
        self.kept: set[str] = set()
        self.kinds: dict[Place, str] = {}
        self.sizes: dict[Place, int] = {}
        self.contents: dict[Place, str] = {}
        self.on: set[Place] = set()
        self.moved = False
        self.served: dict[str, str] = {}
        self.versions: dict[str, int] = {}
        self.in_call = False
        self.call = self.subject = ""
        self.on_before: set[Place] = set()
        self.sends: list[Send] = []
        self.faulted = False
        self.syncs = 0

    # ---- what rules ask

    @property
    def colocated(self) -> bool:
        return bool(self.config.get("colocated"))

    @property
    def syncing(self) -> bool:
        """Whether a sync is under way."""
        return self.in_call and self.call == "sync"

    @property
    def adapter_only(self) -> bool:
        """Whether this scenario's syncs are colocated and send the adapter alone."""
        fsdp = self.config.get("strategy") == "fsdp"
        return self.colocated and bool(self.config.get("lora")) and not fsdp and not self.config.get("merge_lora")

    def adapters(self) -> list[str]:
        """The policy's adapters; none without LoRA."""
        named = self.config.get("adapters", ())
        return [str(a) for a in named] if self.config.get("lora") and isinstance(named, Collection) else []

    def held(self, role: str, *kinds: str) -> list[str]:
        """What a role has on the device, of some kinds or of all, beyond what is claimed to stay."""
        return sorted(
            name
            for who, name in self.on
            if who == role and self.kinds[who, name] not in self.kept and (not kinds or self.kinds[who, name] in kinds)
        )

    def roles(self) -> list[str]:
        """The roles that hold anything."""
        return sorted({role for role, _ in self.kinds})

    def base_off(self, on: set[Place]) -> bool:
        """Whether the policy's model is off the device, in this set of what is on it."""
        return not any(role == POLICY and self.kinds[role, name] == MODEL for role, name in on)

    def current(self, name: str) -> str:
        """What the policy now holds for a served name: an adapter's token, or that of all it would send as the base."""
        if name != BASE:
            return self.contents.get((POLICY, name), "")
        parts = [n for role, n in self.kinds if role == POLICY and (n in self.adapters() or n == "base")]
        return "+".join(self.contents[POLICY, n] for n in sorted(parts))

    def delivered(self, adapter: str) -> bool:
        """Whether the engine serves what the policy holds: for the named adapter, or for the one that there is."""
        names = [adapter] if adapter else [*self.adapters(), BASE]
        return any(self.served.get(name) == self.current(name) != "" for name in names)

    # ---- the fold

    def apply(self, event: AnyEvent) -> None:
        """Moves the state past one event."""
        if isinstance(event, (Config, ClaimsStated)):
            self._stated(event)
        elif isinstance(event, SaverAlloc) and event.owner != ENGINE:
            place = event.owner, event.alloc
            self.kinds[place], self.sizes[place], self.contents[place] = event.kind, event.nbytes, event.content
            self.on.add(place)
        elif isinstance(event, Move):
            self._move(event)
        elif isinstance(event, Data) and event.how != "read":
            self.contents[event.owner, event.alloc] = event.content
        elif isinstance(event, EngineServe):
            self.served[event.adapter], self.versions[event.adapter] = event.content, event.version
        elif isinstance(event, Send):
            self.sends.append(event)
        elif isinstance(event, Fault):
            self.faulted = True
        elif isinstance(event, CallBegin):
            self._begin(event)
        elif isinstance(event, (CallEnd, CallRaise)):
            self.in_call = False
            self.syncs += event.method == "sync"

    def _stated(self, event: Config | ClaimsStated) -> None:
        if isinstance(event, Config):
            self.config = event.facts
        else:
            claimed = event.facts.get("resident_while_released", ())
            self.kept = {ADAPTERS if c == "adapters" else RESIDENT_KINDS[c] for c in claimed}

    def _move(self, event: Move) -> None:
        for name in event.tensors:
            (self.on.add if event.to == DEVICE else self.on.discard)((event.owner, name))
        self.moved |= event.nbytes > 0

    def _begin(self, event: CallBegin) -> None:
        self.in_call, self.call, self.subject = True, event.method, event.subject
        self.on_before = set(self.on)
        self.sends, self.faulted = [], False


class SyncFold(RunFold):
    """A fold over the state of a weight sync. A base: it has no rule of its own."""

    sees = SEEN

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.state = SyncState()

    def on(self, event: AnyEvent) -> None:
        self.state.apply(event)
        if isinstance(event, (CallEnd, CallRaise)) and event.method == "sync":
            self.synced(event)
        else:
            self.happened(event)

    def synced(self, event: CallEnd | CallRaise) -> None:
        """A sync returned or raised."""

    def happened(self, event: AnyEvent) -> None:
        """Anything else."""

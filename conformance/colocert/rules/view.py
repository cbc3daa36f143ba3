"""What every lifecycle rule looks at: the state of one rank after each event, and the call it happens in.

Knows residency, contents, groups, the current call and the faults so far, all derived from events. Does not know any
rule's sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from colocert.trace.events import (
    POISON,
    AnyEvent,
    CallBegin,
    CallEnd,
    CallRaise,
    Change,
    ClaimsStated,
    Config,
    Data,
    Event,
    Fault,
    GroupCreate,
    GroupDestroy,
    SaverAlloc,
    SaverCall,
    SaverFatal,
    SaverFree,
    SaverPause,
    SaverRefused,
    SaverResume,
    SaverTouch,
)
from colocert.trace.ledger import Allocation, Ledger

RESIDENT_KINDS = {"adapters": "adapter", "grads": "grads", "optimizer": "optimizer", "params": "params"}
GRADS, PARAMS, DEFAULT = "grad_buffer", "param_buffer", "default"
_EFFECTS = (SaverPause, SaverResume, SaverAlloc, SaverFree, GroupCreate, GroupDestroy, SaverFatal)


class Call:
    """The call being made, or the last one made. Moves are (allocation, saver call) pairs in order.

    `tags` are those of the allocations it moved, which it may have freed since.
    """

    __slots__ = ("effects", "faulted", "method", "out_before", "paused", "refused", "resumed", "saver_calls", "tags")

    def __init__(self, method: str, out: frozenset[str]) -> None:
        self.method = method
        self.out_before = out
        self.paused: list[tuple[str, int]] = []
        self.resumed: list[tuple[str, int]] = []
        self.tags: dict[str, str] = {}
        self.saver_calls = 0
        self.effects = 0
        self.faulted = self.refused = False

    def moves(self, name: str) -> int:
        """How often the call released the allocation, and resumed it."""
        return sum(n == name for n, _ in self.paused) + sum(n == name for n, _ in self.resumed)

    def saver_calls_on(self, moves: list[tuple[str, int]], tag: str) -> list[int]:
        """The saver calls among `moves` that moved allocations of `tag`."""
        return [number for name, number in moves if self.tags[name] == tag]


class View:
    """The state of one rank. `apply` moves it past an event; rules read the rest.

    `live`: allocations holding gradients that a step which returned normally accumulated and nothing consumed yet.
    `unsure`: the same of a step that raised; whether they are still wanted is the trainer's to say.
    `lost`: live gradients that a release without backup dropped, by content. `stale`: no-backup allocations resumed and
    not yet written. `contents`: allocation to content token. `moved`: whether a call has released memory so far; of a
    trainer that never does, what it leaves alone says nothing. `lora`, `offload` and `rematerializes` (the trainer owes
    its parameters to a sync) are the scenario's configuration.
    """

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.claims: dict[str, Any] = {}
        self.lora, self.offload, self.rematerializes = False, True, False
        self.ledger = Ledger()
        self.contents: dict[str, str] = {}
        self.live: set[str] = set()
        self.unsure: set[str] = set()
        self.stale: set[str] = set()
        self.lost: dict[str, str] = {}
        self._accumulated: set[str] = set()
        self.groups: dict[str, str] = {}
        self.call: Call | None = None
        self.in_call = False
        self.faults = 0
        self.filled = False
        self.moved = False
        self.dead = False

    # ---- what rules ask

    def named(self, name: str) -> Allocation:
        return self.ledger.allocations[name]

    def due(self) -> list[Allocation]:
        """What a complete `sleep()` has to release: all but what is claimed resident, and parameters owed to a sync."""
        kept = {RESIDENT_KINDS[c] for c in self.claims.get("resident_while_released", ())}
        owed = self.rematerializes
        return [a for a in self.ledger.allocations.values() if a.kind not in kept and not (owed and a.tag == PARAMS)]

    def asleep(self) -> bool:
        """Whether everything due is released now."""
        due = self.due()
        return bool(due) and all(a.name in self.ledger.out for a in due)

    def holds_live(self, tag: str) -> bool:
        """Whether a region may hold live gradients: a release of it may then be refused, all of it (LC-11)."""
        return any(self.named(name).tag == tag for name in self.live | self.unsure)

    def names(self, released: set[str] | frozenset[str]) -> str:
        """Allocations for a message, by tag."""
        tags = sorted({self.named(n).tag for n in released if n in self.ledger.allocations})
        return ", ".join(tags) or "nothing"

    # ---- the fold

    def apply(self, event: AnyEvent) -> None:
        """Moves the view past one event."""
        for handler in self.handlers(type(event)):
            handler(event)

    def handlers(self, kind: type[Event]) -> list[Callable[[Any], None]]:
        """What moves the view past an event of this type, in order."""
        mine = _HANDLERS.get(kind)
        return [*([] if mine is None else [mine.__get__(self)]), *([self._effect] if kind in _EFFECTS else [])]

    def _effect(self, event: AnyEvent) -> None:
        if self.call is not None and self.in_call:
            self.call.effects += 1

    def _config(self, event: Config) -> None:
        self.config = config = event.facts
        self.lora = bool(config.get("lora"))
        self.offload = bool(config.get("offload_train", True))
        self.rematerializes = bool(config.get("rematerialize")) and config.get("role") == "actor"

    def _claims(self, event: ClaimsStated) -> None:
        self.claims = event.facts

    def _begin(self, event: CallBegin) -> None:
        self.call = Call(event.method, frozenset(self.ledger.out))
        self.in_call = True
        self._accumulated.clear()

    def _end(self, event: CallEnd) -> None:
        self.in_call = False
        self.live |= self._accumulated
        self.unsure -= self._accumulated

    def _raise(self, event: CallRaise) -> None:
        self.in_call = False
        self.unsure |= self._accumulated - self.live

    def _saver_call(self, event: SaverCall) -> None:
        if self.call is not None and self.in_call:
            self.call.saver_calls += 1

    def _alloc(self, event: SaverAlloc) -> None:
        self.ledger.apply(event)
        self.contents[event.alloc] = event.content

    def _free(self, event: SaverFree) -> None:
        self.ledger.apply(event)
        for known in (self.live, self.unsure, self.stale):
            known.discard(event.alloc)
        self.contents.pop(event.alloc, None)

    def _pause(self, event: SaverPause) -> None:
        self.ledger.apply(event)
        self.stale.discard(event.alloc)
        if not event.backup:
            self.unsure.discard(event.alloc)
        if event.alloc in self.live and not event.backup:
            self.live.discard(event.alloc)
            self.lost[event.alloc] = self.contents[event.alloc]
        if self.call is not None and self.in_call:
            self.moved = True
            self.call.tags[event.alloc] = event.tag
            self.call.paused.append((event.alloc, event.saver_call))

    def _resume(self, event: SaverResume) -> None:
        self.ledger.apply(event)
        self.contents[event.alloc] = event.content
        if not event.backup:
            self.stale.add(event.alloc)
        if self.call is not None and self.in_call:
            self.call.tags[event.alloc] = event.tag
            self.call.resumed.append((event.alloc, event.saver_call))

    def _data(self, event: Data) -> None:
        name = event.alloc
        if event.how in ("zero", "overwrite"):
            self.stale.discard(name)
        if event.how == "accumulate":
            self._accumulated.add(name)
        elif event.how in ("consume", "zero", "overwrite"):
            self._accumulated.discard(name)
            self.live.discard(name)
            self.unsure.discard(name)
        if event.how != "read" and self.lost.pop(name, None) == event.content and event.how == "overwrite":
            self.live.add(name)
        self.contents[name] = event.content

    def _touch(self, event: SaverTouch) -> None:
        self.dead = True

    def _fatal(self, event: SaverFatal) -> None:
        self.dead = True

    def _refused(self, event: SaverRefused) -> None:
        if self.call is not None and self.in_call:
            self.call.refused = True

    def _fault(self, event: Fault) -> None:
        self.faults += 1
        if self.call is not None and self.in_call:
            self.call.faulted = True

    def _created(self, event: GroupCreate) -> None:
        self.groups[event.name] = "alive"

    def _destroyed(self, event: GroupDestroy) -> None:
        self.groups[event.name] = "torn down"

    def _change(self, event: Change) -> None:
        if event.what == "groups.gone":
            self.groups.update(dict.fromkeys(event.facts.get("groups", ()), "gone"))
        elif event.what == "device.filled":
            self.filled = True
        elif event.what == "device.relieved":
            self.filled = False

    # ---- copies, for exploration

    def clone(self) -> View:
        """A copy between two calls; the last call is not kept."""
        new = View()
        new.config, new.claims = self.config, self.claims
        new.lora, new.offload, new.rematerializes = self.lora, self.offload, self.rematerializes
        new.ledger.allocations = self.ledger.allocations.copy()
        new.ledger.out = self.ledger.out.copy()
        new.ledger.copies = self.ledger.copies.copy()
        new.ledger.seen_tags = self.ledger.seen_tags.copy()
        new.ledger.device_bytes, new.ledger.host_bytes = self.ledger.device_bytes, self.ledger.host_bytes
        new.contents, new.groups = self.contents.copy(), self.groups.copy()
        new.live, new.unsure, new.stale = self.live.copy(), self.unsure.copy(), self.stale.copy()
        new.lost = self.lost.copy()
        new.faults, new.filled, new.moved, new.dead = self.faults, self.filled, self.moved, self.dead
        return new

    def key(self) -> tuple[Any, ...]:
        """The state as a hashable value."""
        return (
            tuple(self.ledger.allocations),
            tuple(sorted(self.ledger.out)),
            tuple(self.contents.items()),
            tuple(sorted(self.groups.items())),
            tuple(sorted(self.live)),
            tuple(sorted(self.unsure)),
            tuple(sorted(self.lost.items())),
            tuple(sorted(self.stale)),
            bool(self.faults),
            self.filled,
            self.moved,
            self.dead,
        )


_HANDLERS: dict[type, Any] = {
    Config: View._config,
    ClaimsStated: View._claims,
    CallBegin: View._begin,
    CallEnd: View._end,
    CallRaise: View._raise,
    SaverCall: View._saver_call,
    SaverAlloc: View._alloc,
    SaverFree: View._free,
    SaverPause: View._pause,
    SaverResume: View._resume,
    SaverTouch: View._touch,
    SaverFatal: View._fatal,
    SaverRefused: View._refused,
    Data: View._data,
    Fault: View._fault,
    GroupCreate: View._created,
    GroupDestroy: View._destroyed,
    Change: View._change,
}

__all__ = ["DEFAULT", "GRADS", "PARAMS", "POISON", "Call", "View"]

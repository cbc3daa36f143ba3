"""What every hand-off rule looks at: all ranks and engines of a run after each event.

Knows who holds what on the device and on the host, which calls are under way, and what was trained and sent. Does not
know any rule's sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from colocert.rules.view import RESIDENT_KINDS
from colocert.trace.events import (
    Ack,
    AnyEvent,
    CallBegin,
    CallEnd,
    CallIssue,
    CallRaise,
    ClaimsStated,
    Config,
    EngineServe,
    Event,
    Fault,
    RequestBegin,
    RequestEnd,
    SaverAlloc,
    SaverFatal,
    SaverFree,
    SaverPause,
    SaverResume,
    SaverTouch,
    Send,
)
from colocert.trace.ledger import Allocation

ENGINE = "engine"
WEIGHTS, KV, GRAPH = "weights", "kv_cache", "cuda_graph"
CACHES = (KV, GRAPH)
GRADS, PARAMS, DEFAULT = "grad_buffer", "param_buffer", "default"

Held = tuple[str, int, str]
"""An allocation's place: owner, rank, name."""


class RunView:
    """The state of a whole run.

    `allocations` and `out` (released) are by owner, rank and name; `transport` are those made during a sync, its
    buffers. `faults` counts injected ones and deaths. `trained`: of the `steps` that returned, some were not sent; a
    critic's steps owe no sync and are not counted. `critics` are the ranks that are one.
    `calls`: the trainer call that each rank is in; `under_way`: how many are, by method. `outstanding`: calls issued to
    the living and not acknowledged; `awaited`: how many, by method.
    `releases`: the tags that the engine of this scenario releases at all, under this driver. `started`: some trainer
    has made its allocations. `version`: the last one that an engine took. `gpu_peak` and `lora` are as configured.
    """

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.claims: dict[str, Any] = {}
        self.gpu_peak = self.lora = False
        self.allocations: dict[Held, Allocation] = {}
        self._engines: dict[Held, Allocation] = {}
        self.out: set[Held] = set()
        self.transport: set[Held] = set()
        self.calls: dict[int, str] = {}
        self.under_way: dict[str, int] = {}
        self.driver = ""
        self.outstanding: dict[tuple[str, int, int], str] = {}
        self.awaited: dict[str, int] = {}
        self.releases: frozenset[str] = frozenset()
        self.started = False
        self.trained = False
        self.steps = 0
        self.faults = 0
        self.faulted_run = False
        self.dead: set[int] = set()
        self.critics: set[int] = set()
        self.in_flight = 0
        self.version: int | None = None

    # ---- what rules ask

    def engine_holds(self, *tags: str) -> set[str]:
        """Which of these tags some engine has resident."""
        return {a.tag for h, a in self._engines.items() if a.tag in tags and h not in self.out}

    def engine_has(self, tag: str) -> bool:
        """Whether some engine has the tag resident."""
        return bool(self.engine_holds(tag))

    def engine_lacks(self, *tags: str) -> set[str]:
        """Which of these tags some engine has released."""
        return {a.tag for h, a in self._engines.items() if a.tag in tags and h in self.out}

    def engine_without(self, tag: str) -> bool:
        """Whether some engine has the tag released."""
        return bool(self.engine_lacks(tag))

    def trainer_holds(self, tag: str | None = None) -> list[Held]:
        """Trainer model memory on the device beyond the claimed resident set, of one tag or of all."""
        return [h for h in self._model() if h not in self.out and tag in (None, self.allocations[h].tag)]

    def transport_held(self) -> list[Held]:
        """Transport buffers of a sync that are on the device."""
        return [h for h in self.transport if h not in self.out and h[1] not in self.dead]

    def _model(self) -> list[Held]:
        """What living trainers have beside the claimed resident set and transport buffers."""
        kept = {RESIDENT_KINDS[c] for c in self.claims.get("resident_while_released", ())}
        return [
            h
            for h, a in self.allocations.items()
            if h[0] != ENGINE and h[1] not in self.dead and h not in self.transport and a.kind not in kept
        ]

    def lacks_trainer_default(self) -> bool:
        """Whether some rank has its `default` region released."""
        return bool(self.trainer_lacks(DEFAULT))

    def trainer_lacks(self, tag: str) -> list[Held]:
        """Trainer memory of a tag that is released."""
        return [h for h in self.out if h[0] != ENGINE and self.allocations[h].tag == tag]

    def ranks(self) -> set[int]:
        """The living ranks that have made allocations and take part in a sync."""
        return {h[1] for h in self.allocations if h[0] != ENGINE} - self.dead - self.critics

    def device_bytes(self, owner: str, rank: int | None = None) -> int:
        """Bytes that an owner has on the device: of one rank, or of all."""
        return sum(
            a.nbytes
            for h, a in self.allocations.items()
            if (h[0] == ENGINE) is (owner == ENGINE) and h not in self.out and rank in (None, h[1])
        )

    def host_bytes(self, owner: str) -> int:
        """Bytes of host copies that an owner's releases made."""
        return sum(
            self.allocations[h].nbytes for h in self.out if (h[0] == ENGINE) is (owner == ENGINE) and self._copied(h)
        )

    def _copied(self, held: Held) -> bool:
        return self.allocations[held].backup

    def half_released(self) -> list[str]:
        """The owners that are neither fully resident nor fully released, as text."""
        found = []
        mine = self._model()
        if 0 < sum(h in self.out for h in mine) < len(mine):
            found.append("trainer: " + self.tags_of(h for h in mine if h in self.out) + " released, the rest resident")
        able = [h for h, a in self.allocations.items() if h[0] == ENGINE and a.tag in self.releases]
        if 0 < sum(h in self.out for h in able) < len(able):
            found.append("engine: " + self.tags_of(h for h in able if h in self.out) + " released, the rest resident")
        return found

    def tags_of(self, held: Any) -> str:
        """Places for a message, by tag."""
        return ", ".join(sorted({self.allocations[h].tag for h in held if h in self.allocations})) or "nothing"

    # ---- the fold

    def apply(self, event: AnyEvent) -> None:
        """Moves the view past one event."""
        for handler in self.handlers(type(event)):
            handler(event)

    def handlers(self, kind: type[Event]) -> list[Callable[[Any], None]]:
        """What moves the view past an event of this type."""
        mine = _HANDLERS.get(kind)
        return [] if mine is None else [mine.__get__(self)]

    def _config(self, event: Config) -> None:
        self.config = config = event.facts
        self.gpu_peak = config.get("peak_device") == "gpu"
        self.lora = bool(config.get("lora"))
        self._engine_releases()

    def _claims(self, event: ClaimsStated) -> None:
        self.claims = event.facts
        self._engine_releases()

    def _engine_releases(self) -> None:
        has, claimed = (facts.get("engine_releases", ()) for facts in (self.config, self.claims))
        self.releases = frozenset(has) & frozenset(claimed)

    def _alloc(self, event: SaverAlloc) -> None:
        held = (event.owner, event.rank, event.alloc)
        self.allocations[held] = made = Allocation(
            event.alloc, event.tag, event.nbytes, event.backup, event.kind, event.address
        )
        if event.owner == ENGINE:
            self._engines[held] = made
        self.started = len(self.allocations) > len(self._engines)
        if not event.owner and self.calls.get(event.rank) == "update_weights":
            self.transport.add(held)

    def _free(self, event: SaverFree) -> None:
        self._gone((event.owner, event.rank, event.alloc))

    def _gone(self, held: Held) -> None:
        for known in (self.allocations, self._engines):
            known.pop(held, None)
        for places in (self.out, self.transport):
            places.discard(held)
        self.started = len(self.allocations) > len(self._engines)

    def _pause(self, event: SaverPause) -> None:
        self.out.add((event.owner, event.rank, event.alloc))

    def _resume(self, event: SaverResume) -> None:
        self.out.discard((event.owner, event.rank, event.alloc))

    def _issue(self, event: CallIssue) -> None:
        key, method, awaited = (event.owner, event.rank, event.call), event.method, self.awaited
        if key in self.outstanding:
            _drop(self.outstanding, key, awaited)
        self.outstanding[key] = method
        awaited[method] = awaited.get(method, 0) + 1

    def _ack(self, event: Ack) -> None:
        method = self.outstanding.pop((event.owner, event.rank, event.call), None)
        if method is not None:
            _less(self.awaited, method)

    def _begin(self, event: CallBegin) -> None:
        if event.actor == "driver":
            self.driver = event.method
            self.faulted_run = False
        else:
            _put(self.calls, event.rank, event.method, self.under_way)
            if event.actor == "critic":
                self.critics.add(event.rank)

    def _end(self, event: CallEnd) -> None:
        if event.actor == "driver":
            self.driver = ""
            return
        _drop(self.calls, event.rank, self.under_way)
        if event.method == "train" and event.actor != "critic":
            self.trained = True
            self.steps += 1

    def _raise(self, event: CallRaise) -> None:
        if event.actor == "driver":
            self.driver = ""
        else:
            _drop(self.calls, event.rank, self.under_way)

    def _send(self, event: Send) -> None:
        self.trained = False

    def _serve(self, event: EngineServe) -> None:
        self.version = event.version

    def _request(self, event: RequestBegin) -> None:
        self.in_flight += event.ready

    def _answered(self, event: RequestEnd) -> None:
        self.in_flight -= 1

    def _fault(self, event: Fault) -> None:
        self.faults += 1
        self.faulted_run = True

    def _died(self, event: SaverFatal | SaverTouch) -> None:
        if not event.owner:
            self.faults += 1
            self.dead.add(event.rank)
            _drop(self.calls, event.rank, self.under_way)
            for key in [k for k in self.outstanding if k[:2] == ("", event.rank)]:
                _drop(self.outstanding, key, self.awaited)


def _put(methods: dict[Any, str], key: Any, method: str, counts: dict[str, int]) -> None:
    """Sets a method, and counts it in place of the one that was there."""
    if key in methods:
        _drop(methods, key, counts)
    methods[key] = method
    counts[method] = counts.get(method, 0) + 1


def _drop(methods: dict[Any, str], key: Any, counts: dict[str, int]) -> None:
    """Takes a method away, if there is one."""
    method = methods.pop(key, None)
    if method is not None:
        _less(counts, method)


def _less(counts: dict[str, int], method: str) -> None:
    if counts[method] > 1:
        counts[method] -= 1
    else:
        del counts[method]


_HANDLERS: dict[type, Any] = {
    Config: RunView._config,
    ClaimsStated: RunView._claims,
    SaverAlloc: RunView._alloc,
    SaverFree: RunView._free,
    SaverPause: RunView._pause,
    SaverResume: RunView._resume,
    SaverFatal: RunView._died,
    SaverTouch: RunView._died,
    CallIssue: RunView._issue,
    Ack: RunView._ack,
    CallBegin: RunView._begin,
    CallEnd: RunView._end,
    CallRaise: RunView._raise,
    Send: RunView._send,
    EngineServe: RunView._serve,
    RequestBegin: RunView._request,
    RequestEnd: RunView._answered,
    Fault: RunView._fault,
}

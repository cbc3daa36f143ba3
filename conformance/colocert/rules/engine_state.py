"""What the rules of the engine profile look at: memory, versions, requests and calls under way after each event.

Knows what an engine has released, whether its base is valid, what was loaded and what each request has seen. Does not
know any rule's sentence.
"""

from __future__ import annotations

from colocert.rules.fold import RunFold
from colocert.rules.run import RunView
from colocert.trace.events import (
    AnyEvent,
    CallBegin,
    CallEnd,
    CallRaise,
    Change,
    ClaimsStated,
    Config,
    EngineAsked,
    EngineToken,
    Fault,
    SaverAlloc,
    SaverFatal,
    SaverPause,
    SaverResume,
    SaverTouch,
)

MEMORY = ("release", "resume")
UPDATES = ("update_base", "load_adapter")
UNTYPED = ("Exception", "BaseException", "AssertionError")
"""Classes of which nobody can tell what went wrong; an assertion is not even there under `python -O`."""

SEEN = (
    CallBegin,
    CallEnd,
    CallRaise,
    Change,
    ClaimsStated,
    Config,
    EngineAsked,
    EngineToken,
    Fault,
    SaverAlloc,
    SaverFatal,
    SaverPause,
    SaverResume,
    SaverTouch,
)


class Asked:
    """A call under way. `before`: the tags released when it began; `faulted`: the suite made something fail in it.

    Of a request: `ready` and `blocked`, whether it could have been served, or not, at some moment; `beside`: which
    calls but requests were under way since it began; `allowed`: what it may be computed with; `seen`: what it was;
    `failed`: the updates that had failed when it began.
    """

    def __init__(self, asked: EngineAsked, before: frozenset[str]) -> None:
        self.call, self.method, self.adapter, self.version = asked.call, asked.method, asked.adapter, asked.version
        self.tags, self.prompt = frozenset(asked.tags), asked.prompt
        self.before = before
        self.faulted = False
        self.ready = self.blocked = False
        self.beside: set[str] = set()
        self.failed: frozenset[str] = frozenset()
        self.tokens = 0
        self.allowed: set[str] = set()
        self.seen: set[str] = set()


class Serving:
    """The engine after each event.

    `loaded`: adapter to the version last acknowledged. `sure`: those that nothing has happened to since that may have
    cost an engine its adapters. `failed`: updates that failed and were not made good: an adapter's name, "" the base.
    """

    def __init__(self) -> None:
        self.tags: dict[str, str] = {}
        self.out: set[str] = set()
        self.base_valid = True
        self.lora = self.base_requests = False
        self.loaded: dict[str, int] = {}
        self.sure: set[str] = set()
        self.failed: set[str] = set()
        self.open: dict[int, Asked] = {}
        self.asked: EngineAsked | None = None

    # ---- what rules ask

    def released(self) -> frozenset[str]:
        """The tags of which something is released."""
        return frozenset(self.tags[name] for name in self.out)

    def blocked(self, adapter: str) -> bool:
        """Whether a request for this adapter, or for the base, must not be computed now."""
        return bool(self.out) or not self.base_valid or "" in self.failed or adapter in self.failed

    def requests(self) -> list[Asked]:
        """The requests under way."""
        return [a for a in self.open.values() if a.method == "generate"]

    def others(self) -> list[Asked]:
        """Every other call under way."""
        return [a for a in self.open.values() if a.method != "generate"]

    def known(self, adapter: str) -> bool:
        """Whether the adapter was ever loaded, or is being loaded; the base is known where it may be asked for."""
        if not adapter:
            return not self.lora or self.base_requests
        loading = any(a.method == "load_adapter" and a.adapter == adapter for a in self.open.values())
        return adapter in self.loaded or adapter in self.failed or loading

    # ---- the fold

    def apply(self, event: AnyEvent) -> None:
        """Moves past one event, except for the end of a call: see `ended`."""
        if isinstance(event, EngineAsked):
            self.asked = event
        elif isinstance(event, CallBegin) and event.actor == "engine" and self.asked is not None:
            self._begin(self.asked)
        elif isinstance(event, SaverAlloc):
            self.tags[event.alloc] = event.tag
        elif isinstance(event, SaverPause):
            self.out.add(event.alloc)
            if event.tag == "weights":
                self.sure.clear()
        elif isinstance(event, SaverResume):
            self.out.discard(event.alloc)
        elif isinstance(event, Change) and event.what == "engine.base":
            self.base_valid = bool(event.facts["valid"])
        elif isinstance(event, Fault):
            for call in self.open.values():
                call.faulted = True
        elif isinstance(event, Config):
            self.lora = bool(event.facts.get("lora"))
        elif isinstance(event, ClaimsStated):
            self.base_requests = bool(event.facts.get("base_requests_in_lora_mode"))
        elif isinstance(event, EngineToken) and event.call in self.open:
            self.open[event.call].tokens += 1
            self.open[event.call].seen.update(event.adapters)
        self._look()

    def _begin(self, told: EngineAsked) -> None:
        asked = Asked(told, self.released())
        asked.failed = frozenset(self.failed)
        self.open[asked.call] = asked
        if asked.method == "load_adapter":
            for request in self.requests():
                if request.adapter == asked.adapter:
                    request.allowed.add(f"{asked.adapter}@{asked.version}")
        if asked.method == "generate" and asked.adapter:
            if asked.adapter in self.loaded:
                asked.allowed.add(f"{asked.adapter}@{self.loaded[asked.adapter]}")
            for load in self.others():
                if load.method == "load_adapter" and load.adapter == asked.adapter:
                    asked.allowed.add(f"{load.adapter}@{load.version}")

    def _look(self) -> None:
        """What every request sees of this moment."""
        others = {a.method for a in self.others()}
        for request in self.requests():
            blocked = self.blocked(request.adapter)
            request.blocked |= blocked
            request.ready |= not blocked
            request.beside |= others

    def ended(self, event: CallEnd | CallRaise) -> None:
        """The call is over."""
        asked = self.open.pop(event.call)
        concerns = "" if asked.method == "update_base" else asked.adapter
        if asked.method not in UPDATES:
            return
        if isinstance(event, CallEnd):
            self.failed.discard(concerns)
            if concerns:
                self.loaded[concerns] = asked.version
                self.sure.add(concerns)
        elif asked.faulted:
            self.failed.add(concerns)
        if not concerns:
            self.sure.clear()


class EngineFold(RunFold):
    """A fold over the state of an engine. A base: it has no rule of its own."""

    sees = SEEN

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.now = Serving()

    def on(self, event: AnyEvent) -> None:
        now = self.now
        if isinstance(event, (CallEnd, CallRaise)) and event.actor == "engine" and event.call in now.open:
            asked = now.open[event.call]
            self.answered(event, asked) if asked.method == "generate" else self.returned(event, asked)
            now.ended(event)
            now._look()
            return
        now.apply(event)
        if isinstance(event, CallBegin) and event.actor == "engine" and event.call in now.open:
            self.begun(event, now.open[event.call])
        elif isinstance(event, Change) and event.what == "call.overdue" and event.facts["call"] in now.open:
            self.overdue(event, now.open[event.facts["call"]])
        elif isinstance(event, EngineToken):
            if event.call in now.open:
                self.token(event, now.open[event.call])
        else:
            self.happened(event)

    def begun(self, event: CallBegin, asked: Asked) -> None:
        """A call of the engine has begun."""

    def answered(self, event: CallEnd | CallRaise, asked: Asked) -> None:
        """A request is over; it is still among those under way."""

    def returned(self, event: CallEnd | CallRaise, asked: Asked) -> None:
        """Any other call is over; it is still among those under way."""

    def overdue(self, event: Change, asked: Asked) -> None:
        """A call was given up at its deadline; it stays among those under way."""

    def token(self, event: EngineToken, asked: Asked) -> None:
        """A token was computed for a request."""

    def happened(self, event: AnyEvent) -> None:
        """Anything else."""

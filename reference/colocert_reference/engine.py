"""The engine: which of its memory is released, what it may serve, and what each request is computed with.

Knows tags, versions, admission, and the index of cached prefixes. Does not know a model, a saver or a transport:
`EnginePorts` is a port, with the rig's doubles (`engine_ports`) or a transformers model (`real.llama_engine`) behind
it.

    release(tags)        requests under way end, none is admitted; memory goes back; cached prefixes go with the KV
    update_base(...)     requests under way end; weights are written; the base is invalid until all are
    resume(tags)         memory comes back; served again once nothing is released and the base is valid
    load_adapter(...)    tensors are copied out, then take the old ones' place; a request keeps what it began with
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

WEIGHTS, KV, GRAPH = "weights", "kv_cache", "cuda_graph"
RELEASE_ORDER = (KV, GRAPH, WEIGHTS)
RESUME_ORDER = (WEIGHTS, KV, GRAPH)
BASE = ""


class EngineNotReady(RuntimeError):
    """A request or an update came while memory is released, the base invalid, or an update unrepaired."""


class UnknownAdapter(LookupError):
    """A request names an adapter that is not loaded."""


class AdapterRequired(LookupError):
    """A request names no adapter, and base requests are not served."""


class Asking(Protocol):
    """A request: so many tokens for a prompt, from the base or from an adapter by name."""

    @property
    def prompt(self) -> str: ...
    @property
    def adapter(self) -> str | None: ...
    @property
    def tokens(self) -> int: ...


class Computed(Protocol):
    """A token, and a name for the KV that is cached by now."""

    @property
    def token(self) -> Any: ...
    @property
    def entry(self) -> Any: ...


class EnginePorts(Protocol):
    """Memory, transport and model."""

    def pause(self, tag: str) -> None: ...
    def resume(self, tag: str) -> None: ...
    async def write_base(self, source: Any) -> None:
        """Writes every base tensor of a source into place; may raise half-way."""

    async def copied(self, source: Any) -> Mapping[str, Any]:
        """An adapter's tensors, none of which shares memory with the source."""
        ...

    async def compute(self, request: Any, adapter: Mapping[str, Any] | None, cached: Any) -> Computed: ...
    def done(self, request: Any) -> None:
        """The request is over, answered or not: what was kept for it alone may go."""


@dataclass(frozen=True)
class EngineSettings:
    """`tags`: what the engine can release. `mirror`: weights come back from a host copy. `base_requests`: served."""

    tags: frozenset[str]
    lora: bool
    mirror: bool
    base_requests: bool


@dataclass(frozen=True)
class Adapter:
    """One version of an adapter, whole. Replaced, never changed."""

    name: str
    version: int
    tensors: Mapping[str, Any]


@dataclass
class Prefixes:
    """The index of cached prefixes, by base version, adapter, its version, and prompt. A flush begins a new `era`."""

    entries: dict[tuple[int, str, int, str], Any] = field(default_factory=dict)
    era: int = 0

    def flush(self) -> None:
        self.entries.clear()
        self.era += 1


class Engine:
    """One engine. Calls may overlap; those that change memory or weights take turns."""

    def __init__(self, ports: EnginePorts, settings: EngineSettings) -> None:
        self.ports, self.settings = ports, settings
        self.released: set[str] = set()
        self.base_valid = True
        self.base_version = 0
        self.adapters: dict[str, Adapter] = {}
        self.failed: set[str] = set()
        self.prefixes = Prefixes()
        self.admitting = True
        self.in_flight = 0
        self.turn = asyncio.Lock()
        self.idle = asyncio.Condition()

    # ---- memory

    async def release(self, tags: Iterable[str]) -> None:
        """Gives the memory of these tags back, after the last request; what is released already is left alone."""
        wanted = self._checked(tags)
        async with self.turn, self._drained():
            for tag in (t for t in RELEASE_ORDER if t in wanted - self.released):
                self.ports.pause(tag)
                self.released.add(tag)
                self._lost(tag)

    def _lost(self, tag: str) -> None:
        """What goes with a tag's memory."""
        if tag == KV:
            self.prefixes.flush()
        if tag == WEIGHTS and not self.settings.mirror:
            self.base_valid = False

    async def resume(self, tags: Iterable[str]) -> None:
        """Takes the memory of these tags again; what is resident is left alone."""
        wanted = self._checked(tags)
        async with self.turn:
            for tag in (t for t in RESUME_ORDER if t in wanted & self.released):
                self.ports.resume(tag)
                self.released.discard(tag)

    def _checked(self, tags: Iterable[str]) -> set[str]:
        wanted = set(tags)
        if unknown := wanted - self.settings.tags:
            raise ValueError(f"tags must be of {sorted(self.settings.tags)} (got {sorted(unknown)})")
        return wanted

    def ready(self) -> bool:
        """Whether requests are served."""
        return not self.released and self.base_valid and BASE not in self.failed

    # ---- weights

    async def update_base(self, version: int, source: Any) -> None:
        """Writes a new base into place. If that fails, nothing is served until an update succeeds."""
        async with self.turn, self._drained():
            self._needs_weights()
            self.base_valid = False
            self.failed.add(BASE)
            await self.ports.write_base(source)
            self.prefixes.flush()
            self.base_version, self.base_valid = version, True
            self.failed.discard(BASE)

    async def load_adapter(self, name: str, version: int, source: Any) -> None:
        """Puts a new version of an adapter in the place of the old one, once all of it has been copied out.

        If that fails, the adapter is not served until it is loaded again: the version that was asked for is not there.
        """
        async with self.turn:
            self._needs_weights()
            try:
                tensors = await self.ports.copied(source)
            except BaseException:
                self.failed.add(name)
                raise
            self._put(Adapter(name, version, tensors))

    def _put(self, adapter: Adapter) -> None:
        self.adapters[adapter.name] = adapter
        self.failed.discard(adapter.name)

    def _needs_weights(self) -> None:
        if WEIGHTS in self.released:
            raise EngineNotReady("weights must be resident to be updated (got released): resume them first")

    # ---- requests

    async def generate(self, request: Asking) -> list[Any]:
        """The tokens of a request. Raises `EngineNotReady`, `UnknownAdapter` or `AdapterRequired` instead."""
        self._admit(request)
        adapter = self._adapter(request)
        self.in_flight += 1
        try:
            return [token async for token in self._tokens(request, adapter)]
        finally:
            self.ports.done(request)
            self.in_flight -= 1
            async with self.idle:
                self.idle.notify_all()

    def _admit(self, request: Asking) -> None:
        failed = sorted(self.failed & {BASE, request.adapter or BASE})
        if self.ready() and self.admitting and not failed:
            return
        why = f"released: {sorted(self.released)}, base valid: {self.base_valid}, failed updates: {failed}"
        raise EngineNotReady(f"an engine must be ready to serve ({why})")

    def _adapter(self, request: Asking) -> Adapter | None:
        if request.adapter is None:
            if self.settings.lora and not self.settings.base_requests:
                raise AdapterRequired("a request must name an adapter: base requests are not served")
            return None
        if request.adapter not in self.adapters:
            raise UnknownAdapter(f"{request.adapter} must be loaded to be asked for (got {sorted(self.adapters)})")
        return self.adapters[request.adapter]

    async def _tokens(self, request: Asking, adapter: Adapter | None) -> AsyncIterator[Any]:
        key, era = self._key(request, adapter), self.prefixes.era
        entry = self.prefixes.entries.get(key)
        for _ in range(request.tokens):
            step = await self.ports.compute(request, adapter.tensors if adapter else None, entry)
            entry = step.entry
            if era == self.prefixes.era:
                self.prefixes.entries.setdefault(key, entry)
            yield step.token

    def _key(self, request: Asking, adapter: Adapter | None) -> tuple[int, str, int, str]:
        name, version = (adapter.name, adapter.version) if adapter else (BASE, 0)
        return (self.base_version, name, version, request.prompt)

    async def flush(self) -> None:
        """Forgets every cached prefix, whatever is released."""
        self.prefixes.flush()

    @contextlib.asynccontextmanager
    async def _drained(self) -> AsyncIterator[None]:
        """No request is under way inside, and none is admitted."""
        self.admitting = False
        try:
            async with self.idle:
                await self.idle.wait_for(lambda: not self.in_flight)
            yield
        finally:
            self.admitting = True

    async def close(self) -> None:
        """Requests under way end."""
        async with self._drained():
            self.adapters.clear()

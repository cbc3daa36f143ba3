"""The rig of an engine under test: its memory by tag, what comes in over the wire, and the model that it computes with.

Knows which bytes were sent as which tensor, so that every token tells what it was computed from. Does not know how an
engine keeps adapters, caches or requests: those are the engine's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from colocert.rig.contract import Claims, Config
from colocert.rig.engine import ENGINE_OWNER
from colocert.rig.engine_wire import ADAPTER_TENSORS, BASE_TENSORS, Sent
from colocert.rig.rig import Rig
from colocert.trace.events import AnyEvent, Change, Data, EngineToken, Event, SaverPause, SaverResume

ENGINE_METHODS = ("release", "resume", "update_base", "load_adapter", "generate", "close")
"""What `engine(rig)` returns has these. Optional: `flush()` and `ready()`."""

STEP_SECONDS = 1.0
"""Virtual time of one token, and of reading one tensor from the wire."""


@dataclass(frozen=True)
class Request:
    """One request: `tokens` tokens for `prompt`, of the base (`adapter` None) or of an adapter by name.

    It is answered, or refused, within `deadline` seconds. `call` is its number in the trace.
    """

    call: int
    prompt: str
    adapter: str | None
    tokens: int
    deadline: float


@dataclass(frozen=True)
class Step:
    """A token, and the name of the cache entry that the request has left in the KV memory by now."""

    token: str
    entry: int


class EngineRig(Rig):
    """The rig that `engine` gets.

    `saver` holds an allocation for each base tensor under `weights` (with a host mirror where `config.engine_mirror`
    says so), one under `kv_cache` and one under `cuda_graph`. Time is virtual: an engine whose calls are coroutines
    has several under way at once, and waits with `asyncio`; plain calls are made one after the other.
    """

    def __init__(self, config: Config, claims: Claims, sink: Callable[[AnyEvent], None]) -> None:
        self.sent = Sent()
        self._base: dict[str, tuple[str, int]] = {}
        self._valid = True
        self._entries = 0
        super().__init__(config, claims, sink)

    def start(self) -> None:
        """Makes the allocations of `config.engine_sizes`; the base that is in them has version 0."""
        for tag, nbytes in self.config.engine_sizes.items():
            names = BASE_TENSORS if tag == "weights" else (tag,)
            with self.saver.region(tag, enable_cpu_backup=tag == "weights" and self.config.engine_mirror):
                for name in names:
                    made = self.saver.alloc(nbytes // len(names), name=name, kind=tag)
                    if tag == "weights":
                        self._base[made.content] = (name, 0)

    def emit(self, event: Event) -> None:
        """Writes an event of the engine, and after it whether the base is valid, where that has changed."""
        event.owner = ENGINE_OWNER
        super().emit(event)
        if isinstance(event, (Data, SaverPause, SaverResume)) and event.tag == "weights":
            valid = self.base_valid()
            if valid is not self._valid:
                self._valid = valid
                super().emit(Change("engine.base", {"valid": valid}, owner=ENGINE_OWNER))

    def base_valid(self) -> bool:
        """Whether every base tensor holds what was sent as that tensor, all of one version. The suite's to ask."""
        held = [self._base.get(a.content, ("", -1)) for a in self.saver.of("weights")]
        return all(name == a.name for (name, _), a in zip(held, self.saver.of("weights"), strict=True)) and (
            len({version for _, version in held}) == 1
        )

    # ---- what an engine does with its device

    def write(self, tensor: str, data: Any) -> None:
        """Copies a base tensor into its place in the weights memory, a fault point `engine.write`."""
        with self.point("engine.write"):
            content = self.saver.fresh_content()
            what = self.sent.what(data)
            if what is not None and what.kind == "base":
                self._base[content] = (what.tensor, what.version)
            self.saver.touch(self.saver.allocations[tensor], "overwrite", content)

    def forward(self, request: Request, *, adapter: Mapping[str, Any] | None = None, cached: int | None = None) -> Step:
        """Computes the next token of a request, a fault point `engine.forward`.

        `adapter`: the adapter's tensors by the names they came with, as bytes or buffers. `cached`: the entry of an
        earlier step whose KV is taken over. Reads the memory of every tag: where one is released the process ends.
        """
        with self.point("engine.forward"):
            self._entries += 1
            released = sorted({a.tag for a in self.saver.allocations.values() if a.paused})
            labels = [self._label(name, adapter) for name in ADAPTER_TENSORS] if adapter is not None else []
            self.emit(
                EngineToken(
                    request.call,
                    request.prompt,
                    self._entries,
                    cached or 0,
                    released,
                    self.base_valid(),
                    labels,
                )
            )
            for allocation in list(self.saver.allocations.values()):
                self.saver.touch(allocation, "overwrite" if allocation.tag == "kv_cache" else "read")
            return Step(f"{request.prompt}.{self._entries}", self._entries)

    async def step(
        self, request: Request, *, adapter: Mapping[str, Any] | None = None, cached: int | None = None
    ) -> Step:
        """`forward` after the time that a token takes, for engines whose calls are coroutines."""
        await asyncio.sleep(STEP_SECONDS)
        return self.forward(request, adapter=adapter, cached=cached)

    async def pace(self) -> None:
        """The time that reading a tensor takes."""
        await asyncio.sleep(STEP_SECONDS)

    def _label(self, tensor: str, adapter: Mapping[str, Any]) -> str:
        what = self.sent.what(adapter[tensor]) if tensor in adapter else None
        if what is None or what.kind != "adapter" or what.tensor != tensor:
            return "?"
        return f"{what.name}@{what.version}"

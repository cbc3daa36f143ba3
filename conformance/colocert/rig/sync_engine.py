"""The engine double of a weight sync: base, adapters by name and version, and a cache that may be stale.

Knows what the engine holds under each name, what version it says it serves, and under which weights a cached prefix
was computed. Memory and its tags are those of `EngineDouble`. Does not know trainers.

A cached prefix (or encoder state: one cache stands for both) is found again by what serves the request and, where that
was loaded `salted`, by the version as well. It goes with `flush()` and with the KV cache's memory. While trainer and
engine overlap (`config.overlap`) requests come in after every call; a `drain()` holds them back until `admit()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from colocert.rig.contract import Config
from colocert.rig.engine import EngineDouble, EngineNotReady
from colocert.rig.faults import Faults
from colocert.trace.events import EngineServe, Event, RequestBegin, RequestEnd

BASE = ""
"""The name under which merged or full weights are served."""


class SyncEngine(EngineDouble):
    """One engine. `versions`: name to the version it says it serves; `routes`: name to what was loaded for it.

    `adapters` are the names that requests ask for once they are served; until then they ask for the base.
    """

    def __init__(
        self,
        config: Config,
        write: Callable[[Event], None],
        faults: Faults,
        base: str,
        *,
        adapters: tuple[str, ...] = (),
        overlap: bool = False,
    ) -> None:
        super().__init__(0, config, write, faults)
        self.loaded: dict[str, str] = {BASE: base}
        self.routes: dict[str, str] = {BASE: BASE}
        self.versions: dict[str, int] = {BASE: 0}
        self.adapters, self.overlap = adapters, overlap
        self._salted: set[str] = set()
        self._cache: dict[tuple[str, int], str] = {}

    # ---- weights

    def load(
        self,
        kind: str,
        contents: Mapping[str, str],
        name: str = BASE,
        version: int | None = None,
        *,
        salt: bool = False,
    ) -> None:
        """Takes what `send` gave. `kind` adapter: under `name`; base or merged: as the base, to be named "".

        A name that is not routed elsewhere serves it from now on, at `version` if one is given. `salt`: its cache is
        keyed by version. Raises `EngineNotReady` while the weights are released. A fault point `engine.load`.
        """
        if kind not in ("adapter", "merged", "base") or (kind == "adapter") is (name == BASE):
            raise ValueError(f"load takes an adapter with its name, or merged or base without (got {kind}, {name!r})")
        if "weights" in self.released:
            raise EngineNotReady("weights must be resident to be updated (got released): resume them first")
        with self._faults.point("engine.load"):
            self.loaded[name] = "+".join(contents[tensor] for tensor in sorted(contents))
            self.routes.setdefault(name, name)
            (self._salted.add if salt else self._salted.discard)(name)
            if kind != "adapter":
                self.base_valid = True
                self.base_version += 1
            self._serves(name, self.versions.get(name, 0) if version is None else version)
        self._traffic()

    def serve(self, name: str, version: int, loaded: str | None = None) -> None:
        """The version that `name` serves from now on, and what was loaded for it where that changes.

        Raises `KeyError` for what is not loaded. A fault point `engine.serve`.
        """
        source = self.routes.get(name, name) if loaded is None else loaded
        if source not in self.loaded:
            raise KeyError(f"an adapter must be loaded to be served (got {source})")
        with self._faults.point("engine.serve"):
            self.routes[name] = source
            self._serves(name, version)
        self._traffic()

    def stamp(self, name: str, version: int) -> None:
        """The version that requests for `name` carry from now on, where the client keeps it: nothing can fail."""
        self._serves(name, version)

    def unload(self, name: str) -> None:
        """Drops what was loaded under a name. A fault point `engine.unload`."""
        with self._faults.point("engine.unload"):
            self.loaded.pop(name, None)
            if self.routes.get(name) == name:
                del self.routes[name]

    def serving(self, name: str) -> str:
        """The content token of what `name` serves; empty where nothing is loaded for it."""
        return self.loaded.get(self.routes.get(name, ""), "") if name in self.routes else ""

    def _serves(self, name: str, version: int) -> None:
        self.versions[name] = version
        self.emit(EngineServe(name, version, self.base_version, self.serving(name)))

    # ---- caches and requests

    def flush(self) -> None:
        """Drops cached prefixes and encoder state. A fault point `engine.flush`."""
        with self._faults.point("engine.flush"):
            self._cache.clear()
            super().flush()
        self._traffic()

    def release(self, tags: Iterable[str] | None = None) -> None:
        """As `EngineDouble.release`; what was cached goes with the KV cache's memory."""
        try:
            super().release(tags)
        finally:
            if "kv_cache" in self.released:
                self._cache.clear()

    def resume(self, tags: Iterable[str] | None = None) -> None:
        """As `EngineDouble.resume`."""
        super().resume(tags)
        self._traffic()

    def admit(self) -> None:
        """As `EngineDouble.admit`."""
        super().admit()
        self._traffic()

    def request(self, name: str = BASE) -> None:
        """One request, answered at once. Raises `EngineNotReady` while memory is out."""
        ready, version = not self.released, self.versions.get(name, 0)
        route = self.routes.get(name, name)
        key = (route, version if route in self._salted else 0)
        content = self.serving(name)
        cached = self._cache.get(key, "") if ready else ""
        self.emit(RequestBegin(name, version, ready, self.base_valid, content, cached))
        if not ready:
            raise EngineNotReady(f"{', '.join(sorted(self.released))} must be resident to generate (got released)")
        self._cache.setdefault(key, content)
        self.emit(RequestEnd(name, version))

    def names(self) -> list[str]:
        """The adapters that can be asked for; the base alone where there is none."""
        return [name for name in self.adapters if name in self.routes] or [BASE]

    def _traffic(self) -> None:
        if self.overlap and self.admitting and not self.released:
            for name in self.names():
                self.request(name)

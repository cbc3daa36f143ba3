"""The rig: everything an adapter is given for one scenario, built fresh and undone afterwards.

Knows the doubles and how an adapter reaches them. Does not know the rules or which scenario is running.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from colocert.rig.contract import Claims, Config
from colocert.rig.faults import Faults, _Point
from colocert.rig.groups import STANDARD_GROUPS, ProcessGroups
from colocert.rig.saver import Allocation, StrictSaver
from colocert.trace.events import AnyEvent, Change, ClaimsStated, Event, Note, Send
from colocert.trace.events import Config as ConfigEvent

_ABSENT = object()


class Rig:
    """One scenario's world.

    `config`: what this scenario is. `saver`: the strict saver, already holding the allocations of `config.regions`
    (unless the adapter calls `start_empty()` before it builds a real model). `process_groups`: the group double.
    """

    def __init__(
        self,
        config: Config,
        claims: Claims,
        sink: Callable[[AnyEvent], None],
        *,
        capacity: int | None = None,
        directory: Path | None = None,
    ) -> None:
        self.config, self.claims = config, claims
        self._sink = sink
        self._seq = 0
        self._directory = directory
        self._undo: list[Callable[[], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self.faults = Faults(self.emit)
        self.saver = StrictSaver(self.emit, capacity=capacity, faults=self.faults)
        self.process_groups = ProcessGroups(self.emit, self.faults)
        self.emit(ConfigEvent(config.facts()))
        self.emit(ClaimsStated(claims.facts()))
        for tag, regions in config.regions.items():
            for region in regions:
                with self.saver.region(tag, enable_cpu_backup=region.backup):
                    self.saver.alloc(region.nbytes, name=region.name, kind=region.kind)
        if config.groups == "present":
            for name, args in STANDARD_GROUPS.items():
                self.process_groups.create(name, **args)
        self.faults.passed.clear()

    def emit(self, event: Event) -> None:
        """Writes an event; nothing is written once the saver has ended the process."""
        if self._seq and self.saver.dead:
            return
        self._seq += 1
        event.seq = self._seq
        self._sink(event)  # type: ignore[arg-type]

    # ---- memory

    def start_empty(self) -> None:
        """Frees the allocations of `config.regions`: for adapters that build a real model and allocate themselves."""
        for allocation in list(self.saver.allocations.values()):
            self.saver.free(allocation)

    def alloc(
        self, tag: str, nbytes: int, *, backup: bool = False, name: str | None = None, kind: str | None = None
    ) -> Allocation:
        """An allocation of `nbytes` bytes under `tag`."""
        with self.saver.region(tag, enable_cpu_backup=backup):
            return self.saver.alloc(nbytes, name=name, kind=kind)

    def data(
        self, tag: str, how: str, *, only: str | None = None, content: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Numerical work on a tag's memory: `how` is read, accumulate, zero, overwrite or consume.

        Returns name to content; give it back as `content` with `overwrite` to restore what was read. `only` narrows
        the work to one allocation. Work on released memory ends the process.
        """
        if how not in ("read", "accumulate", "zero", "overwrite", "consume"):
            raise ValueError(f"how must be read, accumulate, zero, overwrite or consume (got {how!r})")
        return {
            a.name: self.saver.touch(a, how, (content or {}).get(a.name))
            for a in self.saver.of(tag)
            if only is None or a.name == only
        }

    def free_bytes(self) -> int:
        """Bytes of the device that nobody holds now: what a trainer can ask before it resumes."""
        return self.saver.free_bytes()

    def clear_memory(self, frees: Iterable[Allocation] = ()) -> None:
        """Cache clearing, a fault point `clear_memory`; `frees` are the allocations that it frees."""
        with self.point("clear_memory"):
            for allocation in frees:
                self.saver.free(allocation)

    def fill_device(self, leave: int) -> None:
        """The suite takes device memory until `leave` bytes are free, as a neighbour on the device does."""
        self.saver.ballast = 0
        if self.saver.capacity is None:
            self.saver.capacity = self.saver.device_bytes + (1 << 30)
        self.saver.ballast = self.saver.free_bytes() - leave
        self.emit(Change("device.filled", {"free": leave}))

    def relieve_device(self) -> None:
        """The suite gives back what `fill_device` took."""
        self.saver.ballast = 0
        self.emit(Change("device.relieved"))

    # ---- weights

    def send(
        self, kind: str, tag: str, *, read_from: str = "device", only: str | None = None, version: int = 0
    ) -> None:
        """Sends weights of `tag` to the engine, a fault point `send`. `kind` is base, adapter or merged.

        `read_from="device"` reads the memory, which must be resident; `"host"` takes the saver's host copy and raises
        `ValueError` if there is none.
        """
        if kind not in ("base", "adapter", "merged") or read_from not in ("device", "host"):
            raise ValueError(
                f"kind must be base, adapter or merged, read_from device or host (got {kind}, {read_from})"
            )
        chosen = [a for a in self.saver.of(tag) if only is None or a.name == only]
        with self.point("send"):
            for allocation in chosen:
                if read_from == "device":
                    self.saver.touch(allocation, "read")
                elif not self.saver.get_cpu_backup(allocation):
                    raise ValueError(f"{allocation.name} has no host copy to send from: it is resident")
            names = [a.name for a in chosen]
            self.emit(Send(kind, sum(a.nbytes for a in chosen), read_from, version, names))

    # ---- faults, statements, patches

    def point(self, name: str) -> _Point:
        """A named fault point around an effect of the adapter's: `with rig.point("export"): ...`."""
        return self.faults.point(name)

    def record(self, op: str, **facts: Any) -> None:
        """Writes a statement into the trace, for people; no rule passes on it."""
        self.emit(Note(op, facts, statement=True))

    def patch(self, target: str | tuple[Any, str], value: Any) -> None:
        """Sets an attribute for this scenario: `"package.module.attr"`, or an object and an attribute's name."""
        if isinstance(target, str):
            module, _, attribute = target.rpartition(".")
            owner: Any = importlib.import_module(module)
        else:
            owner, attribute = target
        before = (
            inspect.getattr_static(owner, attribute, _ABSENT)
            if inspect.isclass(owner)
            else getattr(owner, attribute, _ABSENT)
        )
        setattr(owner, attribute, value)
        self._undo.append(lambda: delattr(owner, attribute) if before is _ABSENT else setattr(owner, attribute, before))

    def stubs(self, names: Iterable[str]) -> None:
        """Puts stand-ins for absent modules that a framework imports unguarded; see `colocert.rig.stubs`.

        Stays for the process: an implementation is imported once.
        """
        from colocert.rig.stubs import install

        install(names)

    @property
    def directory(self) -> Path:
        """A folder of this scenario's own for files; removed at its end."""
        if self._directory is None:
            folder = tempfile.TemporaryDirectory(prefix="colocert-")
            self._undo.append(folder.cleanup)
            self._directory = Path(folder.name)
        return self._directory

    # ---- coroutines and remote handles

    def run(self, value: Any) -> Any:
        """Runs a coroutine to its end on the rig's own loop; passes any other value through."""
        if not inspect.isawaitable(value):
            return value
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._undo.append(self._loop.close)

        async def waited() -> Any:
            return await value

        return self._loop.run_until_complete(waited())

    get = run
    """Stands where `ray.get` would: the result of a handle's call."""

    def remote(self, obj: object) -> Any:
        """A handle whose methods are called as `handle.method.remote(...)`, giving an awaitable."""
        return _Remote(obj)

    def close(self) -> None:
        """Undoes patches, last first, and removes the scenario's files."""
        while self._undo:
            self._undo.pop()()

    def fingerprint(self) -> tuple[object, ...]:
        """The state of every double, as a hashable value."""
        return (self.saver.fingerprint(), self.process_groups.fingerprint())


class _Remote:
    def __init__(self, obj: object) -> None:
        self._obj = obj

    def __getattr__(self, name: str) -> _RemoteMethod:
        return _RemoteMethod(getattr(self._obj, name))


class _RemoteMethod:
    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    async def remote(self, *args: Any, **kwargs: Any) -> Any:
        result = self._method(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

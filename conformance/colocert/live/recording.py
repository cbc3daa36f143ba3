"""`colocert.record(...)`: one process of a real run, written down as it happens.

Knows the process, its rank, its clock and its file. Does not know how a saver, engine or trainer is wrapped
(`colocert.live.wrap`), and judges nothing.

    recording = colocert.record("traces", rank=rank, claims=..., config=...)    nothing written yet
    recording.saver(...) recording.trainer(...) recording.engine(...)           file opened, objects patched in place
    the run                                                                     an event each; off() and on() at will
    recording.close()                                                           patches undone, the file cut to size

Nothing that goes wrong in here reaches the run: recording then stops, and `problem` says why.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import get_ident
from time import monotonic_ns
from typing import Any

import msgspec

from colocert.live.dispatch import wrap_group, wrap_weight_sync, wrap_worker
from colocert.live.log import MappedLog
from colocert.live.wrap import Patches, wrap_driver, wrap_engine, wrap_handle, wrap_saver, wrap_trainer
from colocert.rig.contract import Claims, Config
from colocert.trace.events import (
    SCHEMA_VERSION,
    BytesSeen,
    ClaimsStated,
    Closed,
    Event,
    HandOff,
    Header,
    Watch,
)
from colocert.trace.events import Config as ConfigEvent

_encode = msgspec.json.Encoder().encode
_PAGE = os.sysconf("SC_PAGE_SIZE")


def record(
    folder: str | os.PathLike[str],
    *,
    rank: int,
    owner: str = "",
    claims: Claims | Mapping[str, Any] | None = None,
    config: Config | Mapping[str, Any] | None = None,
    name: str = "",
    from_start: bool = False,
    device_bytes: Callable[[], tuple[int, int]] | None = None,
    host_bytes: bool = False,
) -> Recording:
    """Records this process of a real run into a file of its own below `folder`.

    `rank` is the trainer's rank, or the engine's number with `owner="engine"`. `claims` are what the implementation
    claims, as for `--impl`; `config` what this run is: `lora` and `peak_device` at least, and what else of
    `colocert.Config` applies. Rules bind on them, so what neither states is not judged. `from_start`: nothing was
    allocated before this call, so that what the recording does not see does not exist. `device_bytes` gives (free,
    total) of the device, as `torch.cuda.mem_get_info` does; with it, or with `host_bytes`, each call that moves memory
    is followed by a measurement.

    Raises `ContractError` for claims that are not claims, `ValueError` for a negative rank or another owner.
    """
    if rank < 0:
        raise ValueError(f"rank must be 0 or more (got {rank})")
    if owner not in ("", "engine", "driver"):
        raise ValueError(f'owner must be "" (a trainer), "engine" or "driver" (got {owner!r})')
    stated = None if claims is None else Claims.of(claims).facts()
    facts = config.facts() if isinstance(config, Config) else dict(config or {})
    return Recording(
        Path(folder),
        Header(schema=SCHEMA_VERSION, scenario=name, profile="", live=True, rank=rank, owner=owner),
        stated,
        facts,
        from_start=from_start,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
    )


class Recording:
    """The recording of one process; a forked child continues in a file of its own.

    `path` is the file, once there is an event. `problem` is empty, or why recording stopped.
    """

    def __init__(
        self,
        folder: Path,
        header: Header,
        claims: dict[str, Any] | None,
        config: dict[str, Any],
        *,
        from_start: bool,
        device_bytes: Callable[[], tuple[int, int]] | None,
        host_bytes: bool,
    ) -> None:
        self.folder, self.rank, self.owner = folder, header.rank, header.owner
        self.claims, self.config = claims, config
        self.problem = ""
        self.path: Path | None = None
        self._parent, self._marks = "", 0
        self.recording = True
        self._header = header
        self._device_bytes, self._host_bytes = device_bytes, host_bytes
        self._watched: list[str] = ["from-start"] if from_start else []
        self._patches = Patches()
        self._forget()
        _ALL.add(self)

    def _forget(self) -> None:
        """What a fresh process starts with."""
        self._lock, self._marking = threading.Lock(), threading.Lock()
        self._log: MappedLog | None = None
        self._writer = 0
        self._waiting: list[Event] = []
        self._seq = self.calls = 0
        self.generation = secrets.token_hex(4)

    # ---- what is recorded

    def saver(
        self, saver: Any, *, regions: Mapping[str, bool] | None = None, nbytes: Mapping[str, int] | None = None
    ) -> Any:
        """Records a `torch_memory_saver`: regions by tag, and each release and resume that returned.

        `regions` says which tags had memory before this call, and whether with a host backup; `nbytes` their sizes.
        Returns the saver itself. Raises `TypeError` where it has no `pause`, `resume` and `region`, or takes no patch.
        """
        wrap_saver(self, self._patches, saver, regions or {}, nbytes or {})
        return saver

    def trainer(self, trainer: Any, *, role: str = "trainer", **methods: str) -> Any:
        """Records calls of a training worker: contract name = its own method's name, `sleep="offload"`.

        The contract's names are init, sleep, wake_up, train, update_weights, offload_grad_buffer, clear_memory and
        close. A call made inside another one is part of that one.
        """
        wrap_trainer(self, self._patches, trainer, role, methods)
        return trainer

    def engine(
        self,
        client: Any,
        *,
        number: int | None = None,
        tags: Iterable[str] = (),
        released: Iterable[str] = (),
        tags_of: Callable[..., Iterable[str] | None] | None = None,
        **methods: str,
    ) -> Any:
        """Records an engine through its client: contract name = the client's own method's name.

        The contract's names are release, resume, update, generate, drain, admit and flush. `number` is the engine's, by
        default this rank's. `tags` is what it has, `released` what of it is released now. `tags_of(*args, **kwargs)`
        reads the tags of a call; by default the argument `tags`, or the first one, or all.
        """
        wrap_engine(self, self._patches, client, number, tuple(tags), set(released), tags_of, methods)
        return client

    def driver(self, driver: Any, **methods: str) -> Any:
        """Records the calls `build`, `run` and `close` of the loop itself: contract name = its own method's name."""
        wrap_driver(self, self._patches, driver, methods)
        return driver

    def weight_sync(self, dispatch: Any, /, **methods: str) -> Any:
        """Records calls of the object that decides who is on the device for a weight sync.

        The contract's names are after_build, train_step, forward and sync; a first argument that is a string is the
        role or the adapter. Record its workers with `worker` and its engine's `update` with `engine`.
        """
        wrap_weight_sync(self, self._patches, dispatch, methods)
        return dispatch

    def worker(
        self,
        worker: Any,
        /,
        *,
        role: str,
        kinds: Mapping[str, int],
        offloaded: Iterable[str] = (),
        kinds_of: Callable[..., Iterable[str]] | None = None,
        **methods: str,
    ) -> Any:
        """Records what the workers of a role move: `offload` and `backload`, contract name = their own method's name.

        The role whose weights are sent is `policy`. `kinds` are the bytes of model, adapters, optimizer and grads that
        it has, `offloaded` those that are off the device now. `kinds_of(*args, **kwargs)` names what a call moves; by
        default all.
        """
        wrap_worker(self, self._patches, worker, role, kinds, offloaded, kinds_of, methods)
        return worker

    def group(self, group: Any, /, **methods: str) -> Any:
        """Records calls of a group of trainers: contract name = the group's own method's name.

        The contract's names are onload, offload, offload_grad_buffer, clear_memory, train and update_weights.
        """
        wrap_group(self, self._patches, group, methods)
        return group

    def handle(self, handle: Any, *, rank: int, owner: str = "", **methods: str) -> Any:
        """Records what a driver asks of a rank or an engine: when a call is issued, and when it is acknowledged.

        A call is acknowledged when it returns, when what it returned is awaited, or when a future that it returned is
        done. For a remote reference of another kind (Ray's) say so with `acknowledged(reference)`.
        """
        wrap_handle(self, self._patches, handle, rank, owner, methods)
        return handle

    def acknowledged(self, reference: Any) -> None:
        """A remote reference that a recorded handle returned has been waited for."""
        self._patches.acknowledge(self, reference)

    def handoff(self, name: str = "") -> None:
        """Marks, in every process alike, that all have acknowledged what came before; orders ranks across machines."""
        with self._marking:
            self.emit(HandOff(self._marks + 1, name, rank=self.rank, owner=self.owner))
            self._marks += 1

    def believed(self, released: Mapping[str, bool]) -> None:
        """What the framework's own flags say is released. A statement; nothing passes on it."""
        from colocert.trace.events import Believed

        self.emit(Believed(dict(released), statement=True, rank=self.rank, owner=self.owner))

    # ---- off and on, undone, closed

    def off(self) -> None:
        """Stops writing and ends the file. What is released is still followed."""
        self._end()

    def on(self) -> None:
        """Writes again, into a new file, which begins with what is released now. Does nothing after a problem."""
        if not self.recording and not self.problem:
            self._forget()
            self.recording = True

    def undo(self) -> None:
        """Gives every wrapped object its own methods back."""
        self._patches.undo()

    def close(self) -> None:
        """Undoes the patches, writes the closing line and cuts the file to size."""
        self.undo()
        self._end()

    def _end(self) -> None:
        if self._log is not None:
            self.emit(Closed(rank=self.rank, owner=self.owner))
        self.recording = False
        with self._lock:
            if self._log is not None:
                self._log.close()
                self._log = None

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- writing

    @property
    def started(self) -> bool:
        """Whether there is a file; it begins with all that is known by then."""
        return self._log is not None

    def sees(self, what: str) -> bool:
        """Whether that can be seen."""
        return what in self._watched

    def watch(self, *what: str) -> None:
        """From here on these can be seen."""
        new = [w for w in what if w not in self._watched]
        if self._log is None or new:
            self.emit(Watch(new, rank=self.rank, owner=self.owner))
        self._watched += new

    def emit(self, event: Event) -> None:
        """Writes one event. Never raises; keeps the order of one event after another in every thread."""
        if not self.recording:
            return
        lock = self._lock
        if not lock.acquire(False):
            if self._writer == get_ident():  # a signal handler or a finaliser, inside the write of another event
                self._waiting.append(event)
                return
            lock.acquire()
        self._writer = get_ident()
        try:
            log = self._log
            if log is None:
                log = self._open()
            self._seq = event.seq = self._seq + 1
            event.at = monotonic_ns()
            log.append(_encode(event))
            while self._waiting:
                self._write(log, self._waiting.pop(0))
        except Exception as error:
            self.recording = False
            self.problem = f"{type(error).__name__}: {error}"
        finally:
            self._writer = 0
            lock.release()

    def _write(self, log: MappedLog, event: Event) -> None:
        self._seq = event.seq = self._seq + 1
        event.at = monotonic_ns()
        log.append(_encode(event))

    @property
    def measures(self) -> bool:
        """Whether bytes were asked for."""
        return self._device_bytes is not None or self._host_bytes

    def measure(self) -> None:
        """Writes the bytes of device and process, where they were asked for."""
        if not (self.recording and self.measures):
            return
        try:
            free, total = (-1, -1) if self._device_bytes is None else self._device_bytes()
            rss = _resident() if self._host_bytes else -1
        except Exception as error:
            self._device_bytes, self._host_bytes = None, False
            self.problem = f"bytes are no longer measured: {type(error).__name__}: {error}"
            return
        self.emit(BytesSeen(int(free), int(total), rss, rank=self.rank, owner=self.owner))

    def _open(self) -> MappedLog:
        process = f"{self.owner or 'trainer'}-{self.rank:05}-{os.getpid()}-{self.generation}"
        log = MappedLog(self.folder / f"{process}.jsonl")
        self.path = log.path
        now = monotonic_ns()
        header = msgspec.structs.replace(
            self._header,
            process=process,
            parent=self._parent,
            boot=_boot(),
            wall=time.time_ns(),
            marks=self._marks,
            at=now,
        )
        log.append(_encode(header))
        self._log = log
        if self.config:
            self._write(log, ConfigEvent(self.config, rank=self.rank, owner=self.owner))
        if self.claims is not None:
            self._write(log, ClaimsStated(self.claims, rank=self.rank, owner=self.owner))
        if self._watched:
            self._write(log, Watch(list(self._watched), rank=self.rank, owner=self.owner))
        for event in self._patches.state():
            self._write(log, event)
        return log

    def _forked(self) -> None:
        if self._log is not None:
            self._log.abandon()
        self._parent, self._marks = "" if self.path is None else self.path.stem, 0
        self._forget()
        if "from-start" in self._watched:
            self._watched.remove("from-start")
        self._patches.forget()


_ALL: weakref.WeakSet[Recording] = weakref.WeakSet()


def _after_fork() -> None:
    for recording in list(_ALL):
        recording._forked()


os.register_at_fork(after_in_child=_after_fork)


def _boot() -> str:
    """Equal for processes that share a monotonic clock; says nothing else about the machine."""
    try:
        said = Path("/proc/sys/kernel/random/boot_id").read_text()
        said += str(Path("/proc/self/ns/time").readlink())
    except OSError:
        import platform

        said = platform.node()
    return hashlib.sha256(said.encode()).hexdigest()[:12]


def _resident() -> int:
    with open("/proc/self/statm", "rb") as stream:  # noqa: PTH123
        return int(stream.read().split()[1]) * _PAGE

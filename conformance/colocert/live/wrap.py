"""What stands in the place of a wrapped object's methods: the same call, with events around it.

Knows savers, trainers, engine clients and handles by the names of their methods. Does not know files, and imports no
framework. A wrapper returns what the method returned, the same object, and raises what it raised; of a coroutine it
returns one that does so.

A saver is seen a tag at a time: that a region was opened, and that a release or resume returned. Contents, addresses,
sizes, frees and single allocations are not seen, and no event claims them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from colocert.live.tags import EngineTags, SaverTags
from colocert.trace.events import (
    Ack,
    CallBegin,
    CallEnd,
    CallIssue,
    CallRaise,
    SaverCall,
    SaverRefused,
)

if TYPE_CHECKING:
    from colocert.live.recording import Recording

TRAINER_CALLS = (
    "init",
    "sleep",
    "wake_up",
    "train",
    "update_weights",
    "offload_grad_buffer",
    "clear_memory",
    "close",
)
ENGINE_CALLS = ("release", "resume", "update", "generate", "drain", "admit", "flush")
DRIVER_CALLS = ("build", "run", "close")
OUTER = frozenset({"driver", "group", "weight_sync"})
"""Who calls trainers: a trainer's call inside one of theirs is one of its own."""

_inside: ContextVar[bool] = ContextVar("colocert_inside_a_trainer_call", default=False)

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class _State(Protocol):
    def state(self) -> list[Any]: ...
    def forget(self) -> None: ...


class Patches:
    """Methods put in the place of others, and calls whose acknowledgement is awaited."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, bool, Any]] = []
        self._pending: dict[int, tuple[Any, Ack]] = {}
        self._states: list[_State] = []

    def put(self, target: Any, name: str, wrapper: Any) -> None:
        """Puts a wrapper in the place of a method. Raises `TypeError` where the object takes none."""
        mine = getattr(target, "__dict__", {})
        had, before = name in mine, mine.get(name)
        try:
            setattr(target, name, wrapper)
        except (AttributeError, TypeError) as error:
            raise TypeError(
                f"{name} of {type(target).__name__} must be replaceable to be recorded (got {error}): record the "
                "object behind it, or a subclass without __slots__"
            ) from error
        self._undo.append((target, name, had, before))

    def undo(self) -> None:
        """Gives each object what it had; the last one put is the first one out."""
        while self._undo:
            target, name, had, before = self._undo.pop()
            if had:
                setattr(target, name, before)
            else:
                delattr(target, name)

    def state(self) -> list[Any]:
        """Events that say what is known of all memory now."""
        return [event for known in self._states for event in known.state()]

    def keep(self, state: _State) -> None:
        """What is known of some memory, written when a file begins."""
        self._states.append(state)

    def forget(self) -> None:
        """In a forked child: what the parent saw of its memory is not this process's."""
        self._pending.clear()
        for state in self._states:
            state.forget()

    def await_(self, reference: Any, ack: Ack) -> None:
        """The call is acknowledged when this reference is said to be."""
        self._pending[id(reference)] = (reference, ack)

    def acknowledge(self, recording: Recording, reference: Any) -> None:
        found = self._pending.pop(id(reference), None)
        if found is not None:
            recording.emit(found[1])


def wrap_saver(
    recording: Recording, patches: Patches, saver: Any, regions: Mapping[str, bool], nbytes: Mapping[str, int]
) -> None:
    """Records a saver's regions, releases and resumes."""
    missing = [m for m in ("region", "pause", "resume") if not callable(getattr(saver, m, None))]
    if missing:
        raise TypeError(f"a saver has region, pause and resume (got {type(saver).__name__} without {missing[0]})")
    tags = SaverTags(recording, nbytes)
    patches.keep(tags)
    for tag, backup in regions.items():
        tags.opened(tag, backup)

    def region(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        manager = original(*args, **kwargs)
        tag = _argument(args, kwargs, 0, "tag", "default")
        backup = _argument(args, kwargs, 1, "enable_cpu_backup", False)
        tags.opened(str(tag), bool(backup or _argument(args, kwargs, 2, "enable_disk_backup", False)))
        return manager

    def cuda_graph(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        manager = original(*args, **kwargs)
        tag = _argument(args, kwargs, 4, "tag", "default")
        tags.opened(str(tag), bool(_argument(args, kwargs, 5, "enable_cpu_backup", False)))
        return manager

    def move(op: str, original: Callable[..., Any]) -> Callable[..., Any]:
        emit, rank, owner = recording.emit, recording.rank, recording.owner
        next_call, moved, measures = tags.next_call, tags.moved, recording.measures

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            tag = (args[0] if args else kwargs.get("tag")) or None
            if tag is not None and tag.__class__ is not str:
                tag = str(tag)
            number = next_call()
            emit(SaverCall(op, tag, number, rank=rank, owner=owner))
            try:
                result = original(*args, **kwargs)
            except Exception:
                emit(SaverRefused(op, tag, number, rank=rank, owner=owner))
                raise
            except BaseException:
                tags.ended(op, tag, number)
                raise
            moved(op, tag, number)
            if measures:
                recording.measure()
            return result

        return method

    patches.put(saver, "region", _wrapper(saver.region, region))
    if callable(getattr(saver, "cuda_graph", None)):
        patches.put(saver, "cuda_graph", _wrapper(saver.cuda_graph, cuda_graph))
    for op in ("pause", "resume"):
        patches.put(saver, op, move(op, getattr(saver, op)))
    recording.watch("saver", *(["sizes"] if set(regions) and set(regions) <= set(nbytes) else []))


def wrap_trainer(recording: Recording, patches: Patches, trainer: Any, role: str, methods: Mapping[str, str]) -> None:
    """Records a trainer's calls; a call made by another one of them is part of that."""
    for call, method in _named(trainer, methods, TRAINER_CALLS, "trainer").items():
        patches.put(trainer, method, _calls(recording, getattr(trainer, method), role, call, recording.owner))
    recording.watch("trainer")


def wrap_driver(recording: Recording, patches: Patches, driver: Any, methods: Mapping[str, str]) -> None:
    """Records the loop's own calls."""
    for call, method in _named(driver, methods, DRIVER_CALLS, "driver").items():
        patches.put(driver, method, _calls(recording, getattr(driver, method), "driver", call, "driver"))
    recording.watch("driver")


def wrap_engine(
    recording: Recording,
    patches: Patches,
    client: Any,
    number: int | None,
    tags: tuple[str, ...],
    released: set[str],
    tags_of: Callable[..., Iterable[str] | None] | None,
    methods: Mapping[str, str],
) -> None:
    """Records what an engine is asked through its client."""
    found = _named(client, methods, ENGINE_CALLS, "engine")
    state = EngineTags(recording, recording.rank if number is None else number, tags, released)
    patches.keep(state)
    state.attached()

    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str] | None:
        given = tags_of(*args, **kwargs) if tags_of else _argument(args, kwargs, 0, "tags", None)
        if given is None:
            return None
        return [given] if isinstance(given, str) else [str(tag) for tag in given]

    for call, method in found.items():
        before, after, failed = state.events(call)

        def start(args: tuple[Any, ...], kwargs: dict[str, Any], before: Any = before, call: str = call) -> Any:
            return before(read(args, kwargs) if call in ("release", "resume") else None)

        patches.put(client, method, _spanning(recording, getattr(client, method), start, after, failed))
    facts = recording.config
    sized = "engine_mirror" in facts and tags and set(tags) <= set(facts.get("engine_sizes", {}))
    recording.watch("engine", *(["engine-sizes"] if sized else []), *(s for c, s in _SENSES.items() if c in found))


_SENSES = {"generate": "requests", "update": "send"}


def wrap_handle(
    recording: Recording, patches: Patches, handle: Any, rank: int, owner: str, methods: Mapping[str, str]
) -> None:
    """Records when calls are issued to a rank or an engine, and when they are acknowledged."""
    for call, method in _named(handle, methods, ENGINE_CALLS if owner else TRAINER_CALLS, "handle").items():
        patches.put(handle, method, _issues(recording, patches, getattr(handle, method), call, rank, owner))
    recording.watch("issues")


def _issues(
    recording: Recording, patches: Patches, original: Callable[..., Any], call: str, rank: int, owner: str
) -> Callable[..., Any]:
    def start(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ack:
        recording.calls += 1
        number = recording.calls
        recording.emit(CallIssue(call, number, rank=rank, owner=owner))
        return Ack(number, rank=rank, owner=owner)

    def after(ack: Ack, result: Any) -> None:
        if callable(done := getattr(result, "add_done_callback", None)):
            done(lambda _: recording.emit(ack))
        elif result is not None and type(result).__name__ == "ObjectRef":
            patches.await_(result, ack)
        else:
            recording.emit(ack)

    return _spanning(recording, original, start, after, lambda ack, error: recording.emit(ack))


def _calls(recording: Recording, original: Callable[..., Any], actor: str, call: str, owner: str) -> Callable[..., Any]:
    rank = recording.rank
    nests = actor not in OUTER

    def start(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if nests and _inside.get():
            return None
        recording.calls += 1
        number = recording.calls
        token = _inside.set(True) if nests else None
        subject = args[0] if args and actor == "weight_sync" and isinstance(args[0], str) else ""
        recording.emit(CallBegin(actor, call, number, subject, rank=rank, owner=owner))
        return number, token, recording.generation if recording.recording else ""

    def leave(mark: Any) -> tuple[int, bool]:
        """The call's number, and whether its begin is in the file that is being written."""
        number, token, generation = mark
        if token is not None:
            _inside.reset(token)
        return number, generation == recording.generation

    def after(mark: Any, result: Any) -> None:
        if mark is not None:
            number, begun = leave(mark)
            if begun:
                recording.emit(CallEnd(actor, call, number, rank=rank, owner=owner))
                recording.measure()

    def failed(mark: Any, error: BaseException) -> None:
        if mark is not None:
            number, begun = leave(mark)
            if begun:
                said = type(error).__name__
                recording.emit(CallRaise(actor, call, number, said, str(error)[:300], rank=rank, owner=owner))

    return _spanning(recording, original, start, after, failed)


def _spanning(
    recording: Recording,
    original: Callable[..., Any],
    start: Callable[..., Any],
    after: Callable[[Any, Any], None],
    failed: Callable[[Any, BaseException], None],
) -> Callable[..., Any]:
    """A method with something before and after it; a coroutine is spanned from its first step to its last."""
    if inspect.iscoroutinefunction(original):

        @functools.wraps(original)
        async def later(*args: Any, **kwargs: Any) -> Any:
            mark = _safely(recording, start, args, kwargs)
            try:
                result = await original(*args, **kwargs)
            except BaseException as error:
                _safely(recording, failed, mark, error)
                raise
            _safely(recording, after, mark, result)
            return result

        return later

    @functools.wraps(original)
    def now(*args: Any, **kwargs: Any) -> Any:
        mark = _safely(recording, start, args, kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            _safely(recording, failed, mark, error)
            raise
        _safely(recording, after, mark, result)
        return result

    return now


def _safely(recording: Recording, work: Callable[..., Any], *args: Any) -> Any:
    """What the recording does around a call stays out of the call."""
    try:
        return work(*args)
    except Exception as error:
        recording.recording = False
        recording.problem = f"{type(error).__name__}: {error}"
        return None


def _wrapper(original: Callable[..., Any], around: Around) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return around(original, args, kwargs)

    return method


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _named(target: Any, methods: Mapping[str, str], known: tuple[str, ...], what: str) -> dict[str, str]:
    """The methods to wrap, by contract name. Raises `TypeError` for an unknown name, and for one that is not there."""
    unknown = sorted(set(methods) - set(known))
    if unknown or not methods:
        raise TypeError(f"calls of a {what} are {', '.join(known)} (got {', '.join(unknown) or 'none'})")
    for call, method in methods.items():
        if not callable(getattr(target, method, None)):
            raise TypeError(f"{call}={method!r} must name a method of {type(target).__name__} (it has none)")
    return dict(methods)

"""The vocabulary of a trace: one struct for each thing that can happen, and nothing about what it means.

Knows the names and fields of events and the version of the schema. Does not know the rules, the doubles or files.

An event carries `owner` and `rank` (which trainer or engine), `seq` (its place in that rank's stream) and whether it
is a *statement*: something an adapter said (`rig.record`, `believed()`), on which no rule passes, rather than
something a double saw happen. Sizes are bytes. `content` is an opaque token for what a region holds: equal tokens,
equal bits. `at` is the machine's monotonic clock in nanoseconds, in recordings of real runs only.
"""

from __future__ import annotations

from typing import Any

import msgspec

SCHEMA_VERSION = 1

POISON = "poison"
"""The content token of memory that came back without its contents. All other tokens begin with `#`."""


class Event(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False, tag_field="ev"):
    """What every event carries. `owner` is whose memory or call it is: a trainer's (empty), "engine", or a role's."""

    rank: int = 0
    owner: str = ""
    seq: int = 0
    statement: bool = False
    at: int = 0


class Header(Event, tag="trace"):
    """The first line of a trace file.

    `live`: a recording of a real run, one file a process. `process` names it, `parent` the one it was forked from;
    `boot` is equal on one boot of one machine, whose processes share the clock of `at`; `wall` is the time of day at
    `at`, in nanoseconds; `marks` the hand-off marks made before.
    """

    schema: int
    scenario: str
    profile: str
    implementation: str = ""
    live: bool = False
    process: str = ""
    parent: str = ""
    boot: str = ""
    wall: int = 0
    marks: int = 0


class Config(Event, tag="config"):
    """The scenario's configuration, as the implementation saw it in `rig.config`."""

    facts: dict[str, Any]


class ClaimsStated(Event, tag="claims"):
    """What the implementation claims to support."""

    facts: dict[str, Any]


class CallIssue(Event, tag="call.issue"):
    """A driver issued a call to a rank or an engine; its `ack` comes when it is done."""

    method: str
    call: int


class CallBegin(Event, tag="call.begin"):
    """The suite called a method of the implementation; `subject` is what it was called for, an adapter or a role."""

    actor: str
    method: str
    call: int
    subject: str = ""


class CallEnd(Event, tag="call.end"):
    """That call returned."""

    actor: str
    method: str
    call: int


class CallRaise(Event, tag="call.raise"):
    """That call raised. `error` is the exception's class name; `detail`, its text, is for people and never judged."""

    actor: str
    method: str
    call: int
    error: str
    detail: str = ""


class SaverCall(Event, tag="saver.call"):
    """The implementation called the saver; `tag` is None for a call without one. Effects follow as their own events."""

    op: str
    tag: str | None
    saver_call: int


class SaverAlloc(Event, tag="saver.alloc"):
    """An allocation in a region. `kind` is what it holds: base, adapter, optimizer, grads, params or other."""

    tag: str
    alloc: str
    nbytes: int
    backup: bool
    kind: str = "other"
    address: int = 0
    content: str = ""


class SaverPause(Event, tag="saver.pause"):
    """The allocation's physical memory went back to the device; with `backup` its content went to the host."""

    tag: str
    alloc: str
    nbytes: int
    backup: bool
    saver_call: int
    content: str = ""


class SaverResume(Event, tag="saver.resume"):
    """The allocation has physical memory again, holding `content`, at `address`; `retained`: its host copy stays."""

    tag: str
    alloc: str
    nbytes: int
    backup: bool
    saver_call: int
    content: str = ""
    address: int = 0
    retained: bool = False


class SaverFree(Event, tag="saver.free"):
    """The allocation was freed; `released` if it had no physical memory at that moment."""

    tag: str
    alloc: str
    nbytes: int
    released: bool = False


class SaverTouch(Event, tag="saver.touch"):
    """Released memory was read or written. On a device this is the end of the process."""

    tag: str
    alloc: str
    how: str


class SaverRefused(Event, tag="saver.refused"):
    """The saver raised before it moved anything."""

    op: str
    tag: str | None
    saver_call: int


class SaverFatal(Event, tag="saver.fatal"):
    """The saver ended the process, as C `exit(1)` does: no exception, no cleanup.

    `reason` is double-release, double-resume or out-of-memory; `partial` says that only some allocations of the
    call were in the wrong state.
    """

    op: str
    tag: str | None
    alloc: str
    saver_call: int
    reason: str
    partial: bool = False


class Data(Event, tag="data"):
    """Numerical work on an allocation: read, accumulate, zero, overwrite or consume."""

    tag: str
    alloc: str
    how: str
    kind: str = "other"
    content: str = ""


class GroupCreate(Event, tag="group.create"):
    """A process group was created with these arguments."""

    name: str
    args: dict[str, Any]


class GroupDestroy(Event, tag="group.destroy"):
    """A process group was torn down."""

    name: str


class GroupUse(Event, tag="group.use"):
    """A collective ran on a process group; `alive` is False if there was none to run on."""

    name: str
    alive: bool


class Move(Event, tag="move"):
    """Tensors of an owner moved `to` the device or the host."""

    owner: str
    kind: str
    tensors: list[str]
    to: str
    nbytes: int


class Send(Event, tag="send"):
    """Weights left for the engine: base, adapter or merged, read from the device or from the host.

    `contents`, where it is known, are the content tokens of `tensors`, in their order.
    """

    kind: str
    nbytes: int
    read_from: str
    version: int = 0
    tensors: list[str] = []
    contents: list[str] = []


class EngineRelease(Event, tag="engine.release"):
    """The engine gave the memory of these tags back; `redundant` are those that were released already."""

    tags: list[str]
    redundant: list[str] = []


class EngineResume(Event, tag="engine.resume"):
    """The engine took the memory of these tags again; `redundant` are those that were not released."""

    tags: list[str]
    redundant: list[str] = []


class EngineAdmit(Event, tag="engine.admit"):
    """The engine accepts requests from here on."""


class EngineDrain(Event, tag="engine.drain"):
    """The engine finished what was in flight and accepts no more."""


class EngineFlush(Event, tag="engine.flush"):
    """The engine dropped its caches."""


class EngineServe(Event, tag="engine.serve"):
    """What the engine serves from here on; `content`, where it is known, is the token of those weights."""

    adapter: str
    version: int
    base: int
    content: str = ""


class RequestBegin(Event, tag="request.begin"):
    """A request entered the engine. `ready` is False if some of its memory was released; `valid` if its base was.

    `content`, where it is known, is the token of the weights that answer it; `cached` that of the weights under which
    a prefix or encoder state that it hits was computed, empty for a miss.
    """

    adapter: str
    version: int = 0
    ready: bool = True
    valid: bool = True
    content: str = ""
    cached: str = ""


class RequestEnd(Event, tag="request.end"):
    """A request left the engine."""

    adapter: str
    version: int = 0


class EngineAsked(Event, tag="engine.asked"):
    """What the call of that number, which begins next, asks an engine for. `version` is of what an update brings."""

    call: int
    method: str
    tags: list[str] = []
    adapter: str = ""
    version: int = 0
    prompt: str = ""


class EngineToken(Event, tag="engine.token"):
    """An engine computed a token for the request of that call.

    `released`: tags without memory at that moment. `base_valid`: all base tensors were of one version. `adapters`: of
    each adapter tensor that went in, NAME@VERSION, or ? for bytes that were never sent as that tensor. `hit`: the
    cached entry that it went on from, 0 for none; `entry`: the one that it left.
    """

    call: int
    prompt: str
    entry: int
    hit: int = 0
    released: list[str] = []
    base_valid: bool = True
    adapters: list[str] = []


class Ack(Event, tag="ack"):
    """A rank or an engine acknowledged a call that a driver issued."""

    call: int


class Believed(Event, tag="believed"):
    """What the implementation's own flags say: tag to released. A statement."""

    released: dict[str, bool]


class Fault(Event, tag="fault"):
    """The suite injected a fault at a point, before or after its effect."""

    point: str
    when: str


class Change(Event, tag="rig.change"):
    """The suite changed the world under the implementation: took groups away, filled the device."""

    what: str
    facts: dict[str, Any] = {}


class EngineSession(Event, tag="engine.session"):
    """A session in which the engine takes base weights was opened or closed; `op` is open or close."""

    op: str


class EngineLoad(Event, tag="engine.load"):
    """Weights arrived at the engine: `kind` is base or adapter; `poisoned`: some came from memory without contents.

    `loaded` are the names that it took, `unknown` those that it had no place for.
    """

    kind: str
    adapter: str
    version: int
    loaded: list[str]
    unknown: list[str]
    nbytes: int
    poisoned: bool = False


class Measured(Event, tag="measured"):
    """What the rig saw when it looked at the tensors: their state `before` and `after` a sync, or `levels` after it."""

    what: str
    facts: dict[str, Any] = {}


class ModuleSeen(Event, tag="module"):
    """A process has a real module. `tensors`: by name [kind, layout, bytes, the first name of the same tensor].

    Kinds are frozen, adapter, trained, buffer and fused; a layout is dtype and shape. `frozen_bytes` counts tied
    tensors once; `storage_bytes` are those of the storages they lie in, which may be more. `found`: what else the
    folder has seen before this process: planted, altered, killed, ended, alive.
    """

    tensors: dict[str, list[Any]]
    frozen_bytes: int
    storage_bytes: int
    found: list[str] = []


class TensorsSeen(Event, tag="tensors"):
    """Where a process's tensors are and what they hold. `when`: built, changed, offload or backload.

    By name [place, content, layout]. Places: device, file (a mapping of one), shared (a mapping of shared memory),
    host, empty (no bytes where there were some) and none (a tensor of no bytes). No content: there is none to read.
    """

    when: str
    held: dict[str, list[str]]


class MemorySeen(Event, tag="memory"):
    """What a call cost its process, measured in /proc. Bytes, except `open_files`.

    `written`: to files, in this call. `peak` and `extra`: anonymous memory beyond what was there before the call, the
    device's not counted, at its highest and after the call. `file_bytes`: files that the process has made, named or
    not, as allocated on disk. `shared`: mappings of shared memory. `anonymous` and `locked`: that part of its file
    mappings. `open_files`: descriptors more than when the process started.
    """

    method: str
    written: int
    peak: int
    extra: int
    file_bytes: int
    shared: int
    anonymous: int
    locked: int
    open_files: int


class FolderSeen(Event, tag="folder"):
    """The named files of the scenario's folder changed: name to content, all of them. `by`: a process, or the suite."""

    by: str
    files: dict[str, str]


class ProcessEnded(Event, tag="process.end"):
    """A process of the scenario ended: `how` is normal, killed (by the suite), or a signal or exit status.

    `during`: the call it was in, "look" if its tensors were being read, or empty.
    """

    how: str
    during: str = ""


class LevelsSeen(Event, tag="levels"):
    """What the suite measured of a live pair: on the device, and in /proc of its processes.

    `free`: bytes of the whole device. By owner: `device` bytes (where the device tells processes apart), `host` bytes
    of anonymous and shared memory that are no device memory, `locked` bytes, `files` open and mappings (`maps`). A
    process that belongs to several owners is under their names, joined by +.
    """

    when: str
    free: int
    device: dict[str, int] = {}
    host: dict[str, int] = {}
    locked: dict[str, int] = {}
    files: dict[str, int] = {}
    maps: dict[str, int] = {}


class TagsMoved(Event, tag="tags.moved"):
    """A live pair released or resumed tags, and what became of the free bytes of the whole device.

    `stated`: by tag, the bytes of each of its allocations as the implementation states them. `granule`: by how much the
    device's allocator may take more for one of them.
    """

    op: str
    of: str
    stated: dict[str, list[int]]
    before: int
    after: int
    granule: int


class RunBegan(Event, tag="run"):
    """Another pair was built, and does the work again: `kind` is plain (no hand-off) or hand-offs."""

    number: int
    kind: str


class LossSeen(Event, tag="loss"):
    """A training step of a live pair on that batch returned this loss, as C writes it in hexadecimal: bit for bit."""

    batch: int
    loss: str
    adapter: str = ""


class TokensSeen(Event, tag="tokens"):
    """What a live pair generated for a prompt and a seed. `when`: which of the askings of a scenario this is."""

    when: str
    prompt: list[int]
    seed: int
    tokens: list[int]
    adapter: str = ""


class StateSeen(Event, tag="state"):
    """A live pair's state in digests, by name: its `fingerprint()`, or what it holds of one adapter."""

    of: str
    facts: dict[str, str]


class Note(Event, tag="note"):
    """Something the adapter recorded with `rig.record`. A statement."""

    op: str
    facts: dict[str, Any] = {}


class Watch(Event, tag="watch"):
    """What a recording of a real run sees from here on: saver, trainer, engine, requests, send, issues, driver, …"""

    what: list[str]


class BytesSeen(Event, tag="bytes"):
    """Bytes measured in a real run: free and total of the device, resident of the process. -1: not measured."""

    free: int
    total: int
    rss: int


class HandOff(Event, tag="handoff"):
    """Every process of a real run has acknowledged what came before; `number` counts these marks from 1."""

    number: int
    name: str = ""


class Closed(Event, tag="closed"):
    """The recording of a real run was closed in order: nothing follows."""


AnyEvent = (
    Header
    | Config
    | ClaimsStated
    | CallIssue
    | CallBegin
    | CallEnd
    | CallRaise
    | SaverCall
    | SaverAlloc
    | SaverPause
    | SaverResume
    | SaverFree
    | SaverTouch
    | SaverRefused
    | SaverFatal
    | Data
    | GroupCreate
    | GroupDestroy
    | GroupUse
    | Move
    | Send
    | EngineRelease
    | EngineResume
    | EngineAdmit
    | EngineDrain
    | EngineFlush
    | EngineServe
    | RequestBegin
    | RequestEnd
    | EngineAsked
    | EngineToken
    | Ack
    | Believed
    | Fault
    | Change
    | EngineSession
    | EngineLoad
    | Measured
    | ModuleSeen
    | TensorsSeen
    | MemorySeen
    | FolderSeen
    | ProcessEnded
    | LevelsSeen
    | TagsMoved
    | RunBegan
    | LossSeen
    | TokensSeen
    | StateSeen
    | Note
    | Watch
    | BytesSeen
    | HandOff
    | Closed
)


def schema() -> dict[str, Any]:
    """The JSON Schema of one trace line, for implementations that write traces in another language."""
    return msgspec.json.schema(AnyEvent)

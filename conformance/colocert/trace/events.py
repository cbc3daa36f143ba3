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
    """What every event carries. `owner` is whose memory or call it is: a trainer's (empty) or "engine"."""

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
    """The suite called a method of the implementation."""

    actor: str
    method: str
    call: int


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
    """Weights left for the engine: base, adapter or merged, read from the device or from the host."""

    kind: str
    nbytes: int
    read_from: str
    version: int = 0
    tensors: list[str] = []


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
    """What the engine serves from here on."""

    adapter: str
    version: int
    base: int


class RequestBegin(Event, tag="request.begin"):
    """A request entered the engine. `ready` is False if some of its memory was released; `valid` if its base was."""

    adapter: str
    version: int = 0
    ready: bool = True
    valid: bool = True


class RequestEnd(Event, tag="request.end"):
    """A request left the engine."""

    adapter: str
    version: int = 0


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


class Note(Event, tag="note"):
    """Something the adapter recorded with `rig.record`. A statement."""

    op: str
    facts: dict[str, Any] = {}


class Watch(Event, tag="watch"):
    """What a recording of a real run sees from here on: saver, trainer, engine, requests, send, issues, driver, …"""

    what: list[str]


class Measured(Event, tag="measured"):
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
    | Ack
    | Believed
    | Fault
    | Change
    | Note
    | Watch
    | Measured
    | HandOff
    | Closed
)


def schema() -> dict[str, Any]:
    """The JSON Schema of one trace line, for implementations that write traces in another language."""
    return msgspec.json.schema(AnyEvent)

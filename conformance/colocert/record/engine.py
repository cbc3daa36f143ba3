"""Driving an engine: its calls one after the other or at once, each to its end or its deadline.

Knows how to build an engine and take a scenario's steps. Does not know rules or processes.

    release TAG,TAG   resume TAG,TAG   flush           tags that the claims leave out are left out
    base VERSION                                       the suite sends a base
    adapter NAME VERSION [file]                        and an adapter, over the wire or in a file
    ask NAME PROMPT                                    a request; NAME is - for the base
    start STEP                                         the step's call is issued, and not waited for
    wait SECONDS   join                                time goes on; every call is waited for
    fault POINT WHEN [NTH]                             for the calls issued from here to the next one that is awaited
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable
from typing import Any

from colocert.record.drive import ProcessGone, TrainerShapeError
from colocert.record.group import CallOverdue, _deadline
from colocert.record.scenarios import Scenario
from colocert.rig.contract import Claims
from colocert.rig.engine_rig import ENGINE_METHODS, EngineRig, Request
from colocert.rig.engine_wire import ADAPTER_TENSORS, BASE_TENSORS, AdapterFile, What, Wire
from colocert.rig.saver import SaverFatal
from colocert.trace.events import AnyEvent, CallBegin, CallEnd, CallRaise, Change, EngineAsked

TOKENS = 3
REQUEST_SECONDS = 30.0
"""Virtual seconds within which a request is answered or refused."""

CALL_SECONDS = 120.0
"""Virtual seconds for any other call."""

REAL_SECONDS = 5.0
"""Seconds for a request that is a plain call, which no virtual clock can end."""


class Running:
    """A call under way: its number, its task if it is a coroutine, and what the suite takes back at its end."""

    def __init__(self, method: str, call: int, seconds: float, then: Callable[[], None]) -> None:
        self.method, self.call, self.seconds, self.then = method, call, seconds, then
        self.task: asyncio.Task[Any] | None = None
        self.given_up = False


class EngineSession:
    """An engine on a rig. No call raises what the engine raises: it is in the trace."""

    def __init__(self, rig: EngineRig) -> None:
        self.rig = rig
        self.engine: Any = None
        self.running: list[Running] = []
        self.gone: ProcessGone | None = None
        self.overdue = False
        self._calls = 0
        self._files = 0

    @property
    def over(self) -> bool:
        """Whether no call can follow: the process has ended, or a plain call did not."""
        return self.rig.saver.dead or self.overdue

    def build(self, implementation: Any) -> None:
        """The factory. Raises what it raises, and `TrainerShapeError` for an engine without the calls of one."""
        self.engine = self.rig.run(implementation.engine(self.rig))
        missing = [m for m in ENGINE_METHODS if not self.has(m)]
        if missing:
            raise TrainerShapeError(
                f"engine(rig) must return an object with {', '.join(m + '()' for m in ENGINE_METHODS)} (got "
                f"{type(self.engine).__name__} without {', '.join(m + '()' for m in missing)})"
            )
        self.ready()

    def has(self, method: str) -> bool:
        return callable(getattr(self.engine, method, None))

    # ---- the calls

    def move(self, method: str, tags: list[str]) -> Running:
        """Release or resume."""
        return self._issue(EngineAsked(0, method, tags), lambda: getattr(self.engine, method)(list(tags)))

    def plain(self, method: str) -> Running:
        """A call without arguments."""
        return self._issue(EngineAsked(0, method), getattr(self.engine, method))

    def update_base(self, version: int) -> Running:
        """The suite sends a base; its memory is taken back at the end of the call."""
        wire = Wire(
            {t: self.rig.sent.make(What("base", "", version, t)) for t in BASE_TENSORS},
            lambda: self.rig.point("wire"),
        )
        asked = EngineAsked(0, "update_base", version=version)
        return self._issue(asked, lambda: self.engine.update_base(version, wire), wire.take_back)

    def load_adapter(self, name: str, version: int, *, file: bool) -> Running:
        """The same for an adapter, of which the engine gets a wire or the path of a file."""
        buffers = {t: self.rig.sent.make(What("adapter", name, version, t)) for t in ADAPTER_TENSORS}
        asked = EngineAsked(0, "load_adapter", adapter=name, version=version)
        source: Any
        if file:
            self._files += 1
            kept = AdapterFile(self.rig.directory / f"adapter-{self._files}.safetensors", buffers)
            source, take_back = kept.path, kept.take_back
        else:
            source = wire = Wire(buffers, lambda: self.rig.point("wire"))
            take_back = wire.take_back
        return self._issue(asked, lambda: self.engine.load_adapter(name, version, source), take_back)

    def generate(self, adapter: str | None, prompt: str) -> Running:
        """One request."""
        request = Request(self._calls + 1, prompt, adapter, TOKENS, REQUEST_SECONDS)
        asked = EngineAsked(0, "generate", adapter=adapter or "", prompt=prompt)
        return self._issue(asked, lambda: self.engine.generate(request))

    def ready(self) -> None:
        """Asks the engine whether it takes requests, if it can be asked. An error says nothing about that."""
        if self.has("ready") and not self.over:
            with contextlib.suppress(Exception):
                said = self.rig.run(self.engine.ready())
                self.rig.emit(Change("engine.ready", {"ready": bool(said)}, statement=True))

    # ---- how

    def _issue(self, asked: EngineAsked, work: Callable[[], Any], then: Callable[[], None] = lambda: None) -> Running:
        self._calls += 1
        a_request = asked.method == "generate"
        seconds = REQUEST_SECONDS if a_request else CALL_SECONDS
        running = Running(asked.method, self._calls, seconds, then)
        asked.call = self._calls
        self.rig.emit(asked)
        self.rig.emit(CallBegin("engine", asked.method, self._calls))
        try:
            with _deadline(REAL_SECONDS) if a_request else contextlib.nullcontext():
                result = work()
        except CallOverdue:
            self.overdue = True
            self._too_late(running)
        except BaseException as error:
            self._raised(running, error)
        else:
            if inspect.isawaitable(result):
                running.task = self.rig.clock.task(self._followed(running, result))
                self.running.append(running)
            else:
                self._returned(running)
        return running

    async def _followed(self, running: Running, result: Any) -> None:
        try:
            await result
        except BaseException as error:
            if running.given_up:
                raise
            self._raised(running, error)
        else:
            self._returned(running)

    def _returned(self, running: Running) -> None:
        if not self.rig.saver.dead:  # else the engine swallowed the exit
            self.rig.emit(CallEnd("engine", running.method, running.call))
            running.then()

    def _raised(self, running: Running, error: BaseException) -> None:
        if isinstance(error, SaverFatal) or self.rig.saver.dead:
            return
        self.rig.emit(CallRaise("engine", running.method, running.call, type(error).__name__, str(error)[:300]))
        running.then()
        if not isinstance(error, (Exception, asyncio.CancelledError)):
            self.gone = ProcessGone(f"{running.method}() ended the process with {type(error).__name__}: {error}")

    def _too_late(self, running: Running) -> None:
        if running.method != "generate":
            self.gone = ProcessGone(f"{running.method}() did not end within {running.seconds:g} s")
        self.rig.emit(Change("call.overdue", {"method": running.method, "call": running.call}))

    def finish(self, running: Running) -> None:
        """Waits for a call, at most for its seconds; one that does not end by then is given up."""
        task = running.task
        if task is not None and not task.done():
            self.rig.run(asyncio.wait([task], timeout=running.seconds))
            if not task.done():
                self._too_late(running)
                running.given_up = True
                task.cancel()
                self.rig.run(asyncio.wait([task], timeout=1.0))
        if running in self.running:
            self.running.remove(running)

    def wait(self, seconds: float) -> None:
        """Time goes on."""
        self.rig.run(asyncio.sleep(seconds))

    def join(self) -> None:
        """Waits for every call under way."""
        while self.running:
            self.finish(self.running[0])


def run_engine(implementation: Any, claims: Claims, scenario: Scenario, sink: Callable[[AnyEvent], None]) -> None:
    """Builds the engine, takes every step and closes it; events go to `sink` as they happen."""
    if not hasattr(implementation, "engine"):
        return
    rig = EngineRig(scenario.build_config(), claims, sink)
    session = EngineSession(rig)
    try:
        session.build(implementation)
        for step in (*scenario.steps, "join", "close"):
            if session.over or session.gone:
                break
            take_step(session, step)
        if session.gone:
            raise session.gone
    finally:
        for running in session.running:
            running.given_up = True
        rig.close()


def take_step(session: EngineSession, step: str) -> None:
    """One step."""
    word, _, rest = step.partition(" ")
    if word == "fault":
        point, when, *nth = rest.split()
        session.rig.faults.arm(point, when, int(nth[0]) if nth else 1)
    elif word == "start":
        _issued(session, rest)
    elif word == "wait":
        session.wait(float(rest))
    elif word == "join":
        session.join()
        session.rig.faults.disarm()
        session.ready()
    else:
        running = _issued(session, step)
        if running is not None:
            session.finish(running)
            session.rig.faults.disarm()
            if word != "close":
                session.ready()


def _issued(session: EngineSession, step: str) -> Running | None:
    """Issues the call that a step names; None if the claims or the engine leave it out."""
    word, *rest = step.split()
    if word in ("release", "resume"):
        tags = [tag for tag in rest[0].split(",") if tag in session.rig.claims.engine_releases]
        return session.move(word, tags) if tags else None
    if word == "base":
        return session.update_base(int(rest[0]))
    if word == "adapter":
        return session.load_adapter(rest[0], int(rest[1]), file=rest[2:] == ["file"])
    if word == "ask":
        return session.generate(None if rest[0] == "-" else rest[0], rest[1])
    return session.plain(word) if session.has(word) else None

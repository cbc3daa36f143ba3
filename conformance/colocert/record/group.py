"""Driving a train group: its calls over rank processes, each under a deadline, and what is left after `close()`.

Knows how to build a group and take a scenario's steps. Does not know rules, or through what the ranks are called.

    plan RANK METHOD WAY [NTH]   how a rank will misbehave, before the group is built
    replace RANK                 the group puts a new process in that rank's place
    onload, offload, train …     a call of the group
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from colocert.record.drive import ProcessGone, TrainerShapeError
from colocert.record.group_files import RankFiles, abandoned, shared_memory
from colocert.record.scenarios import Scenario
from colocert.rig.contract import Claims
from colocert.rig.group_rank import RankFault
from colocert.rig.group_rig import GROUP_METHODS, GroupRig
from colocert.trace.events import AnyEvent, CallBegin, CallEnd, CallRaise, Change

DEADLINE = float(os.environ.get("COLOCERT_RANK_DEADLINE", "2"))
"""Seconds for which a group may wait for a rank."""

OVERDUE = 4.0
"""A call ends within this many deadlines and `GRACE` seconds: it may ask, agree, call, and end a process."""

GRACE = 4.0
START = 60.0
"""Seconds for building a group or replacing a rank: processes have to start."""


class CallOverdue(BaseException):
    """A call of the group did not end in time. Not an `Exception`: nothing in a framework is meant to survive it."""


class GroupSession:
    """A group on a rig. `call` never raises what the group raises: it is in the trace."""

    def __init__(self, rig: GroupRig) -> None:
        self.rig = rig
        self.group: Any = None
        self.files = RankFiles(rig.directory, rig.state)
        self.overdue = False
        self._calls = 0

    def build(self, implementation: Any) -> None:
        """The factory. Raises what it raises, and `TrainerShapeError` for a group without the calls of one."""
        with _deadline(START):
            made = self.rig.run(implementation.train_group(self.rig))
        wanted = [*GROUP_METHODS, "close", *(["replace"] if self.rig.claims.replacement else [])]
        missing = [m for m in wanted if not callable(getattr(made, m, None))]
        self.group = made
        if missing:
            raise TrainerShapeError(
                f"train_group(rig) must return an object with {', '.join(m + '()' for m in wanted)} (got "
                f"{type(made).__name__} without {', '.join(m + '()' for m in missing)})"
            )
        self.files.drain()

    def call(self, method: str, *args: Any) -> bool:
        """Makes one call and returns whether it returned normally."""
        self._calls += 1
        call, rig = self._calls, self.rig
        self.files.drain()
        rig.state(CallBegin("group", method, call))
        raised: BaseException | None = None
        seconds = START if method == "replace" else rig.deadline * OVERDUE + GRACE
        try:
            with _deadline(seconds):
                rig.run(getattr(self.group, method)(*args))
        except (Exception, CallOverdue) as error:
            raised = error
        except BaseException as error:
            raise ProcessGone(f"{method}() ended the process with {type(error).__name__}: {error}") from error
        self.files.drain(watch=method != "close")
        if raised is None:
            rig.state(CallEnd("group", method, call))
            return True
        if isinstance(raised, CallOverdue):
            self.overdue = True
            rig.state(Change("call.overdue", {"method": method}))
        rig.state(Change("group.raised", {"ranks": failed_ranks(raised)}))
        rig.state(CallRaise("group", method, call, type(raised).__name__, str(raised)[:300]))
        return False

    def close(self, before: set[str]) -> None:
        """Closes the group and writes which processes and shared memory outlive it."""
        if callable(getattr(self.group, "close", None)):
            self.call("close")
        processes = self.files.left_over()
        self.files.drain(watch=False)
        left = abandoned(shared_memory() - before)
        self.rig.state(Change("group.closed", {"processes": processes, "shared_memory": left}))


def run_group(implementation: Any, claims: Claims, scenario: Scenario, sink: Callable[[AnyEvent], None]) -> None:
    """Builds the group, takes every step and closes it; events go to `sink` as calls begin and end."""
    if not hasattr(implementation, "train_group"):
        return
    rig = GroupRig(scenario.build_config(), claims, sink, plans(scenario), DEADLINE)
    before = shared_memory()
    session = GroupSession(rig)
    try:
        try:
            session.build(implementation)
            for step in scenario.steps:
                if session.overdue:
                    break
                _take(session, step)
        finally:
            session.close(before)
    finally:
        rig.close()


def plans(scenario: Scenario) -> Mapping[int, list[tuple[str, str, int]]]:
    """Each rank's faults, from the scenario's `plan` steps."""
    found: dict[int, list[tuple[str, str, int]]] = {}
    for step in scenario.steps:
        word, *rest = step.split()
        if word == "plan":
            rank, method, way, *nth = rest
            found.setdefault(int(rank), []).append((method, way, int(nth[0]) if nth else 1))
    return found


def _take(session: GroupSession, step: str) -> None:
    word, *rest = step.split()
    if word == "replace":
        session.call("replace", int(rest[0]))
    elif word != "plan":
        session.call(word)


def failed_ranks(error: BaseException) -> list[int]:
    """The ranks whose errors can be reached from what was raised, however a framework packs them."""
    found: set[int] = set()
    seen: set[int] = set()
    waiting: list[Any] = [error]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or not isinstance(thing, BaseException):
            continue
        seen.add(id(thing))
        if isinstance(thing, RankFault):
            found.add(thing.rank)
        for name in ("errors", "exceptions", "ranks", "failed_ranks"):
            held = getattr(thing, name, ())
            if isinstance(held, Mapping):
                found |= {key for key in held if isinstance(key, int)}
                held = held.values()
            if isinstance(held, (list, tuple, set, frozenset)) or hasattr(held, "__iter__"):
                members = list(held) if not isinstance(held, (str, bytes)) else []
                found |= {m for m in members if isinstance(m, int)}
                waiting += members
        context = None if thing.__suppress_context__ else thing.__context__
        waiting += [thing.__cause__, context, getattr(thing, "cause", None), *thing.args]
    return sorted(found)


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raises `CallOverdue` in the block after that many seconds. Only a main thread can be interrupted so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_signal: int, _frame: object) -> None:
        raise CallOverdue(f"no answer within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

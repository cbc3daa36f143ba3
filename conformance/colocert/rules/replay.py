"""Judging one rank by the calls it repeats: what the folds made of the same call from the same state is used again.

Knows that a rank's view and folds depend on nothing but the events they were fed, so that state and call together say
what follows. Does not know any rule, file or implementation.

A training run makes the same few calls for ever, on every rank. The first time a call is met from a state, the folds
are fed its events, and what they counted, found and became is kept; from then on it is looked up. States and calls are
compared whole: every attribute of the view and of every fold, every field of every event. Left out are `owner`, which
is the rank's, `rank`, `seq`, `at`, `call`, `version` and the text of an error, which no rule of a rank reads but to
name an event, and the numbers of saver calls but for their differences. Contents are compared by which are equal, since
no two have one name.

A rank whose states do not recur is judged by folds of its own, event by event, as if this module were not there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import msgspec

from colocert.rules.fold import Finding, Fold, Panel
from colocert.rules.replay_state import Token, frozen, renamed, twin
from colocert.rules.view import View
from colocert.trace.events import POISON, AnyEvent, CallBegin, CallEnd, CallRaise, Event, SaverPause, SaverResume

STATES = 1024
"""States that are kept at most: past them what is new is judged event by event."""

_PATIENCE = 1024
"""Calls that are tried before it is asked whether they recur."""

_BETWEEN, _WITHIN = 64, 512
"""Events after which a stretch is cut between calls, and given up within one."""

_APART = frozenset({"owner", "rank", "seq", "at", "call", "saver_call", "content", "contents", "version", "detail"})
_ENDS = frozenset({CallEnd, CallRaise})
_MOVES = frozenset({SaverPause, SaverResume})
"""Events whose saver calls the view keeps, to compare them within a call."""

Take = Callable[[int, Finding, int, int], None]
"""Takes a finding: the number of its fold, the finding, and its event's number in the run and line."""

_UNKNOWN: Any = MappingProxyType({})


class _Step:
    """What one call led to. `contents`: of those of the new state, their numbers in the old one or in the call.

    `met`: fold, code and times; `floors`: folds and codes that were found before they were met; `found`: the place of
    the event in the call, the fold and the finding.
    """

    __slots__ = ("contents", "floors", "found", "met", "state")

    def __init__(self, state: _State, contents: tuple[int, ...] | None) -> None:
        self.state, self.contents = state, contents
        self.met: tuple[tuple[int, str, int], ...] = ()
        self.floors: tuple[tuple[int, str], ...] = ()
        self.found: tuple[tuple[int, int, Finding], ...] = ()


class _State:
    """A state: the folds as they stand in it, the names of its contents in order, and the calls known from it.

    `known` is a tree: by the sign of an event the tree of what follows it, and under None the step.
    """

    __slots__ = ("contents", "known", "panel")

    def __init__(self, panel: Panel, contents: tuple[Token, ...]) -> None:
        self.panel, self.contents = panel, contents
        self.known: dict[Any, Any] = {}


class _Counts(dict[str, int]):
    """A fold's counts over one call. `floors` are the codes that were found before they were met."""

    def __init__(self) -> None:
        super().__init__()
        self.floors: set[str] = set()

    def setdefault(self, code: str, times: int = 1) -> int:
        if code not in self:
            self.floors.add(code)
            self[code] = times
        return self[code]


class _Sink(list[Finding]):
    """The findings of one fold of a rank that is judged event by event, on their way out."""

    def __init__(self, cursor: Cursor, fold: int) -> None:
        super().__init__()
        self._cursor, self._fold = cursor, fold

    def append(self, finding: Finding) -> None:
        self._cursor.take(self._fold, finding, *self._cursor.place)


class Replay:
    """The states and calls that the ranks of one judgement share. `patience`: events of a rank before it takes part."""

    def __init__(self, kinds: Sequence[type[Fold]], patience: int = 0) -> None:
        self.kinds, self.patience = tuple(kinds), patience
        self.open = True
        self.tries = self._learned = self._tokens = 0
        self._ids: dict[Any, _State] = {}
        root = self.fresh()
        self.root = self._ids[frozen(root, {})] = _State(root, ())
        self.signs: dict[type[Event], tuple[bool | None, Any]] = {}

    def fresh(self) -> Panel:
        """Folds that have seen nothing."""
        view = View()
        return Panel(view, [kind(view) for kind in self.kinds])

    def looks_at(self, kind: type[Event]) -> bool:
        """Whether the view or a fold looks at such events."""
        return bool(self.root.panel.view.handlers(kind)) or any(kind in fold.sees for fold in self.kinds)

    def worth_it(self) -> bool:
        """Whether what is learned is used: asked before a call is learned."""
        self._learned += 1
        if self._learned > _PATIENCE and self._learned * 2 > self.tries:
            self.open = False
        return self.open

    def known(self, cursor: Cursor) -> _Step | None:
        """The step of the cursor's events, if another rank has made it known since they were first looked up."""
        node = cursor.state.known
        for event in cursor.events:
            if self.sign_of(event.__class__)[1] is not None:
                node = node.get(cursor.sign(event), _UNKNOWN)
        return node.get(None)

    def learn(self, cursor: Cursor) -> _Step | None:
        """Feeds the cursor's events to a copy of its state's folds. None if what they hold is of single events."""
        state = cursor.state
        events = [event for event in cursor.events if self.sign_of(event.__class__)[1] is not None]
        panel = twin(state.panel)
        counts = [_Counts() for _ in self.kinds]
        found: list[tuple[int, int, Finding]] = []
        for fold, mine in zip(panel.folds, counts, strict=True):
            fold.exercised = mine
        names = [*state.contents, *(self._token() for _ in range(len(cursor.contents) - len(state.contents)))]
        for place, event in enumerate(events):
            panel.feed(_told(event, cursor.contents, names))
            for number, fold in enumerate(panel.folds):
                if fold.findings:
                    found += [(place, number, finding) for finding in fold.findings]
                    fold.findings.clear()
        if any(fold.unsaid() for fold in panel.folds):
            return None
        kept: dict[Token, int] = {}
        key = frozen(panel, kept)
        reached = self._ids.get(key)
        if reached is None:
            if len(self._ids) >= STATES:
                self.open = False
                return None
            for fold in panel.folds:
                fold.exercised = {}
            reached = self._ids[key] = _State(panel, tuple(kept))
        places = {name: n for n, name in enumerate(names)}
        order = tuple(places[name] for name in kept)
        step = _Step(reached, None if order == tuple(range(len(names))) else order)
        step.found = tuple(found)
        step.met = tuple((n, code, times) for n, mine in enumerate(counts) for code, times in _met(mine).items())
        step.floors = tuple((n, code) for n, mine in enumerate(counts) for code in sorted(mine.floors))
        node = state.known
        for event in events:
            node = node.setdefault(cursor.sign(event), {})
        node[None] = step
        return step

    def _token(self) -> Token:
        self._tokens += 1
        return Token(f"#{self._tokens}")

    # ---- signs

    def sign_of(self, kind: type[Event]) -> tuple[bool | None, Any]:
        """How an event of this type is signed: not at all, or by a function of it.

        With it: None if the function says all; False if contents add to it, True if a saver call's number does too.
        """
        known = self.signs.get(kind)
        if known is None:
            known = self.signs[kind] = self._sign_of(kind) if self.looks_at(kind) else (None, None)
        return known

    @staticmethod
    def _sign_of(kind: type[Event]) -> tuple[bool | None, Any]:
        plain: list[str] = []
        nested: list[str] = []
        for field in msgspec.structs.fields(kind):
            if field.name not in _APART:
                (plain if field.type in _ATOMS else nested).append(field.name)
        contents = not {"content", "contents"}.isdisjoint(kind.__struct_fields__)
        told = (kind in _MOVES) if contents else None
        of = attrgetter("__class__", *plain)
        if nested:
            return told, lambda event: (of(event), *(_encoded(getattr(event, name)) for name in nested))
        return told, of


class Cursor:
    """Where one rank stands. `feed` its events in stretches, `ends` once; findings go to `take`.

    With a stretch come the number that its first event has in the whole run and its line; `take` gets a finding with
    those of its event. `events` and `contents` are those of the call under way: contents by name to number, those of
    the state first. `panel` is None while the rank's calls are looked up.
    """

    __slots__ = (
        "_early",
        "_first",
        "_floored",
        "_node",
        "_places",
        "_replay",
        "_settled",
        "_uses",
        "_within",
        "contents",
        "events",
        "panel",
        "place",
        "state",
        "take",
    )

    def __init__(self, replay: Replay, take: Take) -> None:
        self._replay, self.take = replay, take
        self.state = replay.root
        self._node: dict[Any, Any] = self.state.known
        self.events: list[AnyEvent] = []
        self._places: list[tuple[int, int, int]] = []
        self.contents: dict[str, int] = {}
        self._uses: dict[_Step, int] = {}
        self._settled: set[tuple[int, str]] = set()
        self._floored: set[tuple[int, str]] = set()
        self._first, self._within = -1, False
        self.place = (0, 0)
        self.panel: Panel | None = None
        self._early: list[tuple[list[AnyEvent], int, int]] | None = [] if replay.patience else None

    def feed(self, events: list[AnyEvent], fed: int, line: int) -> None:
        """Moves past a stretch of the rank's events."""
        if self._early is not None:
            self._early.append((events.copy(), fed, line))
            if sum(len(stretch) for stretch, _, _ in self._early) > self._replay.patience:
                early, self._early = self._early, None
                for stretch in early:
                    self.feed(*stretch)
        elif self.panel is not None:
            self._alone(events, fed, line)
        else:
            self._look_up(events, fed, line)

    def _alone(self, events: list[AnyEvent], fed: int, line: int) -> None:
        assert self.panel is not None
        feed = self.panel.feed
        for place, event in enumerate(events):
            self.place = (fed + place, line + place)
            feed(event)

    def _look_up(self, events: list[AnyEvent], fed: int, line: int) -> None:
        signs, node, start = self._replay.signs, self._node, 0
        for place, event in enumerate(events):
            kind = event.__class__
            told, of = signs.get(kind) or self._replay.sign_of(kind)
            if of is None:
                continue
            if told is None:
                sign = of(event)
            elif told:
                content, number = event.content, event.saver_call  # type: ignore[union-attr]
                if self._first < 0:
                    self._first = number
                sign = (of(event), content and self._numbered(content), number - self._first)
            else:
                sign = self._told(event, of(event))
            node = node.get(sign, _UNKNOWN)
            if kind is CallBegin:
                self._within = True
            elif kind in _ENDS:
                self._within = False
                step = node.get(None)
                if step is not None and not (self.events or step.found or step.floors):
                    self._replay.tries += 1
                    self._uses[step] = self._uses.get(step, 0) + 1
                    self._moved(step)
                else:
                    self._add(events[start : place + 1], fed + start, line + start)
                    if not self._called(step):
                        self._alone(events[place + 1 :], fed + place + 1, line + place + 1)
                        return
                start, node = place + 1, self.state.known
        self._node = node
        if start < len(events):
            self._add(events[start:], fed + start, line + start)
            if len(self.events) >= _BETWEEN:
                self._cut()

    def _add(self, events: list[AnyEvent], fed: int, line: int) -> None:
        """Keeps events of the call under way."""
        self._places.append((len(self.events), fed, line))
        self.events += events

    def _cut(self) -> None:
        """Ends a stretch that no call ends; gives up within a call that does not end."""
        if not self._within:
            if self._called(self._node.get(None)):
                self._node = self.state.known
        elif len(self.events) >= _WITHIN:
            self._leave()

    def _where(self, place: int) -> tuple[int, int]:
        """The number in the run and the line of an event of the call under way."""
        first, fed, line = next(known for known in reversed(self._places) if known[0] <= place)
        return fed + place - first, line + place - first

    def sign(self, event: Any) -> Any:
        """The sign of an event of the call under way."""
        told, of = self._replay.sign_of(event.__class__)
        if told:
            return of(event), event.content and self._numbered(event.content), event.saver_call - self._first
        return of(event) if told is None else self._told(event, of(event))

    def _told(self, event: Any, sign: Any) -> Any:
        """The sign with what contents add to it."""
        content = getattr(event, "content", None)
        told = (content,) if content is not None else event.contents
        return sign, *map(self._numbered, told)

    def _numbered(self, content: str) -> int | str:
        if content == POISON or not content:
            return content
        number = self.contents.get(content)
        if number is None:
            number = self.contents[content] = len(self.contents)
        return number

    def _called(self, step: _Step | None) -> bool:
        """A call has ended, in this step if it is known. False if the rank is judged alone from here on."""
        if step is None:
            step = self._replay.known(self)
        if step is None:
            step = self._replay.learn(self) if self._replay.worth_it() else None
            if step is None:
                self._leave()
                return False
        for fold, code in step.floors:
            self._mentioned(fold, code)
        self._uses[step] = self._uses.get(step, 0) + 1
        if step.found:
            signed = [n for n, event in enumerate(self.events) if self._replay.sign_of(event.__class__)[1] is not None]
            for place, number, finding in step.found:
                event = self.events[signed[place]]
                told = msgspec.structs.replace(finding, rank=event.rank, seq=event.seq)
                self.take(number, told, *self._where(signed[place]))
        self._moved(step)
        self.events.clear()
        self._places.clear()
        return True

    def _moved(self, step: _Step) -> None:
        if step.contents is not None:
            names = list(self.contents)
            self.contents = {names[old]: new for new, old in enumerate(step.contents)}
        self.state = step.state
        self._first = -1

    def _mentioned(self, fold: int, code: str) -> None:
        """A code is found before it is met in this call: that counts once, if no call before has named it."""
        if (fold, code) not in self._settled:
            self._settled.add((fold, code))
            if not any((fold, code) == met[:2] for step in self._uses for met in step.met):
                self._floored.add((fold, code))

    def _leave(self) -> None:
        """From here on the rank is judged by folds of its own."""
        counts = self.exercised()
        panel = twin(self.state.panel)
        names = dict(zip(self.state.contents, self.contents, strict=False))
        for holder in (panel.view, *panel.folds):
            for name, value in holder.__dict__.items():
                if name != "view":
                    setattr(holder, name, renamed(value, names))
        for number, fold in enumerate(panel.folds):
            fold.exercised, fold.findings = counts[number], _Sink(self, number)
        self.panel = panel
        for place, event in enumerate(self.events):
            self._alone([event], *self._where(place))
        self.events, self._places = [], []

    def alone(self) -> Panel:
        """Folds of its own, as they stand now."""
        if self.panel is None:
            self._leave()
            early, self._early = self._early or [], None
            for stretch in early:
                self._alone(*stretch)
        assert self.panel is not None
        return self.panel

    def ends(self) -> Panel | None:
        """The folds that have something to say at the end: none of a rank whose last call has ended."""
        cut = any(self._replay.sign_of(event.__class__)[1] is not None for event in self.events)
        return self.alone() if cut or self._early or self.panel is not None else None

    def exercised(self) -> list[dict[str, int]]:
        """By fold, how often each code's condition occurred."""
        if self.panel is not None:
            return [fold.exercised for fold in self.panel.folds]
        counts: list[dict[str, int]] = [{} for _ in self._replay.kinds]
        for fold, code in self._floored:
            counts[fold][code] = 1
        for step, times in self._uses.items():
            for fold, code, each in step.met:
                counts[fold][code] = counts[fold].get(code, 0) + each * times
        return counts


_ATOMS = (str, int, bool, str | None)


def _encoded(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def _met(counts: _Counts) -> dict[str, int]:
    """How often each code was met, not counting a finding that came before."""
    return {code: met for code, times in counts.items() if (met := times - (code in counts.floors))}


def _told(event: Any, numbers: dict[str, int], names: Sequence[Token]) -> Any:
    """The event with its content's name among the kept states."""
    content, several = getattr(event, "content", ""), getattr(event, "contents", None)
    if not several and content in ("", POISON):
        return event
    told = msgspec.structs.replace(event)
    if several:
        told.contents = [names[numbers[c]] if c in numbers else c for c in several]
    else:
        told.content = names[numbers[content]]
    return told

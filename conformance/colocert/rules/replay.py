"""Judging one rank by the calls it repeats: what the folds made of the same call from the same state is used again.

Knows that a rank's view and folds depend on nothing but the events they were fed, so that state and call together say
what follows. Does not know any rule, file or implementation.

A training run makes the same few calls for ever, on every rank. The first time a call is met from a state, the folds
are fed its events, and what they counted, found and became is kept; from then on it is looked up. States and calls are
compared whole: every attribute of the view and of every fold, every field of every event. Left out are `rank`, `seq`,
`at`, `call`, `version` and the text of an error, which no rule of a rank reads but to name an event, and the numbers of
saver calls but for their differences. Contents are compared by which are equal, since no two have one name.

A rank whose states do not recur is judged by folds of its own, event by event, as if this module were not there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from colocert.rules.fold import Finding, Fold, Panel
from colocert.rules.view import Call, View
from colocert.trace.events import POISON, AnyEvent, CallBegin, CallEnd, CallRaise, Event
from colocert.trace.ledger import Ledger

STATES = 1024
"""States that are kept at most: past them what is new is judged event by event."""

_PATIENCE = 1024
"""Calls that are tried before it is asked whether they recur."""

_BETWEEN, _WITHIN = 64, 512
"""Events after which a stretch is cut between calls, and given up within one."""

_APART = frozenset({"rank", "seq", "at", "call", "saver_call", "content", "contents", "version", "detail"})
_ENDS = frozenset({CallEnd, CallRaise})

Take = Callable[[int, Finding, Any], None]
"""Takes a finding: the number of its fold, the finding, and the mark that its event was fed with."""


class _Token(str):
    """The name of a content within the kept states."""

    __slots__ = ()


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

    def __init__(self, panel: Panel, contents: tuple[_Token, ...]) -> None:
        self.panel, self.contents = panel, contents
        self.known: dict[Any, Any] = {}


class _Counts(dict[str, int]):
    """A fold's counts over one call. `floors` are the codes that were found before they were met."""

    def __init__(self) -> None:
        super().__init__()
        self.floors: set[str] = set()

    def setdefault(self, code: str, times: int = 1) -> int:  # type: ignore[override]
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
        self._cursor.take(self._fold, finding, self._cursor.mark)


class Replay:
    """The states and calls that the ranks of one judgement share. `patience`: events of a rank before it takes part."""

    def __init__(self, kinds: Sequence[type[Fold]], patience: int = 0) -> None:
        self.kinds, self.patience = tuple(kinds), patience
        self.open = True
        self.tries = self._learned = self._tokens = 0
        self._ids: dict[Any, _State] = {}
        root = self.fresh()
        self.root = self._ids[_frozen_panel(root, {})] = _State(root, ())
        self.signs: dict[type[Event], tuple[bool, Any]] = {}

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

    def learn(self, cursor: Cursor) -> _Step | None:
        """Feeds the cursor's events to a copy of its state's folds. None if what they hold is of single events."""
        state, events = cursor.state, [event for event, _ in cursor.events]
        panel = _twin(state.panel)
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
        kept: dict[_Token, int] = {}
        key = _frozen_panel(panel, kept)
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
        for sign in cursor.signs:
            node = node.setdefault(sign, {})
        node[None] = step
        return step

    def _token(self) -> _Token:
        self._tokens += 1
        return _Token(f"#{self._tokens}")

    # ---- signs

    def sign_of(self, kind: type[Event]) -> tuple[bool, Any]:
        """How an event of this type is signed: not at all, or by a function of it; True if its contents tell too."""
        known = self.signs.get(kind)
        if known is None:
            known = self.signs[kind] = (True, None) if not self.looks_at(kind) else self._sign_of(kind)
        return known

    @staticmethod
    def _sign_of(kind: type[Event]) -> tuple[bool, Any]:
        plain, nested = [], []
        for field in msgspec.structs.fields(kind):
            if field.name not in _APART:
                (plain if field.type in _ATOMS else nested).append(field.name)
        told = not {"content", "contents", "saver_call"}.isdisjoint(kind.__struct_fields__)
        of = attrgetter("__class__", *plain)
        if nested:
            return told, lambda event: (of(event), *(_encoded(getattr(event, name)) for name in nested))
        return told, of


class Cursor:
    """Where one rank stands. `feed` every event with a mark of its place, `end` once; findings go to `take`.

    `events`, `signs` and `contents` are those of the call under way: contents by name to number, those of the state
    first. `panel` is None while the rank's calls are looked up.
    """

    __slots__ = (
        "_counted",
        "_early",
        "_first",
        "_floored",
        "_node",
        "_replay",
        "_settled",
        "_uses",
        "_within",
        "contents",
        "events",
        "feed",
        "mark",
        "panel",
        "signs",
        "state",
        "take",
    )

    def __init__(self, replay: Replay, take: Take) -> None:
        self._replay, self.take = replay, take
        self.state = replay.root
        self._node: dict[Any, Any] | None = self.state.known
        self.events: list[tuple[AnyEvent, Any]] = []
        self.signs: list[Any] = []
        self.contents: dict[str, int] = {}
        self._uses: dict[_Step, int] = {}
        self._settled: set[tuple[int, str]] = set()
        self._floored: set[tuple[int, str]] = set()
        self._first, self._within = -1, False
        self.mark: Any = None
        self.panel: Panel | None = None
        self._early: list[tuple[AnyEvent, Any]] = []
        self.feed: Callable[[AnyEvent, Any], None] = self._waits if replay.patience else self._looks_up

    def _waits(self, event: AnyEvent, mark: Any) -> None:
        self._early.append((event, mark))
        if len(self._early) > self._replay.patience:
            early, self._early = self._early, []
            self.feed = self._looks_up
            for one, its_mark in early:
                self.feed(one, its_mark)

    def _alone(self, event: AnyEvent, mark: Any) -> None:
        assert self.panel is not None
        self.mark = mark
        self.panel.feed(event)

    def _looks_up(self, event: AnyEvent, mark: Any) -> None:
        kind = event.__class__
        told, of = self._replay.signs.get(kind) or self._replay.sign_of(kind)
        if of is None:
            return
        sign = of(event)
        if told:
            sign = self._told(event, sign)
        self.signs.append(sign)
        self.events.append((event, mark))
        if self._node is not None:
            self._node = self._node.get(sign)
        if kind is CallBegin:
            self._within = True
        elif kind in _ENDS:
            self._within = False
            self._called()
        elif len(self.signs) >= _BETWEEN:
            if not self._within:
                self._called()
            elif len(self.signs) >= _WITHIN:
                self._leaves()

    def _told(self, event: Any, sign: Any) -> Any:
        """The sign with what contents and saver calls add to it."""
        content: Any = getattr(event, "content", "")
        if content:
            content = self._numbered(content)
        elif several := getattr(event, "contents", None):
            content = tuple(map(self._numbered, several))
        saver_call = getattr(event, "saver_call", None)
        if saver_call is not None:
            if self._first < 0:
                self._first = saver_call
            saver_call -= self._first
        return sign, content, saver_call

    def _numbered(self, content: str) -> int | str:
        if content == POISON or not content:
            return content
        number = self.contents.get(content)
        if number is None:
            number = self.contents[content] = len(self.contents)
        return number

    def _called(self) -> None:
        """A call has ended."""
        step: _Step | None = None if self._node is None else self._node.get(None)
        if step is None:
            step = self._replay.learn(self) if self._replay.worth_it() else None
            if step is None:
                self._leaves()
                return
        else:
            self._replay.tries += 1
        for fold, code in step.floors:
            self._mentioned(fold, code)
        self._uses[step] = self._uses.get(step, 0) + 1
        for place, number, finding in step.found:
            event, mark = self.events[place]
            self.take(number, msgspec.structs.replace(finding, rank=event.rank, seq=event.seq), mark)
        if step.contents is not None:
            names = list(self.contents)
            self.contents = {names[old]: new for new, old in enumerate(step.contents)}
        self.state = step.state
        self._node = step.state.known
        self._first = -1
        self.events.clear()
        self.signs.clear()

    def _mentioned(self, fold: int, code: str) -> None:
        """A code is found before it is met in this call: that counts once, if no call before has named it."""
        if (fold, code) not in self._settled:
            self._settled.add((fold, code))
            if not any((fold, code) == met[:2] for step in self._uses for met in step.met):
                self._floored.add((fold, code))

    def _leaves(self) -> None:
        """From here on the rank is judged by folds of its own."""
        counts = self.exercised()
        panel = _twin(self.state.panel)
        names = dict(zip(self.state.contents, self.contents, strict=False))
        for holder in (panel.view, *panel.folds):
            for name, value in holder.__dict__.items():
                if name != "view":
                    setattr(holder, name, _renamed(value, names))
        for number, fold in enumerate(panel.folds):
            fold.exercised, fold.findings = counts[number], _Sink(self, number)
        self.panel = panel
        self.feed = self._alone
        events, self.events, self.signs = self.events, [], []
        for event, mark in events:
            self._alone(event, mark)

    def alone(self) -> Panel:
        """Folds of its own, as they stand now."""
        if self.panel is None:
            self._leaves()
            for event, mark in self._early:
                self._alone(event, mark)
            self._early = []
        assert self.panel is not None
        return self.panel

    def ends(self) -> Panel | None:
        """The folds that have something to say at the end: none of a rank whose last call has ended."""
        return self.alone() if self.events or self._early or self.panel is not None else None

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


def _told(event: Any, numbers: dict[str, int], names: Sequence[_Token]) -> Any:
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


# ---- copies and comparisons of whole states


def _twin(panel: Panel) -> Panel:
    """A copy that stands where the panel stands, within a call or not."""
    view = _copied(panel.view, None)
    return Panel(view, [_copied(fold, view) for fold in panel.folds])


def _copied(holder: Any, view: Any) -> Any:
    new = object.__new__(type(holder))
    for name, value in holder.__dict__.items():
        new.__dict__[name] = _copy(value)
    if view is not None:
        new.view, new.findings, new.exercised = view, [], {}
    return new


def _copy(value: Any) -> Any:
    if isinstance(value, (dict, set, list)):
        return value.copy()
    if isinstance(value, (Ledger, Call)):
        new = object.__new__(type(value))
        for name in value.__slots__:
            setattr(new, name, _copy(getattr(value, name)))
        return new
    return value


def _frozen_panel(panel: Panel, names: dict[_Token, int]) -> Any:
    """The state as a hashable value, contents numbered in the order in which they come up."""
    folds = (
        tuple(_frozen(v, names) for k, v in fold.__dict__.items() if k not in ("view", "findings", "exercised"))
        for fold in panel.folds
    )
    return (tuple(_frozen(v, names) for v in panel.view.__dict__.values()), *folds)


def _frozen(value: Any, names: dict[_Token, int]) -> Any:
    if value is None or isinstance(value, (int, float, bytes)):
        return value
    if isinstance(value, str):
        return (names.setdefault(value, len(names)),) if isinstance(value, _Token) else value
    if isinstance(value, dict):
        return tuple((_frozen(k, names), _frozen(v, names)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(v, names) for v in value)
    if isinstance(value, (set, frozenset)):
        return frozenset(value)
    if isinstance(value, Call):
        first = min((number for _, number in (*value.paused, *value.resumed)), default=0)
        moves = [tuple((name, number - first) for name, number in m) for m in (value.paused, value.resumed)]
        rest = (_frozen(getattr(value, n), names) for n in Call.__slots__ if n not in ("paused", "resumed"))
        return (*moves, *rest)
    if isinstance(value, Ledger):
        return tuple(_frozen(getattr(value, n), names) for n in Ledger.__slots__ if not n.startswith("peak"))
    raise TypeError(f"a fold's state must be of plain values and containers (got {type(value).__name__})")


def _renamed(value: Any, names: dict[_Token, str]) -> Any:
    """A value with its contents under their own names."""
    if isinstance(value, _Token):
        return names[value]
    if isinstance(value, dict):
        return {k: _renamed(v, names) for k, v in value.items()}
    return [_renamed(v, names) for v in value] if isinstance(value, list) else value

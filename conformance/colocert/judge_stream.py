"""Judging files of any length: one pass over the merged events, in memory that ranks and tags bound, not events.

Knows which folds look at which events, and which codes a recording of a real run can be judged on (`rules.senses`).
Does not know how files are merged (`trace.merge`) or shown. A trace of the suite, alone, is judged on all it has.

Of each rule and code the first findings are kept, and all are counted. A real run is judged by the lifecycle and the
hand-off, and by each other profile whose events are there (`judge_apart`); which rules bind is said by the claims that
the recordings state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec

from colocert.expected import Expected
from colocert.judge import (
    CONFORMANT,
    EXPECTED,
    FAIL,
    INCOMPLETE,
    NOT_APPLICABLE,
    NOT_CONFORMANT,
    NOT_EXERCISED,
    PASS,
    Case,
    Judged,
    RuleOutcome,
    Selection,
    Stale,
    excuse,
)
from colocert.judge_apart import ACTORS, CALLS, LOOKED_AT, SIDES, Apart, OutOfPlace, folds_of
from colocert.judge_trace import add_counts
from colocert.record.manifest import Options, Record
from colocert.rules.catalogue import FOLDS, Rule, catalogue
from colocert.rules.fold import BaseFold, Finding, Fold, Panel, RunFold
from colocert.rules.recovery import TagsExist
from colocert.rules.replay import Cursor, Replay
from colocert.rules.run_index import IndexedRunView, IndexedTransport
from colocert.rules.senses import WORDS, ever_judged, lacking
from colocert.rules.view import View
from colocert.trace import TraceError
from colocert.trace.events import (
    Ack,
    AnyEvent,
    BytesSeen,
    CallIssue,
    ClaimsStated,
    Closed,
    Config,
    HandOff,
    Header,
    SaverAlloc,
    SaverCall,
    SaverFatal,
    Watch,
)
from colocert.trace.merge import Place, Source, open_all, runs

LIVE_PROFILES = ("lifecycle", "handoff")
KEPT = 3
"""Findings kept of a rule and code."""

_AGREE = ("lora", "peak_device", "offload_train", "offload_rollout")
_UNRANKED = frozenset({Watch, BytesSeen, HandOff, Closed, CallIssue, Ack})
"""Events that do not make their rank one that is judged."""


class Found(msgspec.Struct, frozen=True):
    """A finding with its place."""

    finding: Finding
    place: Place


class _Kept(list[Finding]):
    """The findings of one fold, on their way to where all are counted."""

    def __init__(self, take: Callable[[Finding], None]) -> None:
        super().__init__()
        self._take = take

    def append(self, finding: Finding) -> None:
        self._take(finding)


class StreamJudge:
    """Folds over a merged stream. `feed` every event with its file's number and line, `ended` every file, then `end`.

    `found` holds the first findings of each rule and code, `counts` how many there were; `exercised` how often each
    condition occurred.
    """

    def __init__(self, rules: Iterable[Rule], apart: Iterable[Rule] = ()) -> None:
        """`apart`: rules of a live run that keep a state of their own."""
        folds = [IndexedTransport if r.id == "HO-13" else FOLDS[r.id] for r in rules]
        self._by_rank = [fold for fold in folds if issubclass(fold, Fold)]
        self._view = IndexedRunView()
        by_run = [fold for fold in folds if issubclass(fold, RunFold)]
        self._whole = Panel(self._view, [self._made(fold, self._view) for fold in by_run])
        self._replay = Replay(self._by_rank)
        self._cursors: dict[tuple[int, int], Cursor] = {}
        self._tags: set[str] = set()
        self._file = self._line = self._fed = self._place = 0
        self._first: dict[tuple[str, str], list[tuple[int, Found]]] = {}
        self.counts: Counter[tuple[str, str]] = Counter()
        self.exercised: dict[str, dict[str, int]] = {}
        self.ranks: set[tuple[str, int]] = set()
        theirs = list(apart)
        self.apart = Apart(theirs, self._made, self._view) if theirs else None

    @property
    def found(self) -> dict[tuple[str, str], list[Found]]:
        return {key: [found for _, found in kept] for key, kept in self._first.items()}

    def _made(self, kind: type[BaseFold], view: Any) -> BaseFold:
        fold = kind(view)
        fold.findings = _Kept(self._keep_here)
        return fold

    def _keep_here(self, finding: Finding) -> None:
        self._keep(finding, self._fed + self._place, self._file, self._line + self._place)

    def _keep(self, finding: Finding, fed: int, file: int, line: int) -> None:
        """Counts a finding at the event that was fed as number `fed`, and keeps it if few were before."""
        key = (finding.rule, finding.code)
        self.counts[key] += 1
        kept = self._first.setdefault(key, [])
        if len(kept) < KEPT or fed < kept[-1][0]:
            kept.append((fed, Found(finding, Place(file, line))))
            kept.sort(key=itemgetter(0))
            del kept[KEPT:]

    def feed(self, file: int, line: int, event: AnyEvent) -> None:
        """Moves everything past one event."""
        self.feed_all(file, line, [event])

    @property
    def line(self) -> int:
        """The line of the event that was fed last."""
        return self._line + self._place

    def feed_all(self, file: int, line: int, events: list[AnyEvent]) -> None:
        """Moves everything past a stretch of one file, whose first event is at this line."""
        self._file, self._line = file, line
        whole, table, apart = self._whole, self._whole.table, self.apart
        rank, alone, taken = events[0].rank, bool(self._by_rank), set[int]()
        for place, event in enumerate(events):
            kind = event.__class__
            self._place = place
            if (  # nearly no event of a run that has nothing of these profiles has to be asked about
                apart is not None
                and (
                    apart.open
                    or kind in LOOKED_AT
                    or event.owner not in SIDES
                    or (kind in CALLS and event.actor in ACTORS)  # type: ignore[union-attr]
                )
                and apart.takes(event)
            ):
                taken.add(place)
                continue
            calls: Any = table.get(kind)  # `Panel.feed`, written out: a call an event shows
            if calls.__class__ is dict:
                calls = calls.get(event.actor)  # type: ignore[union-attr]
            for call in whole.handlers(event) if calls is None else calls:
                call(event)
            if event.owner or event.rank != rank:
                alone = False
            if kind is SaverAlloc and not event.owner:
                self._tags.add(event.tag)  # type: ignore[union-attr, arg-type]
        if alone and not taken:
            self._ranks_own(file, rank, events, self._fed, line)
        elif self._by_rank:
            for place, event in enumerate(events):
                if not event.owner and place not in taken:
                    self._ranks_own(file, event.rank, [event], self._fed + place, line + place)
        self._fed += len(events)

    def _ranks_own(self, file: int, rank: int, events: list[AnyEvent], fed: int, line: int) -> None:
        cursor = self._cursors.get((file, rank))
        if cursor is None:
            if all(event.__class__ in _UNRANKED for event in events):
                return
            cursor = self._cursor(file, rank)
        cursor.feed(events, fed, line)

    def _cursor(self, file: int, rank: int) -> Cursor:
        def take(fold: int, finding: Finding, fed: int, line: int) -> None:
            self._keep(finding, fed, file, line)

        made = self._cursors[file, rank] = Cursor(self._replay, take)
        return made

    def started(self, header: Header) -> None:
        """A live file begins. If a process had its place before, and is not its parent, that one is gone."""
        if (header.owner, header.rank) in self.ranks and not header.parent:
            self._view.replaced(header.owner, header.rank)
        self.ranks.add((header.owner, header.rank))

    def died_in(self, file: int, line: int, call: SaverCall) -> None:
        """A file ends in this saver call. An illegal transition in it is what ended the process."""
        cursor = self._cursors.get((file, call.rank))
        if cursor is None or call.owner:
            return
        view = cursor.alone().view
        assert isinstance(view, View)
        ledger = view.ledger
        chosen = [a.name for a in ledger.allocations.values() if call.tag in (None, a.tag)]
        wrong = [name for name in chosen if (name in ledger.out) is (call.op == "pause")]
        if wrong:
            reason = "double-release" if call.op == "pause" else "double-resume"
            partial = len(wrong) < len(chosen)
            fatal = SaverFatal(call.op, call.tag, wrong[0], call.saver_call, reason, partial)
            fatal.rank, fatal.seq, fatal.at = call.rank, call.seq, call.at
            self.feed(file, line, fatal)

    def end(self) -> None:
        """Ends every fold."""
        for cursor in self._cursors.values():
            panel = cursor.ends()
            for fold in panel.folds if panel is not None else ():
                if isinstance(fold, TagsExist):  # a tag that another rank of the run has used is no unknown one
                    for tag in self._tags & set(fold.unknown):
                        del fold.unknown[tag]
                fold.end()
            for kind, counts in zip(self._by_rank, cursor.exercised(), strict=True):
                add_counts(self.exercised, kind.rule, counts)
        for fold in [*self._whole.folds, *(() if self.apart is None else self.apart.folds)]:
            fold.end()
            add_counts(self.exercised, fold.rule, fold.exercised)


class FilesJudged(msgspec.Struct, frozen=True):
    """The verdict on files. `found`: the first findings by rule and code; `counts`: how many; `notes`: of the files."""

    judged: Judged
    found: dict[tuple[str, str], list[Found]]
    counts: dict[tuple[str, str], int]
    notes: tuple[str, ...]
    events: int
    ranks: int


def judge_files(
    paths: Sequence[Path], level: str = "must", profiles: Sequence[str] = (), expected: Sequence[Expected] = ()
) -> FilesJudged:
    """Judges recordings of one run together, or one trace of the suite.

    `profiles` are those to judge: by default, of a real run, the lifecycle, the hand-off and every other of which the
    files have events. `expected` are failures that are known.

    Raises `TraceError` naming file and line for what is damaged, reordered, of another version or of another run, and
    `ValueError` for a profile that a trace of the suite is not of.
    """
    sources = open_all(paths)
    live, own = sources[0].header.live, sources[0].header.profile
    able = [rule for rule in catalogue().values() if rule.id in FOLDS]
    if live:
        wanted = [rule for rule in able if ever_judged(rule) and (not profiles or rule.profile in profiles)]
        apart = folds_of(wanted)
        judge = StreamJudge([rule for rule in wanted if rule.profile in LIVE_PROFILES], apart)
    else:
        if profiles and own not in profiles:
            raise ValueError(f"--profile must name {own}, which {paths[0]} is a trace of (got {', '.join(profiles)})")
        mine = [rule for rule in able if rule.profile == own]
        if not mine:
            raise TraceError(paths[0], 1, f"profile must be one with rules (got {own!r})")
        judge = StreamJudge(mine)
    run = _Run(judge, sources)
    run.through()
    judged_on = tuple(profiles) if live and profiles else (*LIVE_PROFILES, *run.apart()) if live else (own,)
    rules = [rule for rule in catalogue().values() if rule.profile in judged_on]
    outcomes = [_outcome(rule, run, live) for rule in rules]
    selection = Selection(judged_on, level, expected=tuple(expected))
    stale: list[Stale] = []
    if expected:
        outcomes = [excuse(outcome, selection, stale) for outcome in outcomes]
    judged = _verdict(tuple(outcomes), selection, run, tuple(stale))
    bound = {(rule.id, code) for rule in rules for code in run.able(rule, live)}
    found = {key: kept for key, kept in run.judge.found.items() if key in bound}
    counts = {key: run.judge.counts[key] for key in found}
    return FilesJudged(judged, found, counts, tuple(run.notes()), run.events, len(run.judge.ranks))


class _Run:
    """One pass: events to the judge, and what the files state about themselves."""

    def __init__(self, judge: StreamJudge, sources: Sequence[Source]) -> None:
        self.judge, self.sources = judge, sources
        self.config: dict[str, Any] = {}
        self.claims: dict[str, Any] | None = None
        self.seen: set[str] = set()
        self.events = 0
        self._started: set[int] = set()
        header = sources[0].header
        self.name = header.implementation or header.scenario or ("recording" if header.live else "trace")

    def through(self) -> None:
        judge, live = self.judge, self.sources[0].header.live
        last: dict[int, SaverCall | None] = {}
        starts: dict[int, bool] = {}
        for source, events in runs(self.sources):
            self.events += len(events)
            index = source.index
            if live and index not in self._started:
                self._started.add(index)
                judge.started(source.header)
            if not _STATES.isdisjoint([event.__class__ for event in events]):
                for line, event in enumerate(events, source.line + 1):
                    self._stated(source, line, event)
                    if event.__class__ is Watch:
                        starts[index] = starts.get(index, False) or "from-start" in event.what
            if live:
                end = events[-1]
                last[index] = end if end.__class__ is SaverCall else None
            try:
                judge.feed_all(index, source.line + 1, events)
            except OutOfPlace as error:
                raise TraceError(source.path, judge.line, str(error)) from error
        if not live:
            judge.ranks |= {("", rank) for _, rank in judge._cursors}
        if not all(starts.get(source.index) for source in self.sources):
            self.seen.discard("from-start")
        for source in self.sources:
            call = last.get(source.index)
            if call is not None and not source.closed:
                judge.died_in(source.index, source.line, call)
        judge.end()

    def _stated(self, source: Source, line: int, event: AnyEvent) -> None:
        if isinstance(event, Watch):
            self.seen.update(event.what)
        elif isinstance(event, ClaimsStated):
            if self.claims is not None and self.claims != event.facts:
                raise TraceError(source.path, line, "claims must be those of the other files (got others)")
            self.claims = event.facts
        elif isinstance(event, Config):
            for name in _AGREE:
                mine, other = event.facts.get(name), self.config.get(name)
                if None not in (mine, other) and mine != other:
                    raise TraceError(
                        source.path,
                        line,
                        f"config {name} must be that of the other files, {other!r} (got {mine!r})",
                    )
            self.config = {**event.facts, **self.config}

    def apart(self) -> list[str]:
        """The other profiles of which the files have events."""
        return [] if self.judge.apart is None else self.judge.apart.profiles

    def lacks(self, rule: Rule, live: bool) -> dict[str, tuple[str, ...]]:
        """The codes of a rule that the claims bind, each with what the files do not have to judge it on."""
        stated = self.claims is not None
        bound = rule.bound(self.claims) if self.claims is not None else tuple(code.name for code in rule.codes)
        seen = frozenset(self.seen)
        return {code: lacking(rule, code, seen, self.config, stated) if live else () for code in bound}

    def able(self, rule: Rule, live: bool) -> list[str]:
        """The codes of a rule that bind and can be judged."""
        return [code for code, missing in self.lacks(rule, live).items() if not missing]

    def notes(self) -> Iterable[str]:
        """What a reader has to know of the files."""
        boots = {source.header.boot for source in self.sources}
        if len(boots) > 1 and not any(source.marks for source in self.sources):
            yield f"{len(boots)} machines without hand-off marks: their ranks are in the order of their time of day"
        for source in self.sources:
            if source.tail:
                yield f"{source.path}:{source.line + 1}: {source.tail}"
            elif source.header.live and not source.closed:
                yield f"{source.path}:{source.line}: ends without a closing line: the process ended, or still runs"


_STATES = frozenset({Watch, ClaimsStated, Config})


def _outcome(rule: Rule, run: _Run, live: bool) -> RuleOutcome:
    row: Any = {"id": rule.id, "profile": rule.profile, "level": rule.level}
    lacks = run.lacks(rule, live)
    if not lacks:
        return RuleOutcome(**row, outcome=NOT_APPLICABLE, reason=f"binds when {rule.binds}")
    able = [code for code, missing in lacks.items() if not missing]
    blind = _blind(lacks)
    judge = run.judge
    times = sum(judge.exercised.get(rule.id, {}).get(code, 0) for code in able)
    failed = [code for code in able if judge.counts.get((rule.id, code))]
    if failed:
        failed.sort(key=lambda c: judge.found[rule.id, c][0].finding.seq)
        cases = tuple(_case(rule, code, run) for code in failed)
        place = judge.found[rule.id, failed[0]][0].place
        where = f"{run.sources[place.file].path}:{place.line}"
        return RuleOutcome(**row, outcome=FAIL, code=failed[0], exercised=times, evidence=where, cases=cases)
    if not times:
        why = blind if not able else "its condition never occurred" + (f"; {blind}" if blind else "")
        return RuleOutcome(**row, outcome=NOT_EXERCISED, reason=why)
    return RuleOutcome(**row, outcome=PASS, exercised=times, reason=blind)


def _case(rule: Rule, code: str, run: _Run) -> Case:
    """One way in which the files break a rule."""
    found, times = run.judge.found[rule.id, code], run.judge.counts[rule.id, code]
    places = [f"{run.sources[f.place.file].path}:{f.place.line}, rank {f.finding.rank}" for f in found]
    return Case(
        rule=rule.id,
        scenario="",
        outcome=FAIL,
        code=code,
        codes=(code,),
        findings=tuple(f.finding for f in found),
        detail=f"{times} times; at {'; '.join(places)}",
    )


def _blind(lacks: dict[str, tuple[str, ...]]) -> str:
    """The codes that could not be judged, by what was not recorded."""
    by_lack: dict[str, list[str]] = {}
    for code, missing in lacks.items():
        if missing:
            by_lack.setdefault(", ".join(WORDS[m] for m in missing), []).append(code)
    return "; ".join(f"not recorded: {what} (for {', '.join(codes)})" for what, codes in by_lack.items())


def _verdict(outcomes: tuple[RuleOutcome, ...], selection: Selection, run: _Run, stale: tuple[Stale, ...]) -> Judged:
    levels, verdicts, aside = {"must", selection.level}, dict[str, str](), dict[str, str]()
    reasons = [entry.text for entry in stale]
    for profile in selection.profiles:
        binding = [o for o in outcomes if o.profile == profile and o.level in levels]
        idle = [o.id for o in binding if o.outcome == NOT_EXERCISED]
        held = any(o.outcome in (PASS, EXPECTED) for o in binding)
        if any(o.outcome == FAIL for o in binding):
            aside[profile] = NOT_CONFORMANT
        else:
            aside[profile] = CONFORMANT if held and not idle else INCOMPLETE
        known = any(o.outcome == EXPECTED for o in binding)
        verdicts[profile] = NOT_CONFORMANT if known else aside[profile]
        if idle:
            reasons.append("bound and not exercised: " + ", ".join(idle))
    if run.sources[0].header.live and run.claims is None:
        reasons.append("no file states claims: colocert.record(claims=...)")
    record = Record(
        impl=run.name,
        name=run.name,
        options=Options(profiles=selection.profiles),
        claims=run.claims or {},
        claimed=selection.profiles,
    )
    worst, without = (
        next(v for v in (NOT_CONFORMANT, INCOMPLETE, CONFORMANT) if v in kept.values()) for kept in (verdicts, aside)
    )
    return Judged(record, worst, verdicts, outcomes, selection, tuple(reasons), without, stale)


__all__ = ["FilesJudged", "Found", "StreamJudge", "judge_files"]

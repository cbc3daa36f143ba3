"""The report as one HTML page that needs no network: what a verdict rests on, failures first.

Knows what a page says and in which order. Does not know how it looks (`pages`) or how a verdict is reached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from colocert.judge import (
    EXPECTED,
    FAIL,
    NOT_APPLICABLE,
    NOT_CLAIMED,
    NOT_EXERCISED,
    NOT_RUN,
    PASS,
    Case,
    Evidence,
    Judged,
    RuleOutcome,
)
from colocert.record.manifest import COMPLETE, Record
from colocert.report import links
from colocert.report.certificate import environment
from colocert.report.figures import Figure, Trace, trace_of
from colocert.report.pages import render
from colocert.report.peaks import Peaks
from colocert.report.peaks import rows as peak_rows
from colocert.report.sequence import Diagram
from colocert.report.terminal import code_text, reproduce
from colocert.rules.catalogue import Rule, catalogue

OUTCOMES = (PASS, FAIL, EXPECTED, NOT_EXERCISED, NOT_RUN, NOT_APPLICABLE, NOT_CLAIMED)
_FAILS = (FAIL, EXPECTED)
MOST_CASES = 40
"""Further failing cases of a rule that are listed by name."""


class Shown(NamedTuple):
    """One failing case in full."""

    case: Case
    said: str
    diagram: Diagram | None
    figure: Figure | None
    transcript: str
    reproduce: str
    window: str


class Failure(NamedTuple):
    """One failing rule: for each code its first case in full, the other cases by name."""

    rule: Rule
    row: RuleOutcome
    binds: bool
    seen: list[links.Report]
    shown: list[Shown]
    others: list[Case]
    left: int


class Page(NamedTuple):
    """Everything that the template says."""

    judged: Judged
    record: Record
    failures: list[Failure]
    profiles: list[tuple[str, str, list[tuple[Rule, RuleOutcome | None, str]]]]
    counts: list[tuple[str, str]]
    memory: list[Figure]
    peaks: list[tuple[str, ...]]
    transcripts: list[tuple[str, Trace, list[bool]]]
    failing_cases: Counter[str]
    environment: dict[str, str]
    facts: Mapping[str, Any]


def report(
    judged: Judged,
    evidence: Evidence | None = None,
    peaks: Sequence[Peaks] = (),
    facts: Mapping[str, Any] | None = None,
    windows: Mapping[tuple[str, str], str] | None = None,
) -> str:
    """The page about a verdict. `evidence` is None where nothing was recorded; `facts` are volatile ones of the run.

    `windows` are transcripts around findings, by rule and code, where there is no evidence to read them from.
    """
    traces = _Traces(evidence)
    failures = list(_failures(judged, traces, windows or {}))
    memory = list(_memory(judged, traces, peaks))
    page = Page(
        judged=judged,
        record=judged.record,
        failures=failures,
        profiles=list(_profiles(judged)),
        counts=list(_counts(judged)),
        memory=memory,
        peaks=list(peak_rows(peaks)),
        transcripts=list(traces.transcripts(failures)),
        failing_cases=Counter(c.scenario for row in judged.rules for c in row.cases if c.outcome in _FAILS),
        environment=environment(),
        facts=facts or {},
    )
    return render("report.html", page=page)


class _Traces:
    """The traces that a page shows, each read once."""

    def __init__(self, evidence: Evidence | None) -> None:
        self.evidence = evidence
        self._read: dict[str, Trace] = {}

    def of(self, path: str) -> Trace | None:
        if self.evidence is None or not path:
            return None
        if path not in self._read:
            self._read[path] = trace_of(self.evidence, path)
        return self._read[path]

    def transcripts(self, failures: Sequence[Failure]) -> Iterator[tuple[str, Trace, list[bool]]]:
        """Whole transcripts of what was shown, with the lines marked that some finding is about."""
        marked: dict[str, set[tuple[int, int]]] = {}
        for failure in failures:
            for shown in failure.shown:
                marked.setdefault(shown.case.trace, set()).update((f.rank, f.seq) for f in shown.case.findings)
        for path, trace in self._read.items():
            if trace.lines:
                wanted = marked.get(path, set())
                yield anchor(path), trace, [(line.rank, line.seq) in wanted for line in trace.lines]


def anchor(trace: str) -> str:
    """The name by which a page links to a trace's transcript."""
    return "transcript-" + "-".join(Path(trace).with_suffix("").parts[-2:])


def _failures(judged: Judged, traces: _Traces, windows: Mapping[tuple[str, str], str]) -> Iterator[Failure]:
    """The failing rules: those that bind first, and last those that the implementer lists as known."""
    levels = {"must", judged.selection.level}
    failing = [row for row in judged.rules if row.outcome in _FAILS]
    for row in sorted(failing, key=lambda r: (r.outcome == EXPECTED, r.level not in levels)):
        rule = catalogue()[row.id]
        cases = [c for c in row.cases if c.outcome in _FAILS]
        if not cases:
            cases = [Case(rule=row.id, scenario="", outcome=FAIL, code=row.code, detail=row.reason)]
        first: dict[str, Case] = {}
        for case in cases:
            first.setdefault(case.code, case)
        others = [c for c in cases if c not in first.values()]
        yield Failure(
            rule=rule,
            row=row,
            binds=row.level in levels,
            seen=[links.report(seen) for seen in rule.seen],
            shown=[_shown(case, rule, judged.record, traces, windows) for case in first.values()],
            others=others[:MOST_CASES],
            left=max(0, len(others) - MOST_CASES),
        )


def _shown(case: Case, rule: Rule, record: Record, traces: _Traces, windows: Mapping[tuple[str, str], str]) -> Shown:
    trace = traces.of(case.trace)
    return Shown(
        case=case,
        said=code_text(rule, case.code),
        diagram=trace.sequence(case.findings) if trace else None,
        figure=trace.figure(f"{case.scenario}: bytes over events", case.findings) if trace else None,
        transcript=anchor(case.trace) if trace and trace.lines else "",
        reproduce=reproduce(case, record) if case.scenario else "",
        window=windows.get((case.rule, case.code), ""),
    )


def _profiles(judged: Judged) -> Iterator[tuple[str, str, list[tuple[Rule, RuleOutcome | None, str]]]]:
    """Every rule of the catalogue by profile: those that were judged first."""
    rows = {row.id: row for row in judged.rules}
    by_profile: dict[str, list[tuple[Rule, RuleOutcome | None, str]]] = {}
    for rule in catalogue().values():
        row = rows.get(rule.id)
        by_profile.setdefault(rule.profile, []).append((rule, row, _note(rule, row)))
    for profile in sorted(by_profile, key=lambda p: p not in judged.profiles):
        yield profile, judged.profiles.get(profile, ""), by_profile[profile]


def _note(rule: Rule, row: RuleOutcome | None) -> str:
    if row is None:
        return ""
    said = row.reason or (code_text(rule, row.code) if row.code else "")
    return ": ".join(part for part in (row.code, said) if part)


def _counts(judged: Judged) -> Iterator[tuple[str, str]]:
    """What the verdict is out of: name and numbers."""
    record = judged.record
    rules = Counter(r.outcome for r in judged.rules if r.profile in judged.profiles)
    if rules:
        yield _many(rules.total(), "rule"), ", ".join(f"{rules[o]} {o}" for o in OUTCOMES if rules[o])
    cases = Counter(c.outcome for r in judged.rules for c in r.cases)
    if cases:
        yield _many(cases.total(), "case"), ", ".join(f"{cases[o]:,} {o}" for o in OUTCOMES if cases[o])
    if record.scenarios:
        ended = Counter(s.status for s in record.scenarios)
        yield _many(len(record.scenarios), "scenario"), ", ".join(f"{n} {status}" for status, n in ended.most_common())
    if record.explorations:
        plain, faulted = (sum(getattr(e, n) for e in record.explorations) for n in ("sequences", "faulted"))
        yield _many(len(record.explorations), "exploration"), f"{plain:,} call sequences, {faulted:,} with one fault"
    if record.controls:
        controls = Counter(c.outcome for c in record.controls)
        yield _many(len(record.controls), "control"), ", ".join(f"{n} {o}" for o, n in sorted(controls.items()))


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _memory(judged: Judged, traces: _Traces, peaks: Sequence[Peaks]) -> Iterator[Figure]:
    """Timelines of what went right: the heaviest hand-off of each mode, and of the other profiles one of each kind."""
    evidence = traces.evidence
    if evidence is None:
        return
    by_id = {s.id: s for s in judged.record.scenarios}
    for found in peaks:
        trace = traces.of(by_id[found.scenario].trace)
        figure = trace.figure(f"handoff, {found.scenario}: {found.mode}-peak, {found.kind}") if trace else None
        if figure:
            yield figure
    for profile in judged.profiles:
        if profile != "handoff" or not peaks:
            yield from _clean(profile, judged, traces)


def _clean(profile: str, judged: Judged, traces: _Traces) -> Iterator[Figure]:
    kinds: set[str] = set()
    for kept in [s for s in judged.record.scenarios if s.profile == profile and s.status == COMPLETE][:12]:
        assert traces.evidence is not None
        trace = Trace(traces.evidence.folder, kept.trace)
        if trace.kind in kinds or not trace.clean:
            continue
        figure = trace.figure(f"{profile}, {kept.id}")
        if figure:
            kinds.add(trace.kind)
            traces.of(kept.trace)
            yield figure

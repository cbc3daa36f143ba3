"""The judge: runs the folds over recorded traces and turns findings into outcomes and verdicts.

Knows folds, outcomes, verdicts and their precedence. Does not know how a trace was recorded: an evidence folder of
this machine, of another one, or of a real GPU run is judged alike.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from colocert.expected import Expected, listed
from colocert.judge_trace import TraceJudged, judge_events
from colocert.record.manifest import COMPLETE, Options, Record, read_record
from colocert.rules.catalogue import PROFILES, Rule, catalogue
from colocert.rules.conditions import claims_named
from colocert.rules.fold import Finding
from colocert.trace import AnyEvent, TraceError, read_trace
from colocert.trace.events import Move, SaverCall, Send

PASS, FAIL, EXPECTED = "pass", "fail", "expected"
NOT_CLAIMED, NOT_APPLICABLE, NOT_EXERCISED, NOT_RUN = "not-claimed", "not-applicable", "not-exercised", "not-run"

CONFORMANT, PARTIAL, INCOMPLETE, NOT_CONFORMANT = "conformant", "partial", "incomplete", "not-conformant"
HARNESS_ERROR, USAGE_ERROR = "harness-error", "usage-error"
EXIT_CODES: Mapping[str, int] = {
    CONFORMANT: 0,
    PARTIAL: 0,
    NOT_CONFORMANT: 1,
    USAGE_ERROR: 4,
    INCOMPLETE: 10,
    HARNESS_ERROR: 11,
}


class Case(msgspec.Struct, frozen=True):
    """One rule on one scenario: what a pytest item presents.

    `outcome` is pass, fail or not-exercised. `findings` are those of codes that the claims bind; `code` is the first
    one's, or hang, died; `codes` are all that it failed with. `steps` and `paste` are given where exploration found it.
    """

    rule: str
    scenario: str
    outcome: str
    exercised: int = 0
    code: str = ""
    findings: tuple[Finding, ...] = ()
    trace: str = ""
    detail: str = ""
    steps: tuple[str, ...] = ()
    paste: str = ""
    codes: tuple[str, ...] = ()


class RuleOutcome(msgspec.Struct, frozen=True):
    """One rule over everything that was run: the row of a certificate."""

    id: str
    profile: str
    level: str
    outcome: str
    code: str = ""
    exercised: int = 0
    scenario: str = ""
    evidence: str = ""
    cases: tuple[Case, ...] = ()
    reason: str = ""


class Selection(msgspec.Struct, frozen=True):
    """What of the suite was run. `left_out` are cases ("LC-03[scenario]") that were deselected or did not run.

    `narrowed` are the options that make a run less than complete: `-k`, `--faults=none`, a lower `--depth`, …
    `expected` are the failures that the implementer lists as known.
    """

    profiles: tuple[str, ...] = ()
    level: str = "must"
    left_out: tuple[str, ...] = ()
    narrowed: tuple[str, ...] = ()
    expected: tuple[Expected, ...] = ()


def narrowed_by(options: Options) -> tuple[str, ...]:
    """What the recording itself was asked to leave out, as options of the command line."""
    full = Options()
    words = [f"--depth={options.depth}"] if options.depth < full.depth else []
    if options.faults != full.faults:
        words.append(f"--faults={options.faults}")
    elif 0 < options.asked_fault_depth < full.depth:
        words.append(f"--fault-depth={options.asked_fault_depth}")
    return tuple(words)


def excused(case: Case, expected: Iterable[Expected]) -> bool:
    """Whether a case failed, and in no way that is not listed as known."""
    return case.outcome == FAIL and set(case.codes) <= listed(expected, case.rule)


class Stale(msgspec.Struct, frozen=True):
    """An entry of the list of expected failures that is not what happened."""

    rule: str
    code: str
    text: str


class Judged(msgspec.Struct, frozen=True):
    """The verdict on an implementation, with everything it rests on.

    `aside` is what the verdict would be without the expected failures, and decides the exit code.
    """

    record: Record
    verdict: str
    profiles: dict[str, str]
    rules: tuple[RuleOutcome, ...]
    selection: Selection
    reasons: tuple[str, ...] = ()
    aside: str = ""
    stale: tuple[Stale, ...] = ()

    @property
    def exit_code(self) -> int:
        """The process's exit code; a usage or harness problem has its own, and a stale list is never a success."""
        if self.record.problem is not None:
            return self.record.problem.exit_code
        code = EXIT_CODES[self.aside or self.verdict]
        stale = self.stale and code in (EXIT_CODES[CONFORMANT], EXIT_CODES[INCOMPLETE])
        return EXIT_CODES[NOT_CONFORMANT] if stale else code


REACHES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "lifecycle": ((SaverCall,), "rig.saver: put it where the framework has its saver, by rig.patch"),
    "adapter-sync": ((Move, Send), "rig.workers or rig.engine: hand them to the framework in place of its own"),
}
"""Of a profile, the events of which a run has at least one, and what it has not reached otherwise."""


class Evidence:
    """An evidence folder, judged case by case; each trace is read and folded once."""

    def __init__(self, folder: Path, profiles: Iterable[str] = ()) -> None:
        """`profiles`: those to judge of what was recorded; all unless told otherwise."""
        self.folder = folder
        self.record = read_record(folder)
        self._only = tuple(profiles)
        self.rules = [r for r in catalogue().values() if r.profile in self.profiles()]
        self._scenarios = {s.id: s for s in self.record.scenarios}
        self._reached: set[str] = set()

    def profiles(self) -> tuple[str, ...]:
        """The profiles that are judged: those asked for, or all that are claimed."""
        asked = self._only or self.record.options.profiles
        return tuple(p for p in self.record.claimed if not asked or p in asked)

    @functools.cached_property
    def cases(self) -> tuple[Case, ...]:
        """Every rule that the claims bind on every scenario that exercises it, in catalogue order.

        Raises `TraceError` for a trace that is missing or damaged.
        """
        if self.record.problem is not None:
            return ()
        judged = {s.id: self._judged(s.id) for s in self.record.scenarios}
        found: list[Case] = []
        for rule in self.rules:
            bound = set(rule.bound(self.record.claims))
            if not bound:
                continue
            for scenario, result in judged.items():
                case = self._case(rule, bound, scenario, result)
                if case is not None:
                    found.append(case)
            found += self._explored(rule, bound)
        return tuple(found)

    def case(self, rule: str, scenario: str) -> Case:
        """One case. Raises `KeyError` if the rule was not exercised there."""
        for case in self.cases:
            if (case.rule, case.scenario) == (rule, scenario):
                return case
        raise KeyError(f"{rule}[{scenario}]")

    def _judged(self, scenario: str) -> TraceJudged:
        kept = self._scenarios[scenario]
        path = self.folder / kept.trace
        rules = [r for r in self.rules if r.profile == kept.profile]
        events: Iterable[AnyEvent] = read_trace(path, allow_torn_tail=kept.status != COMPLETE)
        if kept.profile in REACHES and kept.profile not in self._reached:
            events = self._watched(kept.profile, events)
        return judge_events(events, rules)

    def _watched(self, profile: str, events: Iterable[AnyEvent]) -> Iterator[AnyEvent]:
        """The events, looked at until one shows that the double which the profile is about has been reached."""
        kinds, _ = REACHES[profile]
        rest = iter(events)
        for event in rest:
            yield event
            if isinstance(event, kinds):
                self._reached.add(profile)
                break
        yield from rest

    def unreached(self) -> tuple[str, ...]:
        """Once the cases are there: what to look at where no scenario of a profile reached its double."""
        recorded = {s.profile for s in self.record.scenarios if s.status != NOT_RUN}
        return tuple(
            f"no {profile} scenario reached {what}"
            for profile, (_, what) in REACHES.items()
            if profile in recorded and profile in self.profiles() and profile not in self._reached
        )

    def _case(self, rule: Rule, bound: set[str], scenario: str, result: TraceJudged) -> Case | None:
        kept = self._scenarios[scenario]
        if kept.profile != rule.profile:
            return None
        findings = tuple(f for f in result.findings if f.rule == rule.id and f.code in bound)
        times = sum(n for code, n in result.exercised.get(rule.id, {}).items() if code in bound)
        common: Any = {"rule": rule.id, "scenario": scenario, "exercised": times, "trace": kept.trace}
        if findings:
            codes = tuple(dict.fromkeys(f.code for f in findings))
            return Case(**common, outcome=FAIL, code=codes[0], codes=codes, findings=findings)
        if kept.status not in (COMPLETE, NOT_RUN) and (scenario in rule.scenarios or times):
            return Case(**common, outcome=FAIL, code=kept.status, codes=(kept.status,), detail=kept.detail)
        return Case(**common, outcome=PASS) if times else None

    def _explored(self, rule: Rule, bound: set[str]) -> list[Case]:
        cases = []
        for explored in self.record.explorations:
            if explored.profile != rule.profile or not rule.explore:
                continue
            if explored.status != COMPLETE:
                lost = Case(
                    rule=rule.id,
                    scenario=explored.id,
                    outcome=FAIL,
                    code=explored.status,
                    codes=(explored.status,),
                    detail=explored.detail,
                )
                cases.append(lost)
                continue
            times = sum(n for code, n in explored.exercised.get(rule.id, {}).items() if code in bound)
            hits = [f for f in explored.findings if f.rule == rule.id and f.code in bound]
            if hits:
                first = hits[0]
                findings = self._findings_of(first.trace, rule, first.code)
                cases.append(
                    Case(
                        rule=rule.id,
                        scenario=explored.id,
                        outcome=FAIL,
                        exercised=times,
                        code=first.code,
                        findings=findings,
                        trace=first.trace,
                        detail="; ".join(f"{f.code} in {f.times} sequences" for f in hits),
                        steps=first.steps,
                        paste=first.paste,
                        codes=tuple(dict.fromkeys(f.code for f in hits)),
                    )
                )
            elif times:
                cases.append(Case(rule=rule.id, scenario=explored.id, outcome=PASS, exercised=times))
        return cases

    def _findings_of(self, trace: str, rule: Rule, code: str) -> tuple[Finding, ...]:
        path = self.folder / trace
        result = judge_events(read_trace(path), [rule])
        findings = tuple(f for f in result.findings if f.code == code)
        if not findings:
            raise TraceError(path, 0, f"the trace must show {rule.id} {code}, as the index says (got no such finding)")
        return findings


def judge(evidence: Evidence, selection: Selection | None = None) -> Judged:
    """The verdict on an evidence folder, under a selection of what was run."""
    record, selection = evidence.record, selection or Selection(profiles=evidence.record.options.profiles)
    if record.problem is not None:
        verdict = USAGE_ERROR if record.problem.exit_code == EXIT_CODES[USAGE_ERROR] else HARNESS_ERROR
        return Judged(record, verdict, {}, (), selection, (record.problem.message,))
    left_out = set(selection.left_out)
    by_rule: dict[str, list[Case]] = {}
    for case in evidence.cases:
        if f"{case.rule}[{case.scenario}]" not in left_out:
            by_rule.setdefault(case.rule, []).append(case)
    ran = evidence.profiles()
    outcomes = [_outcome(rule, by_rule.get(rule.id, []), record, ran, bool(left_out)) for rule in catalogue().values()]
    if not left_out and not selection.narrowed:
        outcomes = _untestable(outcomes, record, ran)
    stale: list[Stale] = []
    if selection.expected:
        outcomes = [excuse(o, selection, stale) for o in outcomes]
    return _verdict(record, selection, ran, tuple(outcomes), tuple(stale), evidence.unreached())


def _outcome(rule: Rule, cases: list[Case], record: Record, ran: tuple[str, ...], partial: bool) -> RuleOutcome:
    row: Any = {"id": rule.id, "profile": rule.profile, "level": rule.level}
    if rule.profile not in record.claimed:
        return RuleOutcome(**row, outcome=NOT_CLAIMED, reason=f"no factory for {rule.profile}")
    if not rule.bound(record.claims):
        return RuleOutcome(**row, outcome=NOT_APPLICABLE, reason=f"binds when {rule.binds}")
    if rule.profile not in ran:
        return RuleOutcome(**row, outcome=NOT_RUN, reason=f"--profile left out {rule.profile}")
    failed = [c for c in cases if c.outcome == FAIL]
    times = sum(c.exercised for c in cases)
    shown = failed[0] if failed else cases[0] if cases else None
    if shown is None or not (failed or times):
        lacking = {s.detail for s in record.scenarios if s.id in rule.scenarios and s.status == NOT_RUN}
        if lacking and not partial:
            return RuleOutcome(**row, outcome=NOT_RUN, reason="; ".join(sorted(lacking)))
        why = "deselected" if partial else "its condition never occurred"
        return RuleOutcome(**row, outcome=NOT_RUN if partial else NOT_EXERCISED, reason=why)
    return RuleOutcome(
        **row,
        outcome=FAIL if failed else PASS,
        code=shown.code,
        exercised=times,
        scenario=shown.scenario,
        evidence=shown.trace,
        cases=tuple(cases),
    )


def _untestable(outcomes: list[RuleOutcome], record: Record, ran: tuple[str, ...]) -> list[RuleOutcome]:
    """A claim none of whose bound rules was exercised fails those rules."""
    rules = catalogue()
    binding: dict[str, list[str]] = {}
    for claim, stated in record.claims.items():
        if stated:
            mine = [
                r.id for r in rules.values() if r.profile in ran and claim in _binders(r) and r.bound(record.claims)
            ]
            if mine:
                binding[claim] = mine
    idle = {o.id for o in outcomes if o.outcome == NOT_EXERCISED}
    empty = {rule: claim for claim, mine in binding.items() if set(mine) <= idle for rule in mine}
    return [
        msgspec.structs.replace(
            o, outcome=FAIL, code="untestable", reason=f"{empty[o.id]} is claimed, and no rule it binds was exercised"
        )
        if o.id in empty
        else o
        for o in outcomes
    ]


def excuse(row: RuleOutcome, selection: Selection, stale: list[Stale]) -> RuleOutcome:
    """The row as the list of expected failures leaves it; where an entry is not what happened, `stale` says so."""
    known = {entry.code: entry for entry in selection.expected if entry.rule == row.id}
    if not known or row.outcome not in (PASS, FAIL, NOT_APPLICABLE):
        return row
    failed = [case for case in row.cases if case.outcome == FAIL]
    found = dict.fromkeys(code for case in failed for code in case.codes) or ({row.code: None} if row.code else {})
    other = [code for code in found if code not in known]
    instead = f"(got {', '.join(other)})" if other else "and did not: take it out of the list"
    if not selection.left_out and not selection.narrowed:
        stale += [
            Stale(row.id, code, f"{row.id} is expected to fail with {code} {instead}")
            for code in known
            if code not in found
        ]
    if row.outcome != FAIL:
        return row
    if not other:
        return msgspec.structs.replace(row, outcome=EXPECTED, reason=known[row.code].reason)
    shown = next((case for case in failed if not excused(case, selection.expected)), None)
    if shown is None:
        return row
    return msgspec.structs.replace(
        row,
        code=next(code for code in shown.codes if code not in known),
        scenario=shown.scenario,
        evidence=shown.trace,
    )


@functools.cache
def _binders(rule: Rule) -> frozenset[str]:
    return frozenset(claims_named(rule.binds))


def _verdict(
    record: Record,
    selection: Selection,
    ran: tuple[str, ...],
    outcomes: tuple[RuleOutcome, ...],
    stale: tuple[Stale, ...] = (),
    unreached: tuple[str, ...] = (),
) -> Judged:
    reasons = [*(entry.text for entry in stale), *unreached]
    levels = {"must", selection.level}
    profiles: dict[str, str] = {}
    aside: dict[str, str] = {}
    for profile in dict.fromkeys((*ran, *selection.profiles)):
        binding = [o for o in outcomes if o.profile == profile and o.level in levels]
        aside[profile] = _profile_verdict(profile, binding, record, selection, reasons)
        known = any(o.outcome == EXPECTED for o in binding)
        profiles[profile] = NOT_CONFORMANT if known else aside[profile]
    if not record.claimed:
        reasons.append("the implementation has no factory: there is nothing to certify")
    reasons += [f"control {c.name} came out green: {c.detail}" for c in record.controls if c.outcome == "green"]
    verdict = _over(set(profiles.values()), record, selection)
    if verdict == PARTIAL:
        reasons.append("no factory for " + ", ".join(p for p in PROFILES if p not in record.claimed))
    return Judged(
        record,
        verdict,
        profiles,
        outcomes,
        selection,
        tuple(dict.fromkeys(reasons)),
        _over(set(aside.values()), record, selection),
        stale,
    )


def _over(verdicts: set[str], record: Record, selection: Selection) -> str:
    """The verdict over those of the profiles, in the order of precedence."""
    if any(c.outcome == "green" for c in record.controls):
        return HARNESS_ERROR
    if NOT_CONFORMANT in verdicts:
        return NOT_CONFORMANT
    if INCOMPLETE in verdicts or not record.claimed:
        return INCOMPLETE
    if not selection.profiles and set(record.claimed) != set(PROFILES):
        return PARTIAL
    return CONFORMANT


def _profile_verdict(
    profile: str, binding: list[RuleOutcome], record: Record, selection: Selection, reasons: list[str]
) -> str:
    if profile not in record.claimed:
        reasons.append(f"--profile names {profile}, for which there is no factory")
        return INCOMPLETE
    if any(o.outcome == FAIL for o in binding):
        return NOT_CONFORMANT
    counts = Counter(o.outcome for o in binding)
    idle = [o for o in binding if o.outcome in (NOT_EXERCISED, NOT_RUN)]
    if idle:
        reasons.append("bound and not exercised: " + ", ".join(o.id for o in idle))
    if selection.narrowed:
        reasons.append("the run was narrowed by " + ", ".join(selection.narrowed))
    if selection.left_out:
        reasons.append(f"{len(selection.left_out)} cases were left out")
    if not counts.get(PASS) and not counts.get(EXPECTED) and not idle:
        reasons.append(f"there are no rules for {profile} in this version")
        return INCOMPLETE
    return INCOMPLETE if idle or selection.narrowed or selection.left_out else CONFORMANT


def first_findings(findings: Iterable[Finding]) -> dict[str, Finding]:
    """The first finding of each code, by code."""
    first: dict[str, Finding] = {}
    for finding in findings:
        first.setdefault(finding.code, finding)
    return first

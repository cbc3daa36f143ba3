"""The pytest items: what a case, a rule without a case, and a transcript look like to pytest.

Knows names, outcomes as pytest sees them, and the properties that reports carry. Does not know who recorded the
evidence or what the verdict is: every process of a run makes the same items in the same order from the same folder.

    LC-03[lora-early-release]        a rule on a scenario
    LC-22[not-applicable]            a rule that no scenario can say anything about, skipped with its reason
    expected[LC-03-released-again]   an entry of the list of expected failures, which has to be what happened
    transcript[lora-early-release]   under `--snapshot-dir`: the transcript as the golden file has it
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from colocert.expected import Expected, read_expected
from colocert.judge import (
    EXPECTED,
    FAIL,
    NOT_APPLICABLE,
    NOT_CLAIMED,
    NOT_EXERCISED,
    Case,
    Evidence,
    RuleOutcome,
    Selection,
    excused,
    judge,
    narrowed_by,
)
from colocert.plugin import expect_file
from colocert.record.manifest import Record, ScenarioRecord
from colocert.report.terminal import again_text, failure_text
from colocert.report.transcript import of_scenario
from colocert.rules.catalogue import catalogue

_SKIPPED = (NOT_APPLICABLE, NOT_EXERCISED, NOT_CLAIMED)


class Violation(Exception):
    """A rule is broken. Fields: `rule`, `code`, `expected`, `observed`; the text is the whole failure text."""

    def __init__(self, case: Case, text: str) -> None:
        super().__init__(text)
        first = case.findings[0] if case.findings else None
        self.rule, self.code = case.rule, case.code
        self.expected, self.observed = (first.expected, first.observed) if first else ("", case.detail)


class StaleList(Exception):
    """An entry of the list of expected failures is not what happened."""


class TranscriptDiffers(Exception):
    """A transcript differs from its golden file."""


class JudgedItem(pytest.Item):
    """What the items have in common: they are judged already, and fail with a text instead of a traceback."""

    rule = ""

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.name

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, (Violation, StaleList, TranscriptDiffers)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def describe(self, **facts: str | int) -> None:
        """Properties for every report of this item, JUnit's included, under xdist too."""
        self.user_properties.extend((name, str(value)) for name, value in facts.items())


class CaseItem(JudgedItem):
    """One rule on one scenario. Under `--level=must` a broken SHOULD rule is skipped with its code, not failed.

    A failure that is listed as expected, by `reason`, is what pytest calls xfailed.
    """

    def __init__(self, *, case: Case, evidence: Evidence, binds: bool, reason: str, **more: Any) -> None:
        super().__init__(**more)
        self.case, self.evidence, self.binds, self.rule = case, evidence, binds, case.rule
        self.reason = reason
        outcome = EXPECTED if reason else case.outcome
        self.describe(rule=case.rule, code=case.code, outcome=outcome, exercised=case.exercised, scenario=case.scenario)

    def runtest(self) -> None:
        if self.case.outcome == NOT_EXERCISED:
            pytest.skip(NOT_EXERCISED)
        if self.case.outcome != FAIL:
            return
        if self.reason:
            pytest.xfail(f"{self.case.code}: {self.reason}")
        first = self.first_of_its_kind()
        text = (
            failure_text(self.case, self.evidence.record, self.evidence.folder)
            if first is self
            else again_text(self.case, first.name, self.evidence.record)
        )
        if not self.binds:
            pytest.skip(f"a SHOULD rule, which binds with --level=should; {text.splitlines()[0]}")
        raise Violation(self.case, text)

    def first_of_its_kind(self) -> CaseItem:
        """The first of the selected items that fails with this code of this rule: it has the whole text, once."""
        kind = (self.rule, self.case.code)
        alike = (i for i in self.session.items if isinstance(i, CaseItem) and not i.reason)
        return next((i for i in alike if i.case.outcome == FAIL and (i.rule, i.case.code) == kind), self)


class RuleItem(JudgedItem):
    """A rule for which there is no case: skipped with the reason, or failed if a claim of it is untestable."""

    def __init__(self, *, row: RuleOutcome, record: Record, **more: Any) -> None:
        super().__init__(**more)
        self.row, self.record, self.rule = row, record, row.id
        self.describe(rule=row.id, code=row.code, outcome=row.outcome, exercised=0, scenario="")

    def runtest(self) -> None:
        if self.row.outcome == EXPECTED:
            pytest.xfail(f"{self.row.code}: {self.row.reason}")
        if self.row.outcome not in (FAIL, EXPECTED):
            pytest.skip(f"{self.row.outcome}: {self.row.reason}")
        case = Case(rule=self.row.id, scenario="", outcome=FAIL, code=self.row.code, detail=self.row.reason)
        raise Violation(case, failure_text(case, self.record, Path()))


class ExpectedItem(JudgedItem):
    """An entry of the list of expected failures. Never part of the verdict: the implementation is what it is."""

    def __init__(self, *, entry: Expected, stale: str, **more: Any) -> None:
        super().__init__(**more)
        self.stale = stale
        self.describe(expected=entry.rule, code=entry.code, issue=entry.issue, expiry=str(entry.expiry))

    def runtest(self) -> None:
        if self.stale:
            raise StaleList(self.stale)


class TranscriptItem(JudgedItem):
    """A scenario's transcript against its golden file. Never part of the verdict."""

    def __init__(self, *, kept: ScenarioRecord, folder: Path, golden: Path, **more: Any) -> None:
        super().__init__(**more)
        self.kept, self.folder, self.golden = kept, folder, golden / kept.profile / f"{kept.id}.txt"
        self.obj = type(self).runtest
        self.describe(transcript=kept.id)

    def runtest(self) -> None:
        from colocert.report.golden import compare

        difference = compare(self, of_scenario(self.folder, self.kept))
        if difference:
            told = [f"the transcript of {self.kept.id} differs from {self.golden}", *difference]
            raise TranscriptDiffers("\n".join([*told, "to accept it: --snapshot-update"]))


class StaleTranscript(JudgedItem):
    """A golden file whose scenario was not recorded, or has no golden one; `--snapshot-update` removes it."""

    def __init__(self, *, golden: Path, **more: Any) -> None:
        super().__init__(**more)
        self.golden = golden
        self.describe(transcript=golden.stem)

    def runtest(self) -> None:
        if self.config.option.update_snapshots:
            self.golden.unlink(missing_ok=True)
        else:
            raise TranscriptDiffers(
                f"{self.golden} must be the transcript of a scenario that was recorded (got none of that name)\n"
                "to remove it: --snapshot-update"
            )


@functools.lru_cache(maxsize=4)
def evidence_at(folder: str) -> Evidence:
    """The evidence folder of this run, judged once a process."""
    return Evidence(Path(folder))


def collect(parent: pytest.Collector, profile: str, folder: str) -> Iterator[pytest.Item]:
    """The items of one profile, in catalogue order: cases, rules without a case, expected failures, transcripts."""
    evidence = evidence_at(folder)
    record, option = evidence.record, parent.config.option
    if profile in record.claimed and profile not in evidence.profiles():
        return
    levels = {"must", option.colocert_level}
    listed = expected_at(expect_file(parent.config))
    judged = judge(evidence, Selection(record.options.profiles, expected=listed))
    for row in judged.rules:
        rule = catalogue()[row.id]
        if rule.profile != profile:
            continue
        for case in evidence.cases:
            if case.rule == row.id:
                yield CaseItem.from_parent(
                    parent,
                    name=f"{case.rule}[{case.scenario}]",
                    case=case,
                    evidence=evidence,
                    binds=rule.level in levels,
                    reason=_reason(case, listed),
                )
        if row.outcome in _SKIPPED or (row.outcome in (FAIL, EXPECTED) and not row.cases):
            named = row.code or row.outcome
            yield RuleItem.from_parent(parent, name=f"{row.id}[{named}]", row=row, record=record)
    for entry in listed if profile in evidence.profiles() and not narrowed_by(record.options) else ():
        if catalogue()[entry.rule].profile == profile:
            stale = next((s.text for s in judged.stale if (s.rule, s.code) == (entry.rule, entry.code)), "")
            yield ExpectedItem.from_parent(
                parent, name=f"expected[{entry.rule}-{entry.code}]", entry=entry, stale=stale
            )
    if option.colocert_snapshot_dir:
        yield from _transcripts(parent, profile, evidence)


@functools.lru_cache(maxsize=4)
def expected_at(path: str) -> tuple[Expected, ...]:
    """The expected failures of this run, read once a process."""
    return read_expected(Path(path)) if path else ()


def _reason(case: Case, listed: tuple[Expected, ...]) -> str:
    """Why a failure is expected; empty for any other case."""
    if not excused(case, listed):
        return ""
    return next(e.reason for e in listed if (e.rule, e.code) == (case.rule, case.code))


def _transcripts(parent: pytest.Collector, profile: str, evidence: Evidence) -> Iterator[pytest.Item]:
    golden = parent.config.invocation_params.dir / parent.config.option.colocert_snapshot_dir
    recorded = [kept for kept in evidence.record.scenarios if kept.profile == profile and kept.golden]
    for kept in recorded:
        yield TranscriptItem.from_parent(
            parent, name=f"transcript[{kept.id}]", kept=kept, folder=evidence.folder, golden=golden
        )
    for path in sorted((golden / profile).glob("*.txt")):
        if path.stem not in {kept.id for kept in recorded}:
            yield StaleTranscript.from_parent(parent, name=f"transcript[{path.stem}]", golden=path)

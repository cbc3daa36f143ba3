"""What a person reads in the terminal: the failure text of a case, the summary table and the verdict line.

Knows wording and layout. Does not know pytest: lines come out with a markup that pytest's writer understands, and
colour only repeats what the words say.
"""

from __future__ import annotations

import shlex
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from colocert.judge import (
    EXPECTED,
    FAIL,
    NOT_APPLICABLE,
    NOT_CLAIMED,
    NOT_EXERCISED,
    NOT_RUN,
    PASS,
    Case,
    Judged,
    RuleOutcome,
    first_findings,
    narrowed_by,
)
from colocert.record.manifest import COMPLETE, Record
from colocert.report.peaks import Peaks
from colocert.report.peaks import rows as peak_rows
from colocert.report.transcript import Line, lines
from colocert.rules.catalogue import RUNNER_CODES, Rule, catalogue
from colocert.rules.fold import Finding
from colocert.trace import read_trace

WIDTH = 110
_LABEL = 12
_BEFORE, _AFTER = 20, 3
_OUTCOMES = (PASS, FAIL, EXPECTED, NOT_EXERCISED, NOT_RUN, NOT_APPLICABLE, NOT_CLAIMED)


class Styled(NamedTuple):
    """A line, and the markup to write it with: `red`, `green`, `yellow`, `bold` or nothing."""

    text: str
    style: str = ""

    @property
    def markup(self) -> dict[str, bool]:
        return {self.style: True} if self.style else {}


# ---- failure text


def failure_text(case: Case, record: Record, folder: Path) -> str:
    """Everything that a person needs about one failed case."""
    rule = catalogue()[case.rule]
    parts = [
        [f"{rule.id} ({rule.level}), {case.code}: {code_text(rule, case.code)}", ""],
        _labelled("rule", rule.sentence),
        _labelled("in a run", rule.breaks),
        ["", *_evidence(case, record, folder), ""],
        *([*_labelled("expected", f.expected), *_labelled("observed", f.observed)] for f in case.findings[:1]),
        _labelled("detail", case.detail),
        _also(case.findings),
        _labelled("fix", rule.fix),
        _labelled("seen", ", ".join(rule.seen)),
        _labelled("reproduce", reproduce(case, record), wrap=False),
        *([["", "scenario to paste", "", case.paste]] if case.paste else []),
    ]
    return "\n".join(line for part in parts for line in part)


def again_text(case: Case, first: str, record: Record) -> str:
    """The same for a case that fails like an earlier one, whose item is `first`: what differs, in a few lines."""
    rule = catalogue()[case.rule]
    parts = [
        [f"{rule.id} ({rule.level}), {case.code}: as in {first}", ""],
        _labelled("calls", " -> ".join(case.steps)),
        *([*_labelled("expected", f.expected), *_labelled("observed", f.observed)] for f in case.findings[:1]),
        _labelled("detail", case.detail),
        _labelled("reproduce", reproduce(case, record), wrap=False),
    ]
    return "\n".join(line for part in parts for line in part)


def code_text(rule: Rule, name: str) -> str:
    """What a code says went wrong."""
    return next((code.text for code in rule.codes if code.name == name), RUNNER_CODES.get(name, ""))


def reproduce(case: Case, record: Record) -> str:
    """One command that shows the case again."""
    words = [
        "pytest --pyargs colocert.suite",
        f"--impl={shlex.quote(record.impl)}",
        f"--profile={catalogue()[case.rule].profile}",
        *narrowed_by(record.options),
        f"-k {shlex.quote(f'{case.rule}[{case.scenario}]')}",
    ]
    return " ".join(words)


def _evidence(case: Case, record: Record, folder: Path) -> list[str]:
    sequence = _labelled("calls", " -> ".join(case.steps))
    if not case.trace:
        return sequence
    kept = next((s for s in record.scenarios if s.trace == case.trace), None)
    torn = kept is not None and kept.status != COMPLETE
    shown = list(lines(read_trace(folder / case.trace, allow_torn_tail=torn)))
    at = case.findings[0] if case.findings else None
    return [*sequence, *window(shown, at, case.scenario)]


def bounds(shown: Sequence[Line], at: Finding | None) -> tuple[int, int, int]:
    """What of a transcript shows a finding: the first line, the last, and the one of the event, as indexes.

    The call with the finding and the one before it, or the end of the transcript without a finding.
    """
    last = len(shown) - 1
    offending = last
    if at is not None:
        offending = next((i for i, line in enumerate(shown) if (line.rank, line.seq) == (at.rank, at.seq)), last)
    call = shown[offending].call if shown else 0
    begin = next((i for i, line in enumerate(shown) if line.call >= call - 1), 0)
    return max(0, begin, offending - _BEFORE), min(last, offending + _AFTER), offending


def window(shown: Sequence[Line], at: Finding | None, scenario: str) -> list[str]:
    """The lines within these bounds, the one with the finding marked."""
    begin, end, offending = bounds(shown, at)
    text = [f"transcript of {scenario}, lines {begin + 1} to {end + 1} of {len(shown)}"]
    for i in range(begin, end + 1):
        text.append(("  > " if i == offending and at is not None else "    ") + shown[i].text)
    return text


def _also(findings: tuple[Finding, ...]) -> list[str]:
    rest = Counter(f.code for f in findings[1:])
    if not rest:
        return []
    firsts = first_findings(findings[1:])
    return _labelled("further", "; ".join(f"{code} ({n}): {firsts[code].observed}" for code, n in rest.items()))


def _labelled(label: str, text: str, *, wrap: bool = True) -> list[str]:
    if not text:
        return []
    rows = textwrap.wrap(text, WIDTH - _LABEL, break_on_hyphens=False, break_long_words=False) if wrap else [text]
    return [f"{label if i == 0 else '':<{_LABEL}}{row}" for i, row in enumerate(rows)]


# ---- summary


def summary(judged: Judged, peaks: Sequence[Peaks] = ()) -> Iterator[Styled]:
    """The table of rules, the peaks of the hand-offs, then why the verdict is not better than it is."""
    rules = [r for r in judged.rules if r.profile in judged.profiles]
    if rules:
        yield Styled(f"{'rule':<8}{'level':<8}{'outcome':<16}{'exercised':>10}  {'scenario':<30}code or reason", "bold")
    for row in rules:
        yield Styled(_row(row), _style(row, judged.selection.level))
    yield from _peaks(peaks)
    for reason in judged.reasons:
        yield Styled(f"because: {reason}")


def _peaks(peaks: Sequence[Peaks]) -> Iterator[Styled]:
    """What each side held at most, one block a mode: when first, and what it was."""
    if peaks:
        yield Styled(f"{'peaks':<16}{'of':<10}{'on':<8}{'most':>9}  {'when':<52}what was in it", "bold")
    for mode, place, side, most, when, held in peak_rows(peaks):
        yield Styled(f"{mode:<16}{side:<10}{place:<8}{most:>9}  {when:<52}{held}".rstrip())


def _row(row: RuleOutcome) -> str:
    said = row.reason or (code_text(catalogue()[row.id], row.code) if row.code else "")
    note = ": ".join(part for part in (row.code, said) if part)
    times = str(row.exercised) if row.exercised else ""
    return f"{row.id:<8}{row.level:<8}{row.outcome:<16}{times:>10}  {row.scenario:<30}{note}".rstrip()


def _style(row: RuleOutcome, level: str) -> str:
    binds = row.level in ("must", level)
    if row.outcome == FAIL:
        return "red" if binds else "yellow"
    if row.outcome in (EXPECTED, NOT_EXERCISED, NOT_RUN):
        return "yellow"
    return "green" if row.outcome == PASS else ""


def verdict_line(judged: Judged) -> Styled:
    """The last line of a run."""
    if judged.record.problem is not None:
        return Styled(f"colocert: {judged.verdict}: {judged.record.problem.message}", "red")
    named = ", ".join(
        name if verdict == judged.verdict or len(judged.profiles) == 1 else f"{name}: {verdict}"
        for name, verdict in judged.profiles.items()
    )
    counts = Counter(r.outcome for r in judged.rules if r.profile in judged.profiles)
    rules = ", ".join(f"{counts[o]} {o}" for o in _OUTCOMES if counts[o])
    controls = Counter(c.outcome for c in judged.record.controls)
    ran = "; controls: " + ", ".join(f"{n} {outcome}" for outcome, n in sorted(controls.items())) if controls else ""
    style = {"conformant": "green", "partial": "green", "incomplete": "yellow"}.get(judged.verdict, "red")
    about = f"({named or 'no profile'}): {counts.total()} rules" + (f", {rules}" if rules else "")
    if judged.stale:
        ran += f"; known failures that are not so: {len(judged.stale)}, `colocert baseline` mends the list"
        style = "red"
    return Styled(f"colocert: {judged.verdict} {about}{ran}", style)

"""The difference between two recordings: their transcripts, scenario by scenario.

Knows evidence folders, certificates that name one, and unified differences. Does not judge: two recordings that differ
may both conform. Transcripts leave out what differs between two recordings of the same behaviour, so equal behaviour is
no difference.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from colocert.record.manifest import COMPLETE, EvidenceError, Record, read_record
from colocert.report.pages import render
from colocert.report.transcript import lines
from colocert.trace import read_trace

EQUAL, DIFFERS, ONLY_A, ONLY_B = "equal", "different", "only in A", "only in B"
CONTEXT = 3


class Side(NamedTuple):
    """One recording. `given` is what was named on the command line."""

    given: str
    folder: Path
    record: Record

    @property
    def name(self) -> str:
        return f"{self.record.name or self.record.impl} {self.record.version}".strip()

    def traces(self, profiles: tuple[str, ...]) -> dict[tuple[str, str], tuple[str, bool]]:
        """Profile and name of every trace: its path, and whether its end may be missing."""
        kept = {(s.profile, s.id): (s.trace, s.status != COMPLETE) for s in self.record.scenarios}
        for e in self.record.explorations:
            kept |= {(e.profile, Path(f.trace).stem): (f.trace, False) for f in e.findings}
        return {k: v for k, v in kept.items() if not profiles or k[0] in profiles}

    def endings(self) -> dict[tuple[str, str], str]:
        """How each scenario ended."""
        return {(s.profile, s.id): s.status for s in self.record.scenarios}


class Change(NamedTuple):
    """One scenario on both sides. `lines` are those of a unified difference, without its two file lines."""

    profile: str
    scenario: str
    status: str
    plus: int = 0
    minus: int = 0
    lines: tuple[str, ...] = ()


class Diff(NamedTuple):
    """Both sides and every scenario of either. `claims` are those that differ: name, of A, of B."""

    a: Side
    b: Side
    changes: tuple[Change, ...]
    claims: tuple[tuple[str, str, str], ...]

    @property
    def equal(self) -> bool:
        return all(c.status == EQUAL for c in self.changes)

    def count(self, status: str) -> int:
        return sum(c.status == status for c in self.changes)


def side(given: str) -> Side:
    """An evidence folder, or the folder that a certificate names. Raises `EvidenceError` in one line."""
    path = Path(given)
    if path.is_dir():
        return Side(given, path, _readable(read_record(path)))
    try:
        certificate = json.loads(path.read_text(encoding="utf-8"))
        named, of = str(certificate["run"]["evidence"]), str(certificate["implementation"]["name"])
    except OSError as error:
        wanted = f"{path} must be an evidence folder or a certificate"
        raise EvidenceError(f"{wanted} (got {error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        wanted = f"{path} must be an evidence folder or a certificate that names one"
        raise EvidenceError(f"{wanted} (got no `run.evidence` in it)") from error
    for folder in (Path(named), path.parent / Path(named).name):
        if (folder / "record.json").is_file():
            record = _readable(read_record(folder))
            if record.name != of:
                raise EvidenceError(
                    f"{folder} must hold the evidence of {of}, as {path} says (got that of {record.name})"
                )
            return Side(given, folder, record)
    raise EvidenceError(f"{path} names the evidence folder {named}, which must be there (got none)")


def _readable(record: Record) -> Record:
    if record.problem is not None:
        raise EvidenceError(f"{record.impl} was not recorded: {record.problem.message}")
    return record


def compare(a: Side, b: Side, profiles: tuple[str, ...] = ()) -> Diff:
    """Compares every scenario of both, in the order of A and then of B."""
    mine, theirs = a.traces(profiles), b.traces(profiles)
    both = dict.fromkeys((*mine, *theirs))
    changes = tuple(_change(a, b, key, mine.get(key), theirs.get(key)) for key in both)
    return Diff(a, b, changes, tuple(_claims(a.record.claims, b.record.claims)))


def _change(
    a: Side, b: Side, key: tuple[str, str], mine: tuple[str, bool] | None, theirs: tuple[str, bool] | None
) -> Change:
    if theirs is None:
        return Change(*key, ONLY_A)
    if mine is None:
        return Change(*key, ONLY_B)
    before = [*_text(a.folder, *mine), *_ending(a, key)]
    after = [*_text(b.folder, *theirs), *_ending(b, key)]
    found = tuple(difflib.unified_diff(before, after, lineterm="", n=CONTEXT))[2:]
    if not found:
        return Change(*key, EQUAL)
    plus, minus = (sum(line.startswith(sign) for line in found) for sign in "+-")
    return Change(*key, DIFFERS, plus, minus, found)


def _text(folder: Path, trace: str, torn: bool) -> list[str]:
    return [line.text for line in lines(read_trace(folder / trace, allow_torn_tail=torn))]


def _ending(one: Side, key: tuple[str, str]) -> list[str]:
    """A last line for a scenario that did not end."""
    status = one.endings().get(key, COMPLETE)
    return [] if status == COMPLETE else [f"({status})"]


def _claims(a: dict[str, Any], b: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name in sorted({*a, *b}):
        if a.get(name) != b.get(name):
            yield name, _value(a.get(name)), _value(b.get(name))


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return {True: "yes", False: "no", None: "not stated"}.get(value, str(value))


def page(found: Diff) -> str:
    """The difference as an HTML page."""
    return render("diff.html", diff=found, equal=EQUAL, differs=DIFFERS, only_a=ONLY_A, only_b=ONLY_B)

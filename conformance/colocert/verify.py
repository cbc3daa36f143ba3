"""Verification: a certificate against the evidence that it rests on, judged again on this machine.

Knows what of a certificate follows from evidence, and says each difference in a line. Does not know who wrote either,
and needs no implementation: only `explored_again` runs one.

What is taken from the certificate as given is what the evidence cannot say: which cases a person left out, and which
failures are listed as known. Everything else has to come out the same: the verdict, every rule, the counts, the
controls, and the bytes of the index and of every trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from colocert.expected import Expected
from colocert.judge import Evidence, Selection, judge, narrowed_by
from colocert.record.manifest import EvidenceError, ExplorationRecord, Record
from colocert.report.certificate import SCHEMA, certificate, digests
from colocert.report.peaks import highest_peaks
from colocert.report.transcript import of_scenario, transcript_path
from colocert.trace import TraceError

_SHORT = 80
_ELSEWHERE = ("colocert", "python", "platform")
"""Facts of the environment that another machine may have otherwise; the digests say whether it judges alike."""


class CertificateError(ValueError):
    """A file that is no certificate of this schema: what must hold and what was found."""


class _Chosen(msgspec.Struct):
    profiles: tuple[str, ...]
    level: str
    left_out: tuple[str, ...]
    narrowed: tuple[str, ...]
    expected: tuple[Expected, ...] = ()


class _Shape(msgspec.Struct):
    """What must be there for a certificate to be compared at all."""

    selection: _Chosen
    environment: dict[str, str]
    rules: list[dict[str, Any]]
    run: dict[str, Any]


def read_certificate(path: Path) -> dict[str, Any]:
    """A certificate as plain data. Raises `CertificateError` with one line."""
    try:
        loaded = json.loads(path.read_bytes())
    except OSError as error:
        raise CertificateError(f"{path} must be a certificate (got {error.strerror})") from error
    except ValueError as error:
        raise CertificateError(f"{path} must be a certificate, JSON (got {error})") from error
    found = loaded.get("schema") if isinstance(loaded, dict) else type(loaded).__name__
    if found != SCHEMA:
        raise CertificateError(f"{path} must be a certificate of schema {SCHEMA} (got {found})")
    try:
        msgspec.convert(loaded, _Shape)
    except msgspec.ValidationError as error:
        raise CertificateError(f"{path} must be a certificate of schema {SCHEMA} (got {error})") from error
    made: dict[str, Any] = loaded
    return made


def verify(stated: Mapping[str, Any], folder: Path) -> list[str]:
    """Every way in which the evidence does not give this certificate, a line each; none if they agree.

    Raises `EvidenceError` if the folder has no index at all.
    """
    if not (folder / "record.json").is_file():
        raise EvidenceError(f"{folder} must be an evidence folder (got no record.json in it)")
    try:
        evidence = Evidence(folder)
    except EvidenceError as error:
        return [str(error)]
    differences = [*_environment(stated), *_files(stated, evidence)]
    named = {line.partition(":")[0] for line in differences}
    try:
        cases = {f"{case.rule}[{case.scenario}]" for case in evidence.cases}
        differences += _transcripts(evidence)
    except TraceError as error:
        known = any(str(error.path).endswith(name) for name in named)
        return differences if known else [*differences, str(error)]
    chosen = msgspec.convert(stated, _Shape).selection
    differences += [f"selection.left_out: {c} must be a case of the evidence" for c in set(chosen.left_out) - cases]
    selection = Selection(
        profiles=chosen.profiles,
        level=chosen.level,
        left_out=chosen.left_out,
        narrowed=tuple(dict.fromkeys((*chosen.narrowed, *narrowed_by(evidence.record.options)))),
        expected=chosen.expected,
    )
    made = certificate(judge(evidence, selection), peaks=highest_peaks(evidence))
    found = json.loads(json.dumps(made))
    for key in [k for k in dict.fromkeys((*found, *stated)) if k not in ("environment", "run")]:
        differences += _compared(key, found.get(key, _ABSENT), stated.get(key, _ABSENT))
    return differences


def explored_again(record: Record, again: Record) -> list[str]:
    """Every way in which a second exploration does not give the counts and findings of the first, a line each."""
    if again.problem is not None:
        return [f"exploration must run again ({again.problem.message})"]
    differences: list[str] = []
    seconds = {e.id: e for e in again.explorations}
    for first in record.explorations:
        found = seconds.pop(first.id, None)
        if found is None:
            differences.append(f"{first.id} must be explored again (got nothing: the claims are others)")
            continue
        differences += _compared(first.id, _counts(found), _counts(first), "the second exploration", "the evidence")
    return [*differences, *(f"{name} must be in the evidence (got nothing)" for name in seconds)]


# ---- what is compared


def _environment(stated: Mapping[str, Any]) -> Iterator[str]:
    """Whether this installation judges by the same rules."""
    from colocert.report.certificate import environment

    here = environment()
    for key in ("catalogue", "suite"):
        if stated["environment"].get(key) != here[key]:
            theirs = stated["environment"].get("colocert", "")
            yield (
                f"environment.{key}: must be that of this installation, {here[key][:19]} of colocert "
                f"{here['colocert']} (got {str(stated['environment'].get(key))[:19]} of colocert {theirs})"
            )


def _files(stated: Mapping[str, Any], evidence: Evidence) -> Iterator[str]:
    """The index and the traces, byte by byte."""
    here = digests(evidence.folder, evidence.record)
    traces = stated["run"].get("traces")
    if not isinstance(traces, dict) or "record" not in stated["run"]:
        yield "run.traces and run.record: must hold the digests of the recording (got none): certify again"
        return
    if here["record"] != stated["run"]["record"]:
        yield _changed("record.json", stated["run"]["record"], here["record"])
    for name in sorted({*traces, *here["traces"]}):
        if name not in here["traces"]:
            yield f"{name}: must be in the index of the evidence (got none)"
        elif not here["traces"][name]:
            yield f"{name}: must be in the evidence folder (got no such file)"
        elif name not in traces:
            yield f"{name}: must be in the certificate (got no digest)"
        elif traces[name] != here["traces"][name]:
            yield _changed(name, traces[name], here["traces"][name])


def _changed(name: str, stated: Any, found: str) -> str:
    return f"{name}: must be as it was certified, {str(stated)[:19]} (got {found[:19]}): it was changed since"


def _transcripts(evidence: Evidence) -> Iterator[str]:
    """A transcript is written from its trace; where there is one, it says the same."""
    for kept in evidence.record.scenarios:
        path = transcript_path(evidence.folder, kept.profile, kept.trace)
        if path.is_file() and path.read_text(encoding="utf-8") != of_scenario(evidence.folder, kept):
            yield f"{path.relative_to(evidence.folder)}: must say what its trace says (got another text)"


def _counts(explored: ExplorationRecord) -> Any:
    facts = msgspec.to_builtins(explored)
    for name in ("id", "profile", "seconds"):
        del facts[name]
    facts["findings"] = {
        f"{f['rule']} {f['code']}": {"times": f["times"], "steps": f["steps"]} for f in facts["findings"]
    }
    return facts


_ABSENT = object()


def _compared(
    at: str, found: Any, stated: Any, here: str = "the evidence", there: str = "the certificate"
) -> Iterator[str]:
    """The leaves at which two structures differ. A list whose rows have an `id` is compared by it."""
    found, stated = _by_id(found), _by_id(stated)
    if isinstance(found, dict) and isinstance(stated, dict):
        for key in dict.fromkeys((*found, *stated)):
            yield from _compared(f"{at}.{key}", found.get(key, _ABSENT), stated.get(key, _ABSENT), here, there)
    elif found != stated or type(found) is not type(stated):
        yield f"{at}: must be {_shown(found)}, as {here} gives it (got {_shown(stated)} in {there})"


def _by_id(value: Any) -> Any:
    if isinstance(value, list) and value and all(isinstance(v, dict) and "id" in v for v in value):
        keyed = {str(v["id"]): v for v in value}
        return keyed if len(keyed) == len(value) else value
    return value


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHORT else text[: _SHORT - 2] + " …"

"""The certificate: a verdict as JSON, with everything it rests on.

Knows its shape (`certificate.schema.json` publishes it) and which facts are volatile: times, host, paths, versions of
test tools and the number of workers lie under `run`, and nothing else differs between two runs on the same evidence.
Does not know how a verdict is reached.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import msgspec

import colocert
from colocert.expected import facts
from colocert.judge import NOT_RUN, Judged
from colocert.record.manifest import Record
from colocert.report.peaks import Peaks
from colocert.report.peaks import facts as peak_facts
from colocert.rules.catalogue import catalogue, catalogue_digest

SCHEMA = "colocert-certificate/1"
_SUITE = ("expected.py", "judge.py", "record", "rig", "rules", "suite", "trace")
_TOOLS = ("msgspec", "pytest", "pytest-xdist", "syrupy")


def certificate(judged: Judged, run: Mapping[str, Any] | None = None, peaks: Sequence[Peaks] = ()) -> dict[str, Any]:
    """The certificate as plain data. `run` adds volatile facts: workers, evidence, started.

    `peaks` go to the hand-off profile: what each side held at most, when, and what was in it.
    """
    record = judged.record
    return {
        "schema": SCHEMA,
        "verdict": judged.verdict,
        "implementation": _implementation(record),
        "environment": environment(),
        "claims": record.claims,
        "profiles": {name: _profile(judged, name, peaks) for name in judged.profiles},
        "rules": list(_rules(judged)),
        "controls": [msgspec.to_builtins(control) for control in record.controls],
        "selection": _selection(judged),
        "run": {**_run(record), **(run or {})},
    }


def digests(folder: Path, record: Record) -> dict[str, Any]:
    """SHA-256 of the index and of every trace that a verdict rests on, for `run`; empty for a file that is missing."""
    traces = [kept.trace for kept in record.scenarios]
    traces += [found.trace for explored in record.explorations for found in explored.findings]
    return {
        "record": file_digest(folder / "record.json"),
        "traces": {trace: file_digest(folder / trace) for trace in sorted(traces)},
    }


def file_digest(path: Path) -> str:
    """A file's digest as certificates give it; empty if it cannot be read."""
    try:
        return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    except OSError:
        return ""


def encode(made: Mapping[str, Any]) -> str:
    """A certificate as text: keys sorted, one fact a line."""
    return json.dumps(made, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def write_certificate(path: Path, made: Mapping[str, Any]) -> None:
    """Writes a certificate, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(encode(made), encoding="utf-8")
    draft.replace(path)


def schema() -> dict[str, Any]:
    """The published JSON Schema of a certificate."""
    text = (resources.files("colocert.report") / "certificate.schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


@functools.cache
def suite_digest() -> str:
    """SHA-256 over the sources that record and judge: the same in a checkout and from a wheel."""
    digest = hashlib.sha256()
    root = Path(colocert.__file__).parent
    for path in sorted(_sources(root), key=lambda p: p.relative_to(root).as_posix()):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def environment() -> dict[str, str]:
    """What the verdict was reached with."""
    return {
        "colocert": colocert.__version__,
        "catalogue": f"sha256:{catalogue_digest()}",
        "suite": f"sha256:{suite_digest()}",
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def _sources(root: Path) -> Iterator[Path]:
    for name in _SUITE:
        place = root / name
        yield from [place] if place.is_file() else (p for p in place.rglob("*") if p.suffix in (".py", ".toml"))


def _implementation(record: Record) -> dict[str, Any]:
    problem = record.problem
    return {
        "name": record.name,
        "version": record.version,
        "problem": None if problem is None else {"stage": problem.stage, "message": problem.message},
    }


def _profile(judged: Judged, name: str, peaks: Sequence[Peaks]) -> dict[str, Any]:
    """A profile's verdict, and what it was recorded over: what lies in the evidence, less wall times."""
    record = judged.record
    explorations = [msgspec.to_builtins(e) for e in record.explorations if e.profile == name]
    for explored in explorations:
        del explored["profile"], explored["seconds"]
        for found in explored["findings"]:
            del found["paste"]
    return {
        "verdict": judged.profiles[name],
        "scenarios": {s.id: s.status for s in record.scenarios if s.profile == name},
        "explorations": explorations,
        **({"peaks": peak_facts(peaks)} if peaks and name == "handoff" else {}),
    }


def _rules(judged: Judged) -> Iterator[dict[str, Any]]:
    """A row for every rule of the catalogue, those that nothing was said about included."""
    known = {row.id: row for row in judged.rules}
    for rule in catalogue().values():
        row = known.get(rule.id)
        yield {
            "id": rule.id,
            "level": rule.level,
            "outcome": row.outcome if row else NOT_RUN,
            "code": row.code if row else "",
            "exercised": row.exercised if row else 0,
            "scenario": row.scenario if row else "",
            "evidence": row.evidence if row else "",
        }


def _selection(judged: Judged) -> dict[str, Any]:
    options, selection = judged.record.options, judged.selection
    return {
        "profiles": list(selection.profiles),
        "level": selection.level,
        "depth": options.depth,
        "faults": options.faults,
        "fault_depth": options.fault_depth,
        "left_out": sorted(selection.left_out),
        "narrowed": list(selection.narrowed),
        "expected": facts(selection.expected),
        "reasons": list(judged.reasons),
    }


def _run(record: Record) -> dict[str, Any]:
    return {
        "impl": record.impl,
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "recording_seconds": record.seconds,
        "host": socket.gethostname(),
        "folder": str(Path.cwd()),
        "packages": {name: _version(name) for name in _TOOLS},
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""

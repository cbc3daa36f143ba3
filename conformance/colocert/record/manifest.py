"""The index of an evidence folder: what was recorded, where it lies, and how each piece ended.

Knows the shape of `record.json`. Does not know how anything was recorded or what it means.

    EVIDENCE/record.json                     this index
    EVIDENCE/traces/PROFILE/SCENARIO.jsonl   a trace a scenario, and one for each sequence that exploration found
    EVIDENCE/transcripts/PROFILE/…           the same for people
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

RECORD_SCHEMA = 1
COMPLETE, HANG, DIED, NOT_RUN = "complete", "hang", "died", "not-run"


class EvidenceError(ValueError):
    """An evidence folder that cannot be judged: what must hold and what was found."""


class Problem(msgspec.Struct, frozen=True):
    """Why nothing could be recorded. `stage` is find, import, claims, factory or smoke; `exit_code` 4 or 11."""

    stage: str
    message: str
    exit_code: int


class ScenarioRecord(msgspec.Struct, frozen=True):
    """How a scenario ended: complete, hang, died, or not-run because this machine lacks something (`detail`).

    `trace` is relative to the folder; `seconds` wall time. `golden`: its transcript is compared under `--snapshot-dir`.
    """

    id: str
    profile: str
    status: str
    trace: str
    detail: str = ""
    seconds: float = 0.0
    golden: bool = True


class ExploredFinding(msgspec.Struct, frozen=True):
    """One rule and code that exploration found broken, with the shortest sequence that shows it."""

    rule: str
    code: str
    steps: tuple[str, ...]
    trace: str
    paste: str
    times: int = 1


class ExplorationRecord(msgspec.Struct, frozen=True):
    """What exploration covered. `sequences` counts call sequences without a fault, `faulted` those with one.

    `states` is the number of distinct states if sequences that reach the same state were merged, 0 if each was run.
    """

    id: str
    profile: str
    status: str
    depth: int = 0
    fault_depth: int = 0
    calls: tuple[str, ...] = ()
    sequences: int = 0
    faulted: int = 0
    states: int = 0
    runs: int = 0
    exercised: dict[str, dict[str, int]] = {}
    findings: tuple[ExploredFinding, ...] = ()
    detail: str = ""
    seconds: float = 0.0


class ControlRecord(msgspec.Struct, frozen=True):
    """One control: red as it must be, green if the suite did not find it out, or not-run (`detail` says why)."""

    name: str
    rule: str
    code: str
    outcome: str
    detail: str = ""


class Options(msgspec.Struct, frozen=True):
    """What was asked for. Depths of 0 mean no exploration.

    `fault_depth` is settled once the implementation is loaded; `asked_fault_depth` is what was asked for, 0 if nothing.
    """

    profiles: tuple[str, ...] = ()
    depth: int = 6
    faults: str = "single"
    fault_depth: int = 0
    workers: int = 1
    controls: bool = True
    asked_fault_depth: int = 0
    scenarios: bool = True


class Record(msgspec.Struct, frozen=True):
    """The index. `claimed` are the profiles whose factory exists."""

    impl: str
    options: Options
    name: str = ""
    version: str = ""
    claims: dict[str, Any] = {}
    claimed: tuple[str, ...] = ()
    problem: Problem | None = None
    scenarios: tuple[ScenarioRecord, ...] = ()
    explorations: tuple[ExplorationRecord, ...] = ()
    controls: tuple[ControlRecord, ...] = ()
    schema: int = RECORD_SCHEMA
    seconds: float = 0.0


def write_record(folder: Path, record: Record) -> None:
    """Writes the index, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / "record.json.part"
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    draft.replace(folder / "record.json")


def read_record(folder: Path) -> Record:
    """Reads the index. Raises `EvidenceError` naming the file and what is wrong with it."""
    path = folder / "record.json"
    try:
        record = msgspec.json.decode(path.read_bytes(), type=Record)
    except OSError as error:
        raise EvidenceError(f"{path} must be the index of an evidence folder (got {error.strerror})") from error
    except msgspec.MsgspecError as error:
        raise EvidenceError(f"{path} must be an index of schema {RECORD_SCHEMA} (got {error})") from error
    if record.schema != RECORD_SCHEMA:
        raise EvidenceError(f"{path} must be of schema {RECORD_SCHEMA} (got {record.schema})")
    return record

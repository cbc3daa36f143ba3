"""Evidence of two small recordings, made in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from colocert.judge import Evidence
from colocert.record.manifest import COMPLETE, Options, Record, ScenarioRecord, write_record
from colocert.record.registry import BY_ID
from colocert.record.registry import run as run_scenario
from colocert.trace import SCHEMA_VERSION, TraceWriter
from colocert.trace.events import Header
from colocert_reference.colocert_impl import Reference, ReferenceTrainer


class ReleasesAgain(ReferenceTrainer):
    def offload_grad_buffer(self) -> None:
        self.ports.memory.pause("grad_buffer")


def recorded(folder: Path, implementation: Any, impl: str, *scenarios: str) -> Evidence:
    """An evidence folder over a few scenarios, without exploration."""
    kept = []
    for name in scenarios:
        profile = BY_ID[name].profile
        trace = Path("traces") / profile / f"{name}.jsonl"
        writer = TraceWriter(folder / trace, Header(schema=SCHEMA_VERSION, scenario=name, profile=profile))
        run_scenario(implementation, implementation.claims, BY_ID[name], writer)
        writer.close()
        kept.append(ScenarioRecord(id=name, profile=profile, status=COMPLETE, trace=str(trace)))
    profiles = tuple(dict.fromkeys(s.profile for s in kept))
    record = Record(
        impl=impl,
        options=Options(profiles=profiles, depth=0),
        name=implementation.name,
        version=implementation.version,
        claims=implementation.claims.facts(),
        claimed=profiles,
        scenarios=tuple(kept),
    )
    write_record(folder, record)
    return Evidence(folder)


@pytest.fixture(scope="session")
def record_into() -> Callable[..., Evidence]:
    """`recorded`, for tests that need another implementation or other scenarios."""
    return recorded


@pytest.fixture
def conforming(tmp_path: Path) -> Evidence:
    return recorded(tmp_path, Reference(), "reference", "lora-cycle", "lora-early-release")


@pytest.fixture
def broken(tmp_path: Path) -> Evidence:
    return recorded(tmp_path, Reference(ReleasesAgain), "mypkg", "lora-cycle", "lora-early-release")


@pytest.fixture
def hung(tmp_path: Path, conforming: Evidence) -> Evidence:
    """The same, where the process hung in the second scenario, in the middle of a line."""
    record = conforming.record
    lost = msgspec.structs.replace(record.scenarios[1], status="hang", detail="no answer within 30 s")
    trace = tmp_path / lost.trace
    lines = trace.read_bytes().splitlines(keepends=True)
    trace.write_bytes(b"".join(lines[:40]) + lines[40][:20])
    write_record(tmp_path, msgspec.structs.replace(record, scenarios=(record.scenarios[0], lost)))
    return Evidence(tmp_path)

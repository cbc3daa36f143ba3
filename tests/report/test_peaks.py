"""The peaks of a hand-off on the reference: the host holds the larger copy in gpu-peak and both in cpu-peak."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from colocert.judge import Evidence, judge
from colocert.record.manifest import Options
from colocert.record.registry import BY_ID, run
from colocert.record.runner import record
from colocert.report.certificate import certificate, encode, schema
from colocert.report.peaks import BOTH, DEVICE, ENGINE, HOST, TRAINER, Peaks, highest_peaks, peaks_of, rows
from colocert.report.terminal import summary
from colocert.rig.contract import MIB, Claims
from colocert.trace import AnyEvent
from colocert_reference import colocert_impl

TRAINER_BACKUP = 2 * 76 * MIB
"""Two ranks: base, adapter and optimizer of the LoRA regions."""
MIRROR = 64 * MIB


def peaks(scenario: str) -> Peaks | None:
    events: list[AnyEvent] = []
    implementation = colocert_impl.implementation
    run(implementation, Claims.of(implementation.claims), BY_ID[scenario], events.append)
    return peaks_of(scenario, events)


def found(scenario: str) -> Peaks:
    those = peaks(scenario)
    assert those is not None
    return those


def test_the_host_holds_the_larger_copy_in_gpu_peak_and_both_in_cpu_peak() -> None:
    gpu, cpu = found("gpu-lora-three"), found("cpu-lora-three")
    assert gpu.of(BOTH, HOST).nbytes == max(TRAINER_BACKUP, MIRROR)
    assert cpu.of(BOTH, HOST).nbytes == TRAINER_BACKUP + MIRROR
    for one in (gpu, cpu):
        assert one.of(TRAINER, HOST).nbytes == TRAINER_BACKUP
        assert one.of(ENGINE, HOST).nbytes == MIRROR


def test_the_device_takes_the_overlap_in_gpu_peak() -> None:
    gpu, cpu = found("gpu-full-three").of(BOTH, DEVICE), found("cpu-full-three").of(BOTH, DEVICE)
    assert gpu.nbytes == cpu.nbytes + MIRROR
    assert ("engine", "weights", MIRROR) in gpu.contents
    assert {who for who, _, _ in cpu.contents} == {"trainer"}


def test_contents_add_up_and_say_when() -> None:
    for peak in found("gpu-full-three").peaks:
        assert peak.nbytes == sum(n for _, _, n in peak.contents) > 0
        assert peak.when.startswith(("rank ", "engine "))
        assert peak.seq > 0


def test_a_scenario_in_which_something_was_made_to_go_wrong_has_no_peaks() -> None:
    assert peaks("gpu-lora-fault-trainer-sleep") is None
    assert peaks("gpu-lora-dead-rank") is None


@pytest.fixture(scope="module")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    folder: Path = tmp_path_factory.mktemp("evidence")
    options = Options(profiles=("handoff",), depth=0, faults="none", controls=False)
    record("colocert_reference.colocert_impl", folder, options, None)
    return Evidence(folder)


def test_each_mode_is_in_the_summary_and_in_the_certificate(evidence: Evidence) -> None:
    highest = highest_peaks(evidence)
    assert {(p.mode, p.kind) for p in highest} == {(m, k) for m in ("gpu", "cpu") for k in ("lora", "full")}
    judged = judge(evidence)
    text = "\n".join(line.text for line in summary(judged, highest))
    assert all(held in text for *_, held in rows(highest))
    made = certificate(judged, peaks=highest)
    jsonschema.validate(json.loads(encode(made)), schema())
    assert len(made["profiles"]["handoff"]["peaks"]) == 4 * 6

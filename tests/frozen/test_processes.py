"""Processes of a frozen-offload scenario: how they end, what they are denied, and that their probe sees the truth."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from colocert.judge_trace import judge_events
from colocert.record import frozen_offload, frozen_process
from colocert.record.drive import NotRun, ProcessGone, TrainerShapeError
from colocert.record.frozen_disk import DiskNotHad
from colocert.record.frozen_process import FactoryRaised
from colocert.record.registry import BY_ID, run
from colocert.record.scenarios import Scenario
from colocert.rig.frozen_module import MIB, FakeDevice, fill, make, tensors
from colocert.rig.frozen_probe import HighWater, Probe
from colocert.rig.frozen_rig import FrozenConfig, FrozenRig
from colocert.rules.catalogue import catalogue
from colocert.trace import AnyEvent
from colocert.trace.events import CallRaise, Change, Fault, MemorySeen, Note, ProcessEnded, TensorsSeen
from colocert_fixtures.adversaries import inert
from colocert_reference.colocert_impl import CLAIMS, Reference
from colocert_reference.colocert_impl import implementation as reference

pytestmark = pytest.mark.torch
RULES = [rule for rule in catalogue().values() if rule.profile == "frozen-offload"]


class Does:
    """An offload that does this."""

    def __init__(self, offload: Callable[[], Any], backload: Callable[[], Any] = lambda: None) -> None:
        self.offload, self.backload = offload, backload


def does(offload: Callable[[], Any], backload: Callable[[], Any] = lambda: None) -> Reference:
    return Reference(offload=lambda rig: Does(offload, backload))


def record(implementation: Any, *steps: str, **config: Any) -> list[AnyEvent]:
    events: list[AnyEvent] = []
    scenario = Scenario("here", {"lora": True, **config}, steps, profile="frozen-offload")
    with contextlib.suppress(NotRun):
        run(implementation, CLAIMS, scenario, events.append)
    return events


def of(events: list[AnyEvent], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_an_error_is_a_fact_and_the_scenario_goes_on() -> None:
    events = record(does(lambda: 1 / 0), "start", "offload", "backload", "end")
    assert [(e.method, e.error) for e in of(events, CallRaise)] == [("offload", "ZeroDivisionError")]
    assert [e.when for e in of(events, TensorsSeen)] == ["built", "offload", "backload"]
    assert [e.how for e in of(events, ProcessEnded)] == ["normal"]


@pytest.mark.parametrize(
    ("ends", "how"),
    [(lambda: os.kill(os.getpid(), 11), "signal SIGSEGV"), (lambda: sys.exit(3), "exit 3"), (os.abort, "SIGABRT")],
)
def test_a_death_is_written_and_then_costs_the_scenario(ends: Callable[[], Any], how: str) -> None:
    events: list[AnyEvent] = []
    scenario = Scenario("here", {"lora": True}, ("start", "offload", "backload"), profile="frozen-offload")
    with pytest.raises(ProcessGone, match=how):
        run(does(ends), CLAIMS, scenario, events.append)
    (ended,) = of(events, ProcessEnded)
    assert how in ended.how
    assert ended.during == "offload"


def test_a_hang_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_process, "LONGEST", 0.3)
    with pytest.raises(ProcessGone, match="did not return"):
        record(does(lambda: time.sleep(60)), "start", "offload")


def test_a_factory_that_raises_or_returns_something_else_is_told() -> None:
    with pytest.raises(FactoryRaised, match="ZeroDivisionError"):
        record(Reference(offload=lambda rig: 1 / 0), "start")
    with pytest.raises(TrainerShapeError, match=r"offload\(\)"):
        record(Reference(offload=lambda rig: None), "start")


def test_a_factory_that_fails_on_a_read_only_folder_is_no_harness_error() -> None:
    made = Reference(offload=lambda rig: (rig.directory / "x").write_text("x"))
    assert [e.method for e in of(record(made, "start disk=read-only", "offload"), CallRaise)] == ["build"]


def test_without_a_mount_namespace_the_scenario_is_not_run_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise DiskNotHad("no mount namespace")

    monkeypatch.setattr("colocert.record.frozen_disk.own_mounts", refused)
    events = record(reference, "start disk=full:65536", "offload")
    assert [e.facts for e in of(events, Change) if e.what == "not-run"] == [{"reason": "no mount namespace"}]
    assert of(events, MemorySeen) == []


def test_without_torch_nothing_is_run_and_the_trace_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert [e.what for e in of(record(reference, "start"), Change)] == ["not-run"]


def test_a_process_that_is_killed_while_it_writes_was_in_the_call() -> None:
    events = record(reference, "start", "kill offload", "start", "offload", "backload", size="medium")
    assert [(e.how, e.during) for e in of(events, ProcessEnded)] == [("killed", "offload")]
    assert [e.point for e in of(events, Fault)] == ["process"]


def test_the_reference_says_where_it_fell_back_to_host_memory() -> None:
    events = record(reference, "start disk=limit:65536", "offload", "backload", "end")
    (note,) = of(events, Note)
    assert (note.op, note.statement) == ("fallback", True)
    assert of(events, CallRaise) == []


def test_a_second_offload_writes_nothing_and_the_first_all() -> None:
    events = record(reference, "start", "offload", "backload", "offload", "offload")
    first, _, again, repeated = of(events, MemorySeen)
    assert first.written >= 200_000
    assert (again.written, repeated.written) == (0, 0)


def test_no_rule_passes_on_an_inert_offload() -> None:
    """What it fails is all that it meets."""
    met: set[str] = set()
    failed: set[str] = set()
    for name in ("frozen-cycle", "frozen-host-memory", "frozen-full-cycle", "frozen-read-only-folder"):
        events: list[AnyEvent] = []
        run(inert.implementation, CLAIMS, BY_ID[name], events.append)
        judged = judge_events(events, RULES)
        met |= {rule for rule, counts in judged.exercised.items() if counts}
        failed |= {finding.rule for finding in judged.findings}
    assert met == failed == {"FO-01", "FO-04", "FO-11"}


# ---- the rig and its probe


@pytest.fixture
def rig(tmp_path: Path) -> FrozenRig:
    return FrozenRig(FrozenConfig(lora=True, regions={}), CLAIMS, lambda event: None, tmp_path, rank=0, values=1)


def test_the_module_has_what_is_easily_forgotten(rig: FrozenRig) -> None:
    known = {name: (kind, t) for name, kind, t in tensors(rig.made)}
    frozen = {name: t for name, (kind, t) in known.items() if kind == "frozen"}
    assert known["head.weight"][1] is known["embed.weight"][1]
    assert {t.dtype for t in frozen.values()} >= {torch.bfloat16, torch.float8_e4m3fn, torch.float32}
    assert {0, 1, 2} == {t.dim() for t in frozen.values()}
    assert any(t.numel() == 0 for t in frozen.values())
    assert any(not t.is_contiguous() for t in frozen.values())
    assert any("adapter" in name for name in frozen)
    assert any("adapter" not in name and "lora" not in name for name in rig.adapter_names)
    assert {kind for kind, _ in known.values()} == {"frozen", "adapter", "buffer", "fused"}


def test_values_are_bits_of_their_seed() -> None:
    def bits(values: int) -> list[bytes]:
        made = make(FakeDevice(), "small", lora=True, values=values)
        return [bytes(t.detach().contiguous().reshape(-1).view(torch.uint8).tolist()) for _, _, t in tensors(made)]

    assert bits(1) == bits(1) != bits(2)


def test_a_training_step_changes_adapters_only(rig: FrozenRig) -> None:
    probe = Probe(rig)
    probe.module([])
    before = probe.tensors("built").held
    fill(rig.made, 9, only="adapter")
    after = probe.tensors("changed").held
    assert {n for n in before if before[n] != after[n]} == {*rig.adapter_names, "fused.adapters"}


def test_device_memory_is_counted_until_it_is_emptied_or_forgotten() -> None:
    device = FakeDevice()
    one, two = device.empty(100), device.empty(50)
    assert (device.resident_bytes(), device.holds(one), device.holds(torch.empty(3))) == (150, True, False)
    view = one[10:20]
    one.untyped_storage().resize_(0)
    assert (device.resident_bytes(), device.holds(view)) == (50, False)
    del two
    assert device.resident_bytes() == 0


def test_places_are_told_by_where_the_bytes_are(rig: FrozenRig, tmp_path: Path) -> None:
    probe = Probe(rig)
    probe.module([])
    held, weight = rig.module, rig.module.layer.weight
    size, nbytes = weight.shape, weight.numel() * 4

    def place() -> str:
        return probe.tensors("offload").held["layer.weight"][0]

    assert place() == "device"
    weight.data = torch.zeros(size)
    assert place() == "host"
    weight.data = torch.from_file(str(tmp_path / "x"), shared=True, size=nbytes, dtype=torch.uint8).view(torch.float32)
    assert place() == "file"
    weight.data = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.float32)
    assert place() == "shared"
    weight.data = torch.empty(0)
    assert place() == "empty"
    assert probe.tensors("offload").held["layer.no_rows"][0] == "none"
    assert held is rig.module


def test_stores_into_a_mapping_and_writes_are_both_seen(rig: FrozenRig) -> None:
    probe = Probe(rig)
    with (rig.directory / "x").open("w+b") as file:
        file.truncate(MIB)
        mapped = mmap.mmap(file.fileno(), MIB)
        mapped[:] = b"x" * MIB
        probe.before()
        assert probe.after("offload").written == 0
        probe.before()
        mapped[: 1 << 16] = b"y" * (1 << 16)
        assert probe.after("offload").written >= 1 << 16
        probe.before()
        os.pwrite(file.fileno(), b"z" * 5000, 0)
        memory = probe.after("offload")
    assert (memory.written >= 5000, memory.file_bytes) == (True, MIB)
    assert memory.open_files == 2, "the mapping keeps a descriptor of its own"


def test_locked_and_private_pages_of_files_are_seen(rig: FrozenRig) -> None:
    probe = Probe(rig)
    with (rig.directory / "x").open("w+b") as file:
        file.truncate(1 << 16)
        private = mmap.mmap(file.fileno(), 1 << 16, mmap.MAP_PRIVATE)
        shared = mmap.mmap(file.fileno(), 1 << 16)
    probe.before()
    private[: 1 << 14] = b"x" * (1 << 14)
    address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
    assert ctypes.CDLL(None).mlock(ctypes.c_void_p(address), ctypes.c_size_t(1 << 13)) == 0
    memory = probe.after("offload")
    assert (memory.anonymous, memory.locked) == (1 << 14, 1 << 13)


def test_the_highest_use_counts_what_is_gone_again_and_not_the_devices() -> None:
    device = FakeDevice()
    kept = device.empty(24 * MIB).fill_(1)
    water = HighWater(device)
    gc.collect()  # what earlier tests of this process have left would go in between
    before = water.now()
    with water:
        copy = kept.clone()
        del copy
        more = device.empty(16 * MIB).fill_(1)
        del more
    assert 20 * MIB <= water.highest - before < 30 * MIB


def test_the_rigs_folder_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    record(reference, "start", "offload")
    assert list(tmp_path.iterdir()) == []
    assert frozen_offload.BEGUN < 6 * MIB

"""The preflight's checks, asked about machines that are not here: whole ones of each kind, and near misses."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from colocert.device import gather, preflight
from colocert.device.facts import Card, Driver, Facts, Host, Saver, Torch
from colocert.device.kinds import GIB, KINDS

LIBRARY = "torch_memory_saver_hook_mode_preload_cu13.abi3.so"
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
CARDS = {
    "h200": Card("NVIDIA H200", (9, 0), int(139.8 * GIB)),
    "b200": Card("NVIDIA B200", (10, 0), int(178.35 * GIB)),
    "b300": Card("NVIDIA B300 SXM6 AC", (10, 3), int(267.69 * GIB)),
    "gb300": Card("NVIDIA GB300", (10, 3), int(276.5 * GIB)),
}


def machine(kind: str, world: int = 1, *, card: dict[str, Any] | None = None, **changed: Any) -> Facts:
    """A machine on which everything holds, with changes: of its cards, or of any other group by name."""
    one = dataclasses.replace(CARDS[kind], **{"used": 200 << 20, "foreign": 0, "mig": False, **(card or {})})
    groups: dict[str, Any] = {
        "host": Host(arch=KINDS[kind].arch, page_size=4096, memlock=-1),
        "driver": Driver(0, version="580.95.05"),
        "torch": Torch("2.14.1+cu130", "13.0", ARCHS),
        "saver": Saver("0.0.10", LIBRARY, (64 << 20,) * world),
    }
    for name in groups:
        if name in changed:
            groups[name] = changed[name] and dataclasses.replace(groups[name], **changed[name])
    return Facts(cards=changed.get("cards", (one,) * world), **groups)


def failed(facts: Facts, kind: str, world: int = 1) -> list[str]:
    report = preflight.judge(facts, kind, world)
    assert report.ok == (not report.failed)
    assert "\n" not in report.line
    return [check.name for check in report.failed]


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_machine_of_each_kind_passes_as_itself_and_as_any(kind: str) -> None:
    assert failed(machine(kind, 4), kind, 4) == []
    assert failed(machine(kind, 4), "any", 4) == []


@pytest.mark.parametrize("asked", KINDS)
@pytest.mark.parametrize("found", KINDS)
def test_no_kind_passes_for_another(asked: str, found: str) -> None:
    assert failed(machine(found), asked) == ([] if asked == found else ["kind"])


class TestKind:
    @pytest.mark.parametrize(
        ("kind", "card"),
        [
            ("h200", {"name": "NVIDIA H100 80GB HBM3", "memory": int(79.1 * GIB)}),
            ("h200", {"name": "NVIDIA GH200 480GB", "memory": int(94.5 * GIB)}),
            ("h200", {"name": "NVIDIA GH200 144G HBM3e"}),
            ("h200", {"name": "NVIDIA H200 NVL"}),
            ("h200", {"name": "NVIDIA H200 MIG 1g.18gb", "memory": int(16.2 * GIB)}),
            ("h200", {"memory": int(70 * GIB)}),
            ("b200", {"name": "NVIDIA GB200"}),
            ("b200", {"memory": 192 * GIB}),
            ("b300", {"name": "NVIDIA GB300"}),
            ("b300", {"name": "NVIDIA B3000"}),
            ("b300", {"capability": (10, 0)}),
            ("b300", {"memory": int(276.5 * GIB)}),
            ("gb300", {"name": "NVIDIA B300 SXM6 AC"}),
            ("gb300", {"memory": int(252 * GIB)}),
        ],
    )
    def test_a_near_miss(self, kind: str, card: dict[str, Any]) -> None:
        assert "kind" in failed(machine(kind, card=card), kind)

    @pytest.mark.parametrize(("kind", "arch"), [("b300", "aarch64"), ("gb300", "x86_64"), ("h200", "aarch64")])
    def test_the_host_has_to_be_the_kinds(self, kind: str, arch: str) -> None:
        assert failed(machine(kind, host={"arch": arch}), kind) == ["kind"]

    def test_one_wrong_card_among_eight(self) -> None:
        cards = machine("b300", 8).cards
        other = machine("b200").cards
        assert failed(machine("b300", 8, cards=(*cards[:7], *other)), "b300", 8) == ["count", "kind"]

    def test_a_b300_may_carry_another_suffix(self) -> None:
        assert failed(machine("b300", card={"name": "NVIDIA B300 SXM6 LC"}), "b300") == []


class TestDriver:
    @pytest.mark.parametrize(("version", "ok"), [("579.99", False), ("580.65.06", True), ("610.1", True), ("", False)])
    def test_580_or_newer(self, version: str, ok: bool) -> None:
        assert failed(machine("b300", driver={"version": version}), "b300") == ([] if ok else ["driver"])

    @pytest.mark.parametrize("status", [None, 802, 999])
    def test_that_does_not_answer(self, status: int | None) -> None:
        assert failed(machine("b300", driver={"status": status}), "b300") == ["driver"]

    def test_802_is_asked_again_until_it_is_over(self) -> None:
        answers = iter([{"status": 802}] * 3 + [{"status": 0}])
        seen = gather.wait_for_driver(lambda: next(answers), *Clock().pair())
        assert (seen.status, seen.waited) == (0, 6.0)

    def test_802_is_given_two_minutes(self) -> None:
        seen = gather.wait_for_driver(lambda: {"status": 802}, *Clock().pair())
        assert (seen.status, seen.waited) == (802, 120.0)

    @pytest.mark.parametrize("answer", [{"status": None, "error": "no file"}, {"status": 999}, {"error": "hung"}])
    def test_any_other_answer_is_final(self, answer: dict[str, Any]) -> None:
        answers = iter([answer])
        seen = gather.wait_for_driver(lambda: next(answers), *Clock().pair())
        assert (seen.status, seen.said) == (answer.get("status"), answer.get("error", ""))


class Clock:
    """A clock that only a sleep moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def pair(self) -> tuple[Any, Any]:
        return lambda: self.now, self.sleep

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class TestCards:
    def test_too_few(self) -> None:
        assert failed(machine("b300", 4), "b300", 8) == ["count", "saver"]

    def test_more_than_asked_for(self) -> None:
        facts = machine("b300", 8)
        assert failed(dataclasses.replace(facts, saver=Saver("0.0.10", LIBRARY, (64 << 20,))), "b300", 1) == []

    @pytest.mark.parametrize("mig", [True, None])
    def test_mig_on_or_unknown(self, mig: bool | None) -> None:
        assert failed(machine("h200", card={"mig": mig}), "h200") == ["whole"]

    @pytest.mark.parametrize(
        ("card", "ok"),
        [
            ({"used": (1 << 30) - 1}, True),
            ({"used": 1 << 30}, False),
            ({"used": None}, False),
            ({"foreign": 1}, False),
            ({"foreign": None}, True),  # NVML cannot tell in a container without the host's pid namespace
        ],
    )
    def test_a_quiet_card(self, card: dict[str, Any], ok: bool) -> None:
        assert failed(machine("b300", card=card), "b300") == ([] if ok else ["quiet"])

    def test_a_noisy_neighbour_outside_of_the_world_is_nobodys_business(self) -> None:
        facts = machine("b300", 1)
        noisy = dataclasses.replace(facts.cards[0], foreign=3)
        assert failed(dataclasses.replace(facts, cards=(*facts.cards, noisy)), "b300", 1) == []


class TestTorch:
    @pytest.mark.parametrize(
        ("archs", "capability", "ok"),
        [
            (("sm_100",), (10, 3), True),
            (("sm_103",), (10, 3), True),
            (("sm_100f",), (10, 3), True),
            (("sm_100a",), (10, 3), False),
            (("sm_100a",), (10, 0), True),
            (("sm_103",), (10, 0), False),
            (("sm_90", "sm_120"), (10, 3), False),
            (("compute_100",), (10, 3), False),
            (("sm_90a",), (9, 0), True),
            (("sm_80", "sm_86"), (9, 0), False),
            ((), (9, 0), False),
        ],
    )
    def test_machine_code_that_runs_there(self, archs: tuple[str, ...], capability: tuple[int, int], ok: bool) -> None:
        assert preflight.runs(archs, capability) is ok

    @pytest.mark.parametrize(
        "torch",
        [
            {"cuda": "12.8"},
            {"cuda": ""},
            {"archs": ("sm_80", "sm_90")},  # the cu126 wheel on Blackwell
            {"matmul": "3 wrong values on device 0"},
            None,
        ],
    )
    def test_a_torch_that_will_not_do(self, torch: dict[str, Any] | None) -> None:
        assert failed(machine("b300", torch=torch), "b300") == ["torch"]


class TestSaver:
    @pytest.mark.parametrize(
        "saver",
        [
            {"version": "0.0.9.post1"},
            {"version": ""},
            {"library": "torch_memory_saver_hook_mode_preload_cu12.abi3.so"},
            {"freed": ()},
            {"freed": (0,)},
            {"freed": ((64 << 20) - 1,)},
            {"freed": ((66 << 20) + 1,)},
            {"said": "NoPreload: …"},
        ],
    )
    def test_a_saver_that_will_not_do(self, saver: dict[str, Any]) -> None:
        assert failed(machine("b300", saver=saver), "b300") == ["saver"]

    def test_every_device_is_probed(self) -> None:
        assert failed(machine("b300", 2, saver={"freed": (64 << 20, 0)}), "b300", 2) == ["saver"]


class TestAllocator:
    @pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
    @pytest.mark.parametrize(
        "value",
        [
            "expandable_segments:True",
            "expandable_segments: True",
            "a:1,Expandable_Segments : 1",
            "expandable_segments:0",
        ],
    )
    def test_no_spelling_of_expandable_segments_gets_through(self, name: str, value: str) -> None:
        facts = machine("b300", host={"allocator": {name: value}})
        assert failed(facts, "b300") == ["allocator"]
        assert name in preflight.judge(facts, "b300", 1).line

    def test_another_setting_is_nobodys_business(self) -> None:
        assert failed(machine("b300", host={"allocator": {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}}), "b300") == []


class TestHost:
    @pytest.mark.parametrize(("memlock", "ok"), [(-1, True), (9 << 30, True), (8 << 20, False)])
    def test_enough_may_be_pinned(self, memlock: int, ok: bool) -> None:
        assert failed(machine("b300", host={"memlock": memlock}), "b300") == ([] if ok else ["host"])

    def test_a_limit_that_the_driver_does_not_count_against_is_none(self) -> None:
        memlock = 8 << 20
        tried = gather.past_the_limit(memlock)
        assert tried > memlock
        assert failed(machine("b300", host={"memlock": memlock}, saver={"pinned": tried}), "b300") == []
        assert [gather.past_the_limit(limit) for limit in (-1, gather.PINNED_NEED)] == [0, 0]

    def test_pages_and_the_coherent_mode_of_grace_are_recorded(self) -> None:
        facts = machine("gb300", host={"page_size": 65536, "coherent": "driver", "hbm_nodes": 2})
        (line,) = [check.line for check in preflight.judge(facts, "gb300", 1).checks if check.name == "host"]
        assert "pages of 64 KiB, coherent mode driver, 2 NUMA nodes of device memory" in line

    def test_the_stand_in_does_without(self) -> None:
        facts = machine("b300", host={"memlock": 8 << 20}, saver={"freed": (64 << 20,)})
        assert failed(facts, "host") == []


def test_files_of_the_driver_are_read(tmp_path: Path) -> None:
    (tmp_path / "params").write_text('EnableMSI: 1\nCoherentGPUMemoryMode: "driver"\n')
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release\n")
    for number, (cpus, memory) in enumerate([("0-71", 400), ("", 270), ("", 0)]):
        node = tmp_path / f"node{number}"
        node.mkdir()
        (node / "cpulist").write_text(f"{cpus}\n")
        (node / "meminfo").write_text(f"Node {number} MemTotal:       {memory} kB\n")
    assert gather._parameter("CoherentGPUMemoryMode", tmp_path / "params") == "driver"
    assert gather._parameter("CoherentGPUMemoryMode", tmp_path / "absent") == ""
    assert gather._driver_version(tmp_path / "version") == "580.95.05"
    assert gather._nodes_without_cpus(tmp_path) == 1


class Nvml:
    """NVML with one card and two processes, which refuses what `refused` names."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):  # noqa: N801  (NVML's name)
        pass

    nvmlMemory_v2 = 2  # noqa: N815  (NVML's name)

    def __init__(self, *refused: str, error: type[NVMLError] = NVMLError) -> None:
        self.refused, self.error = refused, error

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if name in self.refused:
                raise self.error(name)
            return {
                "nvmlDeviceGetHandleByUUID": arguments[0],
                "nvmlDeviceGetMemoryInfo": type("", (), {"used": 5}),
                "nvmlDeviceGetComputeRunningProcesses": [type("", (), {"pid": pid}) for pid in (os.getpid(), 1)],
                "nvmlDeviceGetMigMode": (1, 0),
            }[name]

        return call


def test_nvml_is_asked_and_may_refuse() -> None:
    assert gather._ask_nvml(Nvml(), "abc") == {"used": 5, "foreign": 1, "mig": True}
    assert gather._ask_nvml(Nvml("nvmlDeviceGetHandleByUUID"), "abc") == {}
    assert gather._ask_nvml(Nvml("nvmlDeviceGetComputeRunningProcesses"), "abc")["foreign"] is None
    assert gather._ask_nvml(Nvml("nvmlDeviceGetMigMode"), "abc")["mig"] is None
    unsupported = Nvml("nvmlDeviceGetMigMode", error=Nvml.NVMLError_NotSupported)
    assert gather._ask_nvml(unsupported, "abc")["mig"] is False


@pytest.fixture(scope="module")
def without_gpu() -> None:
    if gather._child("init", 60).get("status") == 0:
        pytest.skip("this machine has a GPU")


class TestCommand:
    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "colocert.preflight", *arguments]
        return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=300)

    @pytest.mark.usefixtures("without_gpu")
    @pytest.mark.parametrize("kind", [*KINDS, "any"])
    def test_without_a_gpu_it_fails_and_the_last_line_says_so(self, kind: str, tmp_path: Path) -> None:
        found = self.run("--kind", kind, "--world", "2", "--json", str(tmp_path / "seen.json"))
        assert found.returncode == 1
        assert found.stderr.startswith(f"preflight: 2 x {'a GPU' if kind == 'any' else kind} must be here: driver: ")
        assert len(found.stderr.splitlines()) == 1
        written = json.loads((tmp_path / "seen.json").read_text())
        assert (written["ok"], written["facts"]["cards"]) == (False, [])

    def test_the_stand_in_of_this_machine(self, tmp_path: Path) -> None:
        pytest.importorskip("torch_memory_saver")
        found = self.run("--kind", "host", COLOCERT_REPORT_DIR=str(tmp_path))
        assert found.returncode == 0, found.stdout + found.stderr
        assert "freed 64 MiB" in found.stdout
        assert json.loads((tmp_path / "preflight-host-w1.json").read_text())["facts"]["saver"]["freed"] == [64 << 20]

    def test_the_stand_in_with_expandable_segments(self) -> None:
        found = self.run("--kind", "host", PYTORCH_ALLOC_CONF="expandable_segments: True")
        assert found.returncode == 1
        assert "allocator: " in found.stderr

    @pytest.mark.parametrize("arguments", [["--kind", "b3000"], ["--kind", "b300", "--world", "0"], []])
    def test_a_wrong_question(self, arguments: list[str]) -> None:
        assert self.run(*arguments).returncode == 2

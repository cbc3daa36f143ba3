"""What the rows do on a GPU, as far as it can be told without one: NVML, the probe and the ranks are doubles."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from colocert.device import Machine, NothingFreed, probe, tensors
from colocert.device.hook import GRANULE, Hook
from colocert.device.machine import DEVICE_ORDER
from colocert.device.ports import Block, CudaDevice
from gpu_tests import test_calibration
from gpu_tests.harness import exclusive
from gpu_tests.harness.port import Port
from gpu_tests.scenarios import g02

MIB = 1 << 20
UUIDS = ("GPU-1f2e0000-0000-0000-0000-000000000000", "GPU-3d4c0000-0000-0000-0000-000000000000")


class Nvml:
    """Two devices with the driver's reserve on each, as NVML counts them: with it in version 1, without in 2."""

    nvmlMemory_v2 = 2

    class NVMLError(Exception):
        """NVML's."""

    def __init__(self, reserve: int = 950 * MIB, used: tuple[int, int] = (0, 0), pids: Any = ([], [])) -> None:
        self.reserve, self.used, self.pids = reserve, used, pids

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(UUIDS)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= len(UUIDS):
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetUUID(self, card: int) -> str:
        return UUIDS[card]

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        raise self.NVMLError("Not Found")

    def nvmlDeviceGetComputeRunningProcesses(self, card: int) -> list[Any]:
        if self.pids is None:
            raise self.NVMLError("Not Supported")
        return [SimpleNamespace(pid=pid) for pid in self.pids[card]]

    def nvmlDeviceGetMemoryInfo(self, card: int, version: int | None = None) -> Any:
        return SimpleNamespace(used=self.used[card] + (0 if version == self.nvmlMemory_v2 else self.reserve))


Who = Callable[..., str]


@pytest.fixture
def who(monkeypatch: pytest.MonkeyPatch) -> Who:
    """Who is on the GPU, of an NVML and the environment of a run."""

    def ask(nvml: Nvml, world: int = 1, visible: str | None = None) -> str:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
        monkeypatch.setenv("COLOCERT_WORLD", str(world))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return exclusive.foreign(Machine("cuda"), patience=0.0)

    return ask


class TestExclusive:
    def test_the_drivers_own_reserve_is_nobodys(self, who: Who) -> None:
        assert who(Nvml(used=(100 * MIB, 0))) == ""

    def test_bytes_in_use_and_processes_are_somebodys(self, who: Who) -> None:
        assert who(Nvml(used=(2048 * MIB, 0)))
        assert "[7]" in who(Nvml(pids=([7], [])))

    def test_every_device_of_the_world_counts_and_no_other(self, who: Who) -> None:
        busy = Nvml(pids=([], [7]))
        assert who(busy, world=1) == ""
        assert who(busy, world=2)

    @pytest.mark.parametrize("visible", ["1", "1,0", UUIDS[1], UUIDS[1][:8]])
    def test_a_device_is_found_by_number_uuid_and_shortened_uuid(self, who: Who, visible: str) -> None:
        assert who(Nvml(pids=([], [7])), visible=visible)
        assert who(Nvml(pids=([7], [])), visible=visible) == ""

    def test_hidden_processes_leave_the_bytes_to_tell(self, who: Who) -> None:
        assert who(Nvml(pids=None)) == ""
        assert who(Nvml(pids=None, used=(2048 * MIB, 0)))

    def test_a_device_that_nvml_does_not_know_is_said(self, who: Who) -> None:
        assert "NVML does not say" in who(Nvml(), visible="5")


class Counted:
    """A hook on a device of which another process takes 512 MiB during the first counts."""

    def __init__(self, disturbed: int) -> None:
        self.left, self.disturbed, self.live, self.freed = 4096 * MIB, disturbed, 0, 0

    def free_bytes(self) -> int:
        return self.left

    def region(self, tag: str, backup: bool) -> Any:
        return contextlib.nullcontext()

    def malloc(self, nbytes: int) -> int:
        self.live += 1
        self.left -= nbytes
        return 1

    def free(self, address: int) -> None:
        self.freed += 1
        self.left += probe.PROBE_BYTES

    def pause(self, tag: str) -> None:
        self.left += probe.PROBE_BYTES
        if self.live <= self.disturbed:
            self.left -= 512 * MIB

    def resume(self, tag: str) -> None:
        self.left -= probe.PROBE_BYTES


class TestProbe:
    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(probe, "PAUSE", 0.0)

    def test_a_count_that_another_process_disturbed_is_taken_again(self) -> None:
        hook: Any = Counted(disturbed=2)
        probe._patiently(hook, hook.free_bytes, retries=3)
        assert (hook.live, hook.freed) == (3, 3)

    def test_a_pause_that_never_frees_is_an_error_after_the_last(self) -> None:
        hook: Any = Counted(disturbed=9)
        with pytest.raises(NothingFreed):
            probe._patiently(hook, hook.free_bytes, retries=3)
        assert (hook.live, hook.freed) == (4, 4)

    def test_a_device_that_is_not_there_is_said(self) -> None:
        hook = Hook.__new__(Hook)
        hook.runtime = SimpleNamespace(  # type: ignore[assignment]
            cudaSetDevice=lambda index: 101, cudaGetErrorString=lambda status: b"invalid device ordinal"
        )
        with pytest.raises(RuntimeError, match=r"cudaSetDevice\(3\) returned 101 \(invalid device ordinal\)"):
            hook.set_device(3)


@pytest.mark.usefixtures("needs_the_saver")
def test_cuda_counts_devices_as_nvml_does() -> None:
    assert Machine("cuda").environment()["CUDA_DEVICE_ORDER"] == DEVICE_ORDER
    assert "CUDA_DEVICE_ORDER" not in Machine("host", libraries=Machine().libraries).environment()


def test_the_granules_of_small_raw_blocks_are_more_than_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a pause that frees nothing of them would pass."""
    monkeypatch.setenv("COLOCERT_KIND", "any")
    port = Port(SimpleNamespace(device=SimpleNamespace(name="cuda")))  # type: ignore[arg-type]
    copies = g02.COPIES["cuda"]
    assert port.tolerance([Block("raw", True, nbytes, 1) for nbytes in g02.RAW[:1] * copies]) < copies * GRANULE
    tensor: Any = object()
    assert port.tolerance([Block("default", False, 1, 1, tensor)]) == port.tolerance([]) + GRANULE


def test_the_spread_of_groups_is_one_of_rounds_and_not_of_devices() -> None:
    """A rank holds more than another; its rounds are alike."""
    ranks = [
        {"start": base, "down": [base - 9, base - 5, base - 3], "up": [base - 90, base - 52, base - 50]}
        for base in (1_000, 900)
    ]
    waiting = iter(ranks)
    ended = SimpleNamespace(wait=lambda: SimpleNamespace(expect=lambda: next(waiting)))
    row: Any = SimpleNamespace(folder="", start=lambda *_, **__: ended)
    assert test_calibration.groups(row) == {"bytes": 47, "leftover": 3, "spread": 2}


@pytest.mark.torch
def test_the_saver_is_started_at_its_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body may import megatron-core first, whose import sets the saver's mode and fails once it is in use."""
    torch = pytest.importorskip("torch")
    chosen: list[int] = []
    started: list[str] = []

    def start(name: str) -> Any:
        started.append(name)
        return SimpleNamespace(pause=lambda tag: None)

    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(tensors, "start", start)
    hook: Any = None
    device = CudaDevice(hook)
    assert (chosen, started) == ([3], [])
    device.pause("default")
    device.pause("default")
    assert started == ["cuda"]

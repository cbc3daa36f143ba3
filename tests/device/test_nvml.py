"""Device bytes by process, as NVML tells them of one device. NVML itself is a double: it needs a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from colocert.device.ports import nvml_processes


class Missing(Exception):
    """What NVML raises."""


def nvml(**cards: list[tuple[int, int | None]]) -> Any:
    """NVML of these devices: by the end of the UUID, pids and bytes."""

    def by_uuid(uuid: str) -> Any:
        if uuid.removeprefix("GPU-") not in cards:
            raise Missing(uuid)
        return cards[uuid.removeprefix("GPU-")]

    return SimpleNamespace(
        NVMLError=Missing,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetComputeRunningProcesses=lambda card: [
            SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in card
        ],
    )


def test_the_processes_are_those_of_the_device_with_that_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """With or without NVML's prefix; one whose bytes are hidden is left out."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml(one=[(11, 1 << 30)], two=[(12, 2 << 30), (13, None)]))
    assert nvml_processes("two") == nvml_processes("GPU-two") == {12: 2 << 30}
    assert nvml_processes("one") == {11: 1 << 30}


def test_nothing_is_known_of_a_device_that_nvml_does_not_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(one=[(11, 1)]))
    assert nvml_processes("other") == {}


def test_nothing_is_known_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml_processes("one") == {}

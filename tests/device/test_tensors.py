"""Torch tensors in the saver's memory, without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("torch_memory_saver")
pytest.importorskip("torch")

from colocert.device import Machine, run

from . import scenarios

MIB = 1 << 20
pytestmark = pytest.mark.torch


def test_factories_in_a_region_are_placed_paused_and_restored() -> None:
    seen = run(scenarios.tensors_round_trip).expect()
    assert seen["gradients"] == 2 * MIB
    assert seen["held"] % (2 * MIB) == 0
    assert seen["held"] >= 7 * 2 * MIB
    assert seen["asleep"] == 0
    assert seen["same"]
    assert seen["addresses"]
    assert seen["poison"] == [0xDB]
    assert seen["strides"] == [60, 1, 15, 3]
    assert seen["requires_grad"] == [True, True, False]
    assert seen["shared"]
    assert seen["outside"]
    assert seen["after"] == 0  # with the last reference to a tensor its memory goes


def test_a_tensor_that_does_not_fit_raises_as_on_a_gpu() -> None:
    said = run(scenarios.tensors_out_of_memory, machine=Machine(capacity=64 * MIB)).expect()
    assert "bytes are free" in said

"""A reader's first hour, done by a program; and the invented trainer is a trainer."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
def test_from_an_empty_folder_to_a_verdict_and_a_job(tmp_path: Path) -> None:
    """All that `docs/tutorial.md` says, with a wheel in a fresh environment."""
    done = subprocess.run(
        [sys.executable, str(HERE / "walk.py"), str(tmp_path / "hour")], capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [line.split(" s  ", 1)[1] for line in done.stdout.splitlines()]
    assert steps[-1] == "the action's step: conformant"
    assert sum(step.startswith("colocert certify ") for step in steps) == 5


class Pages:
    """A saver whose memory without a backup comes back as not a number."""

    def __init__(self) -> None:
        self.lost: list[Any] = []

    def region(self, **arguments: Any) -> Any:
        return nullcontext()

    def pause(self, tag: str) -> None: ...

    def resume(self, tag: str) -> None:
        for tensor in self.lost if tag == "grad_buffer" else ():
            tensor.fill_(math.nan)

    def get_cpu_backup(self, tensor: Any) -> Any:
        return tensor


@pytest.fixture
def invented(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The trainer's modules over `Pages`; with `request.param` the faults are mended first."""
    pytest.importorskip("torch")
    folder = HERE / "inventedtrainer"
    if request.param == "mended":
        folder = request.getfixturevalue("tmp_path")
        subprocess.run(["cp", "-r", str(HERE / "inventedtrainer" / "inventedtrainer"), str(folder)], check=True)
        subprocess.run(["cp", str(HERE / "colocert_impl.py"), str(folder / "inventedtrainer")], check=True)
        with (HERE / "fix.patch").open() as patch:
            subprocess.run(["patch", "-s", "-p1"], stdin=patch, cwd=folder, check=True)
    stand_in = ModuleType("torch_memory_saver")
    stand_in.torch_memory_saver = Pages()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_memory_saver", stand_in)
    monkeypatch.syspath_prepend(str(folder))
    from inventedtrainer import learner, policy

    yield SimpleNamespace(learner=learner, policy=policy, saver=stand_in.torch_memory_saver)
    for name in [name for name in sys.modules if name.partition(".")[0] == "inventedtrainer"]:
        del sys.modules[name]


def losses(invented: Any) -> tuple[list[float], Any]:
    """Of two epochs with a hand-off in between, and what the engine was given last."""
    import torch

    made = torch.Generator().manual_seed(1)
    taken: list[tuple[Any, int]] = []
    policy = invented.policy.Policy(device="cpu")
    invented.saver.lost = [policy.gradients]
    learner = invented.learner.Learner(policy, SimpleNamespace(take_adapter=lambda *given: taken.append(given)))
    inputs = torch.randn(64, 16, generator=made)
    batch = (inputs, inputs @ (policy.base + 0.3 * torch.outer(inputs[0], inputs[1]) / 4).T)
    found = learner.learn([batch] * 150)
    learner.switch(invented.learner.Side.GENERATE)
    learner.publish()
    found += learner.learn([batch] * 150)
    return found, taken


@pytest.mark.torch
@pytest.mark.parametrize("invented", ["mended"], indirect=True)
def test_the_mended_trainer_learns_across_a_hand_off(invented: Any) -> None:
    found, taken = losses(invented)
    assert found[-1] < found[150] < found[0] / 2
    ((adapter, version),) = taken
    assert version == 1
    assert adapter["lora_B.weight"].abs().max() > 0


@pytest.mark.torch
@pytest.mark.parametrize("invented", ["as it is"], indirect=True)
def test_the_fault_that_the_suite_finds_ruins_a_real_run(invented: Any) -> None:
    """LC-12: gradients come back as whatever the pages held, and training goes on with it."""
    found, _ = losses(invented)
    assert all(map(math.isfinite, found[:151]))
    assert math.isnan(found[151])

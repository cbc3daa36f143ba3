"""The RL loop of the reference pair, for real on the stand-in device: it learns, and says so when it cannot.

Trainer: megatron-core. Engine: transformers with peft. Each in a process of its own under the real saver.
"""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from colocert_reference.real.loop import (
    MODEL,
    Iteration,
    LearningPair,
    LoopSettings,
    NoCheckpoint,
    reward_of,
)
from colocert_reference.real.pair import MIB, Sample
from colocert_reference.real.processes import PairError, ProcessDied

from .children import needs

if TYPE_CHECKING:
    from colocert_reference.real.ray_sides import RaySide

real = needs("torch", "megatron.core", "torch_memory_saver", "transformers", "peft", "safetensors")
under_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")
DEADLINE = 60.0
SMALL = {"prompts": 2, "samples": 8, "tokens": 6}
"""Fewer rollouts, for what is not about learning."""


def real_test(test: Any) -> Any:
    for mark in reversed(real):
        test = mark(test)
    return test


def run(iterations: int, settings: LoopSettings, **more: Any) -> tuple[list[Iteration], list[Sample], dict[str, Any]]:
    with LearningPair(settings, peak_device=more.pop("peak_device", "gpu"), **more) as pair:
        pair.run(iterations)
        facts = {"engine": pair.engine.call("facts"), "trainer": pair.trainer.call("facts"), "sent": pair.sent_bytes()}
        return pair.iterations, pair.samples, {**facts, "free": pair.device.free(), "capacity": settings.capacity}


def test_the_reward_is_the_share_of_lower_case_letters() -> None:
    assert reward_of(b"abcz") == 1.0
    assert reward_of(b"aB3\xff") == 0.25
    assert reward_of(list(range(256))) == 26 / 256


# ---- it learns


def quarters(iterations: list[Iteration]) -> tuple[float, float, float]:
    """The means of the first and of the last quarter, and the standard error of their difference."""
    n = len(iterations) // 4
    first, last = iterations[:n], iterations[-n:]
    error = math.sqrt(sum(i.spread**2 / i.rollouts for i in first + last)) / n
    return sum(i.reward for i in first) / n, sum(i.reward for i in last) / n, error


ITERATIONS = 12
MARGIN = 6.0
"""Standard errors of the difference of two quarters (of 3 iterations with 96 rollouts each).

What a run that does not learn does by chance stays below 6 in all but one of some 10^9 pairs of quarters; the prompts,
which are drawn anew for each iteration, and whose rewards differ a little, take some of that room.
"""


@real_test
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_reward_rises_and_does_not_where_a_sync_is_only_acknowledged(seed: int) -> None:
    """Same seed, same base, same prompts; without the tolerance that would end the broken run in its second step."""
    from colocert_fixtures.loop_defects import DEFECTS

    settings = LoopSettings(seed=seed)
    learned, _, facts = run(ITERATIONS, settings)
    first, last, error = quarters(learned)
    assert last - first > MARGIN * error, (first, last, error)
    assert max(i.gap for i in learned) < settings.tolerance
    assert [i.version for i in learned] == list(range(1, ITERATIONS + 1))
    assert facts["engine"]["adapters"] == {"policy": ITERATIONS + 1}

    broken = DEFECTS["sync-only-acknowledged"]
    stuck, _, facts = run(ITERATIONS, replace(settings, tolerance=math.inf), **broken.arguments())
    assert facts["engine"]["adapters"] == {"policy": ITERATIONS + 1}  # the versions say that all is well
    first, last, error = quarters(stuck)
    assert last - first < MARGIN * error, (first, last, error)
    assert stuck[0].reward == learned[0].reward
    assert max(i.gap for i in stuck[1:]) > settings.tolerance


@real_test
def test_each_defect_is_red_and_says_which() -> None:
    """Within two iterations."""
    from colocert_fixtures.loop_defects import DEFECTS

    for name, defect in DEFECTS.items():
        settings = LoopSettings(**{**SMALL, **defect.settings})
        error: PairError | None = None
        try:
            run(2, settings, **defect.arguments())
        except PairError as raised:
            error = raised
        kind, _, inner = defect.raises.partition(" ")
        assert error is not None, name
        assert type(error).__name__ == kind, (name, error)
        assert getattr(error, "error", "") == inner, (name, error)
        assert defect.says in str(error), (name, error)


# ---- both modes, Ray, resume


@pytest.fixture(scope="module")
def whole() -> tuple[list[Iteration], list[Sample], dict[str, Any]]:
    """Four iterations in one go."""
    return run(4, LoopSettings(**SMALL))


@real_test
def test_what_each_side_holds_at_each_step(whole: Any) -> None:
    """The wall of gpu-peak; bytes by tag; an adapter-only sync but for the first; nothing left at the end."""
    iterations, samples, facts = whole
    capacity = facts["capacity"]
    largest = {
        (side, tag): max(s.tags[side].get(tag, 0) for s in samples)
        for side, tags in (("trainer", ("default", "grad_buffer", "communicators")), ("engine", ("weights",)))
        for tag in tags
    }
    both = largest["trainer", "default"] + largest["engine", "weights"]
    grads, groups = largest["trainer", "grad_buffer"], largest["trainer", "communicators"]
    assert both + max(grads, groups) < capacity < both + grads + groups
    for sample in samples:
        for side in ("trainer", "engine"):
            assert sum(sample.tags[side].values()) == sample.device[side], sample
            assert sum(sample.host_tags[side].values()) == sample.host[side], sample
        assert sample.free == capacity - sample.on_device
        if sample.phase == "rollout":
            assert sample.device["trainer"] == 0
        assert not (sample.host["trainer"] and sample.host["engine"])
    assert len(facts["sent"]["base"]) == 1
    adapter = sum(facts["trainer"]["sent"][-1]["tensors"].values())
    assert facts["sent"]["adapter"] == [adapter] * 5
    assert {sent["kind"] for sent in facts["trainer"]["sent"][1:]} == {"adapter"}
    assert facts["engine"]["released"] == []
    assert facts["trainer"]["believed"] == {"default": True, "grad_buffer": True}
    assert len(iterations) == 4


@real_test
def test_cpu_peak_learns_the_same(whole: Any) -> None:
    iterations, samples, _ = run(2, LoopSettings(**SMALL), peak_device="cpu")
    assert iterations == whole[0][:2]
    assert not any(s.device["trainer"] and s.device["engine"] for s in samples)


@real_test
@under_ray
def test_a_run_that_was_stopped_goes_on_as_one_that_was_not(whole: Any, tmp_path: Path) -> None:
    """Under Ray, from a checkpoint: rewards, losses, gaps and versions of the iterations that follow are the same."""
    settings = LoopSettings(**SMALL)
    before, _, _ = run(2, settings, checkpoint=tmp_path / "kept", processes="ray")
    after, _, facts = run(2, settings, resume=tmp_path / "kept", processes="ray")
    assert [*before, *after] == whole[0]
    assert facts["engine"]["adapters"] == {"policy": 5}


def test_a_folder_of_another_run_or_none_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    from colocert_reference.real.loop import keep_settings

    with pytest.raises(NoCheckpoint, match=r"loop.json must be readable \(got FileNotFoundError\)"):
        LearningPair(LoopSettings(), peak_device="gpu", resume=tmp_path)
    keep_settings(tmp_path, LoopSettings(seed=1))
    for where in ("resume", "checkpoint"):
        folder: dict[str, Any] = {where: tmp_path}
        with pytest.raises(NoCheckpoint, match="seed 1 there, 0 here"):
            LearningPair(LoopSettings(), peak_device="gpu", **folder)
    (tmp_path / "loop.json").write_text("[1")
    with pytest.raises(NoCheckpoint, match="readable"):
        LearningPair(LoopSettings(), peak_device="gpu", resume=tmp_path)


@real_test
def test_both_sides_build_the_same_model() -> None:
    code = (
        "from colocert_reference.real.loop import LoopSettings as S; from colocert_reference.real.model import Shape;"
        "from colocert_reference.real.export import llama_sizes; from colocert_reference.real.llama_engine import "
        "LlamaShape as L; s = S(); sizes = llama_sizes(Shape(**s.learner()));"
        "assert sizes == {k: getattr(L(**s.engine()), k) for k in sizes}, sizes"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr
    assert {**MODEL, "sequence": LoopSettings().length} == LoopSettings().learner()


# ---- a process is killed


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def process(victim: str) -> Callable[[LearningPair], int]:
    def of(pair: LearningPair) -> int:
        side: Any = getattr(pair, victim.partition(" ")[0])
        if victim.endswith(" actor"):
            ray_side: RaySide = side
            return ray_side.actor
        return int(side.pid)

    return of


@real_test
@pytest.mark.parametrize(
    ("processes", "victim", "step", "told"),
    [
        ("plain", "trainer", "engine.generate", r"the trainer process was ended by SIGKILL \(in wake_up\)"),
        ("plain", "engine", "trainer.train", r"the engine process was ended by SIGKILL \(in resume weights\)"),
        ("ray", "trainer", "engine.resume weights", r"the trainer process was ended by SIGKILL \(in sleep\)"),
        ("ray", "engine", "trainer.sleep", r"the engine process was ended by SIGKILL \(in receive\)"),
        (
            "ray",
            "trainer actor",
            "engine.generate",
            r"the trainer process lost the Ray actor that kept it \(in wake_up\)",
        ),
        ("ray", "engine actor", "engine.admit", r"the engine process lost the Ray actor that kept it \(in generate\)"),
    ],
)
def test_a_killed_process_is_one_clear_error_and_leaves_nothing(
    processes: str, victim: str, step: str, told: str
) -> None:
    if processes == "ray":
        pytest.importorskip("ray")
    found: list[float] = []

    def observe(sample: Sample) -> None:
        if sample.step == step and not found:
            found.append(time.monotonic())
            os.kill(process(victim)(pair), signal.SIGKILL)

    with LearningPair(LoopSettings(**SMALL), peak_device="gpu", processes=processes, observe=observe) as pair:
        pids = [pair.trainer.pid, pair.engine.pid]
        with pytest.raises(ProcessDied, match=told):
            pair.run(2)
        assert found
        assert time.monotonic() - found[0] < DEADLINE
        assert pair.device.held_by(getattr(pair, victim.partition(" ")[0])) == {victim.partition(" ")[0]: 0}
    assert not any(map(alive, pids))
    assert not pair.device.folder.exists()


# ---- the command


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "colocert_reference", *arguments]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, env=environment(), timeout=300)


@real_test
def test_the_command_prints_a_line_an_iteration_and_writes_what_was_asked_for(tmp_path: Path) -> None:
    names = {"timeline": "t.svg", "reward": "r.svg", "trace": "t.jsonl", "transcript": "t.txt"}
    asked = [part for name, file in names.items() for part in (f"--{name}", str(tmp_path / file))]
    done = python("--iterations", "1", "--processes", "plain", *asked)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "gpu-peak on host, capacity 184.0 MiB, seed 0, processes plain"
    assert lines[1].split()[:4] == ["iter", "reward", "loss", "gap"]
    assert lines[2].split()[0] == "0"
    assert {f"wrote {tmp_path / file}" for file in (*names.values(), "t-opening.svg")} <= set(lines)
    assert (tmp_path / "t.txt").read_text().splitlines() == lines[: len(lines) - 5]
    assert "capacity 184 MiB" in (tmp_path / "t.svg").read_text()


@real_test
def test_a_device_that_is_too_small_is_one_line_and_code_1() -> None:
    done = python("--capacity", "96M", "--processes", "plain")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("colocert_reference: ")
    assert "OutOfMemory" in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--engine", "blocks", "--seed", "1"), "argument --seed: needs an engine that samples (got --engine blocks)"),
        (("--iterations", "-1"), "argument --iterations: must be a whole number of 1 or more (got '-1')"),
        (("--processes", "threads"), "argument --processes: invalid choice: 'threads'"),
    ],
)
def test_wrong_arguments_are_one_line_and_code_2(arguments: tuple[str, ...], says: str) -> None:
    done = python(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert says in line


@real_test
@under_ray
@pytest.mark.parametrize("side", ["learner_process", "engine_process"])
def test_the_command_ends_with_one_line_when_a_process_of_it_is_killed(side: str, tmp_path: Path) -> None:
    """Under Ray; and nothing that it started is left."""
    begun = subprocess.Popen(
        command("--iterations", "500"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    try:
        assert begun.stdout is not None
        lines = (begun.stdout.readline() for _ in range(3))
        assert [line for line in lines if line.split()[:1] == ["0"]], "an iteration"
        started = descendants(begun.pid)
        victims = [pid for pid in started if f"real.{side}:main" in cmdline(pid)]
        assert len(victims) == 1
        os.kill(victims[0], signal.SIGKILL)
        _, stderr = begun.communicate(timeout=120)
    finally:
        begun.kill()
        begun.wait()
    assert begun.returncode == 1
    [line] = stderr.splitlines()
    assert "process was ended by SIGKILL" in line
    until = time.monotonic() + DEADLINE
    while any(map(alive, started)) and time.monotonic() < until:
        time.sleep(0.1)
    assert [(pid, cmdline(pid)) for pid in started if alive(pid)] == []


def cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    """Children, theirs and so on."""
    try:
        own = [int(p) for task in Path(f"/proc/{pid}/task").iterdir() for p in (task / "children").read_text().split()]
    except OSError:
        own = []
    return [*own, *(further for child in own for further in descendants(child))]


def test_the_capacity_is_said_in_the_settings() -> None:
    """What `--capacity` replaces, and what is shown."""
    assert LoopSettings().capacity == 184 * MIB

"""A trainer process and an engine process on one device of limited capacity, under the reference driver.

Megatron-core, the real saver in both processes, the stand-in driver. What each side must hold is computed from the
sizes of its allocations; what it holds is read from the device's ledger and from the saver's pinned host bytes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from colocert.plan import plan
from colocert.shapes import engine_sizes_of, load, regions_of
from colocert_reference.driver import GRAPH, KV, WEIGHTS, Driver
from colocert_reference.real import adapter_wire
from colocert_reference.real.pair import MIB, Pair, Sample, Sizes, granules
from colocert_reference.real.processes import CallFailed, DoesNotFit, ProcessDied, SharedDevice, Side

from .children import needs

pytestmark = needs("torch", "megatron.core", "torch_memory_saver")

TINY = Sizes()
GRANULE = 2 * MIB
DEADLINE = 30.0


class WithoutEarlyRelease(Driver):
    """The reference driver whose trainers do nothing in `offload_grad_buffer()`."""

    def __init__(self, trainers: Any, engines: Any, settings: Any) -> None:
        super().__init__(trainers, engines, settings)
        trainers.offload_grad_buffer = lambda: None


@dataclass(frozen=True)
class Need:
    """Device bytes in whole granules, host bytes in payload, computed from the sizes of what is allocated."""

    weights: int
    cache: int
    default: int
    grads: int
    communicators: int
    backup: int
    mirror: int

    @classmethod
    def of(cls, sizes: dict[str, list[int]]) -> Need:
        return cls(
            weights=whole(TINY.weights),
            cache=whole(TINY.kv_cache) + whole(TINY.cuda_graph),
            default=whole(sizes["default"]),
            grads=whole(sizes["grad_buffer"]),
            communicators=whole([TINY.communicators]),
            backup=sum(sizes["default"]),
            mirror=sum(TINY.weights),
        )

    @property
    def both(self) -> int:
        """Both sides without gradients and communicators."""
        return self.weights + self.default


def whole(sizes: Any) -> int:
    return sum(map(granules, sizes))


@dataclass(frozen=True)
class Run:
    """What a finished run left: samples, peaks, and the facts of both processes."""

    need: Need
    samples: list[Sample]
    peaks: dict[str, Sample]
    high_water: int
    adapter_bytes: list[int]
    trainer: dict[str, Any]
    engine: dict[str, Any]
    free_at_the_end: int


def finished(peak_device: str, capacity: int, driver: Any = Driver, iterations: int = 2) -> Run:
    with Pair(replace(TINY, capacity=capacity), peak_device=peak_device, driver=driver) as pair:
        pair.run(iterations)
        trainer, engine = pair.trainer.call("facts"), pair.engine.call("facts")
        return Run(
            Need.of(trainer["sizes"]),
            pair.samples,
            pair.peaks(),
            pair.device_peak(),
            pair.adapter_bytes,
            trainer,
            engine,
            pair.device.free(),
        )


@pytest.fixture(scope="module")
def gpu() -> Run:
    return finished("gpu", TINY.capacity)


@pytest.fixture(scope="module")
def cpu(gpu: Run) -> Run:
    """On a device that gpu-peak does not fit: what the larger side needs by itself, and not a byte more."""
    need = gpu.need
    return finished("cpu", max(need.default + need.grads + need.communicators, need.weights + need.cache))


def test_the_capacity_of_the_tiny_shape_lies_in_the_middle_of_the_wall(gpu: Run) -> None:
    need = gpu.need
    fits, wall = need.both + max(need.grads, need.communicators), need.both + need.grads + need.communicators
    assert fits + 5 * GRANULE < TINY.capacity < wall - 5 * GRANULE
    assert need.weights + need.cache < TINY.capacity


def test_the_sizes_are_those_of_the_tiny_shape(gpu: Run) -> None:
    """Device bytes to the byte; host bytes, which the shape counts in granules, within one an allocation."""
    shape, need = load("tiny"), gpu.need
    assert shape.machine.gpu_bytes.nbytes == TINY.capacity
    regions = {tag: sum(r.nbytes for r in of_tag) for tag, of_tag in regions_of(shape).items()}
    assert regions == {"default": need.default, "grad_buffer": need.grads}
    assert shape.trainer.communicators.nbytes == need.communicators
    weights, kv_cache, cuda_graph = engine_sizes_of(shape).values()
    assert (weights, kv_cache + cuda_graph) == (need.weights, need.cache)
    assert 0 <= need.default - need.backup < GRANULE * len(gpu.trainer["sizes"]["default"])
    assert 0 <= need.weights - need.mirror < GRANULE * len(TINY.weights)


def test_the_plan_of_the_tiny_shape_is_what_is_measured(gpu: Run, cpu: Run) -> None:
    """Peaks of both modes; and that the engine's weights do not come back where the gradients stay."""
    found = plan(load("tiny"))
    for mode, measured in (("gpu", gpu), ("cpu", cpu)):
        assert found.modes[mode].device_peak().on_device == measured.peaks["device"].on_device
        copies = found.host_room(found.modes[mode], file_backed=False).peak.on_host(file_backed=False)
        padding = gpu.need.default - gpu.need.backup + (gpu.need.weights - gpu.need.mirror) * (mode == "cpu")
        assert copies - measured.peaks["host"].on_host == padding
    wall = found.too_much(found.grads_kept)
    assert wall is not None
    assert (wall.step.call, wall.step.tags) == ("resume", ("weights",))


def test_host_peak_is_the_larger_copy_in_gpu_peak_and_both_copies_in_cpu_peak(gpu: Run, cpu: Run) -> None:
    need = gpu.need
    assert gpu.peaks["host"].on_host == max(need.backup, need.mirror)
    assert cpu.peaks["host"].on_host == need.backup + need.mirror
    for run in (gpu, cpu):
        assert run.peaks["trainer host"].host["trainer"] == need.backup
        assert run.peaks["engine host"].host["engine"] == need.mirror
    assert not any(s.host["trainer"] and s.host["engine"] for s in gpu.samples)


def test_device_peak_is_the_overlap_in_gpu_peak_and_the_larger_side_in_cpu_peak(gpu: Run, cpu: Run) -> None:
    need = gpu.need
    trainer, engine = need.default + need.grads + need.communicators, need.weights + need.cache
    assert gpu.peaks["device"].on_device == need.both + max(need.grads, need.communicators)
    assert cpu.peaks["device"].on_device == max(trainer, engine)
    for run in (gpu, cpu):
        assert run.high_water == run.peaks["device"].on_device  # nothing was higher between two samples
        assert run.peaks["trainer device"].device["trainer"] == trainer
        assert run.peaks["engine device"].device["engine"] == engine
    assert not any(s.device["trainer"] and s.device["engine"] for s in cpu.samples)


def test_every_step_moves_what_the_allocations_say(gpu: Run) -> None:
    """The second iteration of gpu-peak: (trainer, engine) on the device, and on the host."""
    need, start = gpu.need, [s.step for s in gpu.samples].index("trainer.train")
    awake, rollout = need.default + need.grads, need.weights + need.cache
    seen = [(s.step, *s.device.values(), *s.host.values()) for s in gpu.samples[start:]]
    after = seen[next(i for i, line in enumerate(seen) if line[0] == "engine.generate") :]
    assert [tuple(dict(zip(("step", "engine", "trainer"), line, strict=False)).values()) for line in after[:10]] == [
        ("engine.generate", rollout, 0),
        ("engine.drain", rollout, 0),
        ("engine.release kv_cache", need.weights + whole(TINY.cuda_graph), 0),
        ("engine.release cuda_graph", need.weights, 0),
        ("trainer.wake_up", need.weights, awake),
        ("engine.release weights", 0, awake),
        ("trainer.train", 0, awake + need.communicators),
        ("trainer.clear_memory", 0, awake + need.communicators),
        ("trainer.offload_grad_buffer", 0, need.default + need.communicators),
        ("engine.resume weights", need.weights, need.default + need.communicators),
    ]


def test_a_sync_carries_the_adapter_and_nothing_else(gpu: Run, cpu: Run) -> None:
    for run in (gpu, cpu):
        adapter = run.trainer["adapter"]
        assert all(".lora_" in name for name in adapter)
        assert run.adapter_bytes == [sum(adapter.values())] * 3  # before the first rollout, and after each training
        assert run.engine["adapter"] == adapter
        assert run.engine["version"] == 3
        assert [sent["tensors"] for sent in run.trainer["sent"]] == [adapter] * 3
        assert [sent["bytes"] for sent in run.trainer["sent"]] == run.adapter_bytes
        assert {sent["base"] for sent in run.trainer["sent"]} == {run.engine["base"]}
        digests = [sent["sha256"] for sent in run.trainer["sent"]]
        assert len(set(digests)) == 3  # it trains
        assert digests[-1] == run.engine["adapter_sha256"]


def test_both_modes_train_alike_and_leave_nothing_half_released(gpu: Run, cpu: Run) -> None:
    assert gpu.trainer["losses"] == cpu.trainer["losses"]
    for run in (gpu, cpu):
        assert run.engine["released"] == []
        assert run.trainer["believed"] == {"default": True, "grad_buffer": True}
        assert run.samples[-1].free == run.free_at_the_end


@pytest.mark.parametrize("below", ["in the middle of the wall", "a granule below what it needs"])
def test_without_the_early_release_the_engine_s_weights_do_not_come_back(gpu: Run, below: str) -> None:
    need = gpu.need
    held = need.default + need.grads + need.communicators
    capacity = TINY.capacity if "middle" in below else held + need.weights - GRANULE
    with Pair(replace(TINY, capacity=capacity), peak_device="gpu", driver=WithoutEarlyRelease) as pair:
        with pytest.raises(DoesNotFit) as caught:
            pair.run(2)
        last = pair.samples[-1]
        assert (last.phase, last.step) == ("to rollout", "engine.resume weights")
        assert caught.value.outcome is not None
        assert (caught.value.outcome.returncode, caught.value.outcome.traceback) == (1, "")  # the saver's exit(1)
        assert (caught.value.needed, caught.value.free) == (need.weights, capacity - held)
        assert str(caught.value).startswith("the engine process was ended by the saver, out of device memory: ")
        with pytest.raises(DoesNotFit):
            pair.driver.run(1)
        assert last.device == {"engine": 0, "trainer": held}
        for call in ("train", "sleep", "wake_up", "train", "sleep"):  # the trainer is as it was
            pair.step(pair.trainer, call)
        assert len(pair.trainer.call("facts")["losses"]) == 3
        assert pair.device.free() == capacity


def test_with_room_for_the_gradients_too_it_fits_without_the_early_release(gpu: Run) -> None:
    """From the other side: exactly as many bytes as all of it needs."""
    need = gpu.need
    everything = need.both + need.grads + need.communicators
    run = finished("gpu", everything, WithoutEarlyRelease, iterations=1)
    assert run.high_water == everything
    assert (run.peaks["device"].phase, run.peaks["device"].step) == ("to rollout", "engine.resume weights")


@contextlib.contextmanager
def killing(victim: str, step: str, turn: int) -> Iterator[tuple[Pair, list[int]]]:
    """A pair in which a process is killed once a step has ended for the `turn`th time."""

    def observe(sample: Sample) -> None:
        if sample.step == step and sum(s.step == step for s in pair.samples) == turn:
            os.kill(getattr(pair, victim).pid, signal.SIGKILL)

    with Pair(peak_device="gpu", observe=observe) as pair:
        yield pair, [pair.engine.pid, pair.trainer.pid]


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("victim", "step", "turn", "reported"),
    [
        ("trainer", "engine.resume weights", 1, "sleep"),
        ("engine", "trainer.sleep", 1, "receive"),
        ("engine", "trainer.offload_grad_buffer", 2, "resume weights"),
        ("engine", "trainer.wake_up", 1, "release weights"),
    ],
)
def test_a_process_killed_in_mid_hand_off_is_one_clear_error(victim: str, step: str, turn: int, reported: str) -> None:
    with killing(victim, step, turn) as (pair, pids):
        with pytest.raises(ProcessDied) as caught:
            pair.run(2)
        assert str(caught.value) == f"the {victim} process was ended by SIGKILL (in {reported})"
        assert pair.samples[-1].seconds < DEADLINE
        survivor = pair.engine if victim == "trainer" else pair.trainer
        assert pair.device.free() == TINY.capacity - pair.samples[-1].device[survivor.name]
        assert pair.samples[-1].device[victim] == 0
        begun = time.monotonic()
        with pytest.raises(ProcessDied):
            pair.driver.run(1)
        assert time.monotonic() - begun < DEADLINE
        survivor.call("facts")
    assert not any(map(exists, pids))
    assert not pair.device.folder.exists()


@pytest.mark.parametrize("victim", ["trainer", "engine"])
def test_a_process_killed_in_mid_sync_is_one_clear_error(victim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter is on its way: what the engine has, or the trainer, is what they had before."""
    with Pair(peak_device="gpu") as pair:
        begin = pair.engine.begin

        def kill_then_begin(call: str, **arguments: Any) -> None:
            if call == "receive":
                os.kill(getattr(pair, victim).pid, signal.SIGKILL)
            begin(call, **arguments)

        monkeypatch.setattr(pair.engine, "begin", kill_then_begin)
        begun = time.monotonic()
        with pytest.raises(ProcessDied, match=f"the {victim} process was ended by SIGKILL"):
            pair.run(1)
        assert time.monotonic() - begun < DEADLINE
        assert pair.samples[-1].step == "trainer.update_weights"
        assert pair.adapter_bytes == []
        if victim == "trainer":
            assert pair.engine.call("facts")["version"] == 0
        else:
            pair.step(pair.trainer, "wake_up")
            pair.step(pair.trainer, "train")
        pids = [pair.engine.pid, pair.trainer.pid]
    assert not any(map(exists, pids))


@pytest.fixture
def engine() -> Iterator[tuple[SharedDevice, Side]]:
    """An engine alone, on a device with room for one and a half of it."""
    device = SharedDevice("host", 96 * MIB)
    blocks = {WEIGHTS: [24 * MIB, 8 * MIB], KV: [24 * MIB], GRAPH: [2 * MIB]}
    side = device.start("engine", ENGINE, blocks=blocks, wire=f"colocert-test-{os.getpid()}", timeout=20.0)
    try:
        side.call("start")
        yield device, side
    finally:
        side.end()
        device.close()


ENGINE = "colocert_reference.real.engine_memory:main"


def test_an_engine_refuses_what_the_saver_would_end_it_for(engine: tuple[SharedDevice, Side]) -> None:
    device, side = engine
    before = device.held_by(side)
    for call, tags in (("resume", [WEIGHTS]), ("release", ["params"])):
        with pytest.raises(CallFailed, match="EngineStateError"):
            side.call(call, tags=tags)
    side.call("release", tags=[WEIGHTS, KV])
    assert side.released == {WEIGHTS, KV}
    for call, tags in (("release", [KV]), ("admit", None)):
        with pytest.raises(CallFailed, match=r"EngineStateError: .* must be resident"):
            side.call(call, **({"tags": tags} if tags else {}))
    side.call("resume", tags=[WEIGHTS, KV])
    assert device.held_by(side) == before == {"engine": 58 * MIB}


def test_a_released_cache_must_be_flushed_before_the_next_generation(engine: tuple[SharedDevice, Side]) -> None:
    _, side = engine
    side.call("generate")
    for call in ("release", "resume"):
        side.call(call, tags=[KV, GRAPH])
    with pytest.raises(CallFailed, match="ContentsLost: the cache was released and not flushed"):
        side.call("generate")
    side.call("flush")
    side.call("generate")


def test_a_process_that_does_not_answer_is_killed_and_reported(engine: tuple[SharedDevice, Side]) -> None:
    device, side = engine
    side.answer_within = 0.5
    os.kill(side.pid, signal.SIGSTOP)
    with pytest.raises(ProcessDied, match=r"gave no answer within 0.5 s and was killed \(in generate\)"):
        side.call("generate")
    assert not exists(side.pid)
    assert device.free() == 96 * MIB


def test_a_sender_that_ends_in_the_middle_leaves_the_adapter_as_it_was(engine: tuple[SharedDevice, Side]) -> None:
    _, side = engine
    name = f"colocert-test-{os.getpid()}"

    def transfer(data: bytes) -> None:
        told = adapter_wire.send(name, {"a": data, "b": b"22"}, 20.0, lambda: side.begin("receive"))
        assert (told["bytes"], side.answer("receive")["bytes"]) == (len(data) + 2, len(data) + 2)

    transfer(b"1234")
    first = side.call("facts")

    def broken() -> None:
        side.begin("receive")
        raise ConnectionAbortedError

    with pytest.raises(ConnectionAbortedError):
        adapter_wire.send(name, {"a": b"9999"}, 20.0, broken)
    with pytest.raises(CallFailed, match="BadTransfer"):
        side.answer("receive")
    assert side.call("facts") == first
    side.call("release", tags=[WEIGHTS])
    with pytest.raises((adapter_wire.BadTransfer, ConnectionError)):
        transfer(b"5678")
    with pytest.raises(CallFailed, match="EngineStateError: an adapter is loaded onto resident weights"):
        side.answer("receive")
    assert side.call("facts")["adapter_sha256"] == first["adapter_sha256"]


def python(*arguments: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "colocert_reference", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120, **kwargs)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def test_the_command_prints_a_line_a_step_and_the_peaks() -> None:
    done = python("--engine", "blocks", "--peak-device", "cpu", "--device", "host", "--iterations", "1")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "cpu-peak on host, capacity 248.0 MiB; MiB after each step"
    assert lines[1].split()[:4] == ["phase", "step", "trainer", "engine"]
    assert sum("engine.generate" in line for line in lines) == 1
    assert any(line.startswith("both host") and "162.0" in line for line in lines)
    assert any(line.startswith("high-water mark") for line in lines)
    assert lines[-1].startswith("adapter bytes a sync: ")


@pytest.mark.parametrize("capacity", ["64M", "200M"])
def test_a_run_that_fails_ends_with_one_line_and_code_1(capacity: str) -> None:
    done = python("--engine", "blocks", "--capacity", capacity)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "OutOfMemory" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--iterations", "0"), "argument --iterations: must be a whole number of 1 or more (got '0')"),
        (("--capacity", "lots"), "argument --capacity: must be a whole number of 1 or more (got 'lots')"),
        (("--peak-device", "tpu"), "argument --peak-device: invalid choice: 'tpu'"),
        (("--device", "cuda", "--capacity", "1G"), "argument --capacity: a GPU has its own (got --device cuda)"),
    ],
)
def test_wrong_arguments_are_one_line_and_code_2(arguments: tuple[str, ...], says: str) -> None:
    done = python(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith(f"python -m colocert_reference: {says}")


def test_cuda_without_a_gpu_is_one_line_and_code_3() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = python("--device", "cuda")
    assert (done.returncode, done.stdout) == (3, "")
    assert (
        done.stderr
        == "colocert_reference: --device cuda needs a GPU that torch can use (got none): use --device host\n"
    )


def test_the_processes_of_a_killed_command_end_by_themselves(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "colocert_reference", "--engine", "blocks", "--iterations", "1000"]
    env = {**environment(), "TMPDIR": str(tmp_path)}  # the folder of its ledger stays
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    try:
        pids = waited(lambda: children(process.pid), lambda found: len(found) == 2)
    finally:
        process.kill()
        process.wait()
    assert waited(lambda: [pid for pid in pids if exists(pid)], lambda left: not left) == []


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def waited(look: Any, enough: Any) -> Any:
    until = time.monotonic() + DEADLINE
    while not enough(seen := look()) and time.monotonic() < until:
        time.sleep(0.05)
    assert enough(seen), seen
    return seen


def test_whoever_runs_a_pair_imports_neither_torch_nor_the_saver() -> None:
    code = (
        "import sys, colocert_reference.__main__, colocert_reference.real.pair, colocert_reference.real.engine_memory;"
        "assert not {'torch', 'megatron', 'torch_memory_saver', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert (done.returncode, done.stderr) == (0, "")

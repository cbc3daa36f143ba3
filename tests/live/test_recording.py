"""A recording leaves the run as it is, and its file has every line that was complete when the process ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from colocert.judge_stream import judge_files
from colocert.live import Recording, record
from colocert.live.log import MappedLog
from colocert.rig.contract import ContractError
from colocert.rig.saver import SaverFatal, StrictSaver
from colocert.trace import AnyEvent
from colocert.trace import events as ev
from colocert.trace.merge import merged, open_all

RECORDING_PROCESS = """
import sys, colocert, contextlib
class Saver:
    def region(self, tag="default"): return contextlib.nullcontext()
    def pause(self, tag=None): pass
    def resume(self, tag=None): pass
recording = colocert.record(sys.argv[1], rank=3)
saver = recording.saver(Saver(), regions={"default": True})
while True:
    saver.pause("default")
    saver.resume("default")
    if recording._seq > 20_000 and recording._seq < 20_010:
        print("going", flush=True)
"""


class Saver:
    """A saver that says what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.error: BaseException | None = None

    @contextmanager
    def region(self, tag: str = "default", enable_cpu_backup: bool = False) -> Iterator[str]:
        yield tag

    def pause(self, tag: str | None = None) -> object:
        self.asked.append(("pause", tag))
        if self.error is not None:
            raise self.error
        return self

    def resume(self, tag: str | None = None) -> object:
        self.asked.append(("resume", tag))
        return self


class Trainer:
    def __init__(self, saver: Any) -> None:
        self.saver = saver

    def offload(self) -> str:
        self.saver.pause("grad_buffer")
        self.saver.pause("default")
        return "asleep"

    def load(self) -> None:
        self.saver.resume()

    def step(self) -> None:
        self.load()

    def fails(self) -> None:
        raise KeyError("no such shard")


def events(path: Path | None) -> list[AnyEvent]:
    assert path is not None
    return [event for _, event in merged(open_all([path]))]


def told(path: Path | None) -> list[str]:
    """The events of a file as words, but for what the recording says of itself."""
    words = []
    for e in events(path):
        if isinstance(e, ev.Watch):
            continue
        said = [getattr(e, f) for f in ("actor", "method", "op", "tag", "error") if getattr(e, f, None)]
        words.append(" ".join([str(type(e).__struct_config__.tag), *said]))
    return words


def test_import_colocert_leaves_the_recorder_out() -> None:
    code = "import sys, colocert; assert not [m for m in sys.modules if m.startswith(('colocert.live', 'torch'))]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_colocert_record_is_the_function_and_the_package(tmp_path: Path) -> None:
    import colocert.record.manifest

    assert isinstance(colocert.record(tmp_path, rank=0), Recording)  # type: ignore[operator]
    assert colocert.record.manifest.COMPLETE == "complete"


def test_a_cycle_is_written_call_by_call_and_undone(tmp_path: Path) -> None:
    saver = StrictSaver(lambda event: None)
    trainer = Trainer(saver)
    before = (dict(vars(saver)), dict(vars(trainer)))
    with record(tmp_path, rank=2, config={"lora": True}, from_start=True) as recording:
        assert recording.saver(saver) is saver
        recording.trainer(trainer, sleep="offload", wake_up="load", train="step")
        for tag, backup in (("default", True), ("grad_buffer", False), ("default", True)):
            with saver.region(tag, enable_cpu_backup=backup):
                saver.alloc(4)
        assert trainer.offload() == "asleep"
        trainer.step()
    assert told(recording.path) == [
        "config",
        "saver.alloc default",
        "saver.alloc grad_buffer",
        "call.begin trainer sleep",
        "saver.call pause grad_buffer",
        "saver.pause grad_buffer",
        "saver.call pause default",
        "saver.pause default",
        "call.end trainer sleep",
        "call.begin trainer train",
        "saver.call resume",
        "saver.resume default",
        "saver.resume grad_buffer",
        "call.end trainer train",
        "closed",
    ]
    assert {e.rank for e in events(recording.path)} == {2}
    assert set(vars(saver)) == set(before[0])
    assert vars(trainer) == before[1]


def test_what_a_call_returns_and_raises_is_what_it_returned_and_raised(tmp_path: Path) -> None:
    saver = Saver()
    trainer = Trainer(saver)
    with record(tmp_path, rank=0) as recording:
        recording.saver(saver, regions={"default": True})
        recording.trainer(trainer, train="fails")
        assert saver.pause("default") is saver
        assert saver.resume(tag="default") is saver
        with saver.region("kv") as inside:
            assert inside == "kv"
        saver.error = RuntimeError("refused")
        with pytest.raises(RuntimeError) as caught:
            saver.pause()
        assert caught.value is saver.error
        with pytest.raises(KeyError, match="no such shard"):
            trainer.fails()
        saver.error = SystemExit(3)
        with pytest.raises(SystemExit):
            saver.pause("default")
    assert saver.asked == [("pause", "default"), ("resume", "default"), ("pause", None), ("pause", "default")]
    assert told(recording.path)[-7:] == [
        "saver.call pause",
        "saver.refused pause",
        "call.begin trainer train",
        "call.raise trainer train KeyError",
        "saver.call pause default",
        "saver.fatal pause default",
        "closed",
    ]


def test_the_strict_savers_end_is_told_with_its_reason(tmp_path: Path) -> None:
    saver = StrictSaver(lambda event: None)
    with record(tmp_path, rank=0) as recording:
        recording.saver(saver)
        with saver.region("default"):
            saver.alloc(4)
        saver.pause("default")
        with pytest.raises(SaverFatal):
            saver.pause("default")
    fatal = [e for e in events(recording.path) if isinstance(e, ev.SaverFatal)]
    assert [e.reason for e in fatal] == ["double-release"]


def test_off_writes_nothing_and_on_writes_again(tmp_path: Path) -> None:
    saver = Saver()
    with record(tmp_path, rank=0) as recording:
        recording.saver(saver, regions={"default": True})
        recording.off()
        saver.pause("default")
        recording.on()
        saver.resume("default")
    assert told(recording.path) == [
        "saver.alloc default",
        "saver.pause default",
        "saver.call resume default",
        "saver.resume default",
        "closed",
    ]
    assert len(saver.asked) == 2


def test_a_call_that_was_under_way_when_writing_began_again_is_left_out(tmp_path: Path) -> None:
    saver = Saver()
    recording = record(tmp_path, rank=0)

    class Worker:
        def sleep(self) -> None:
            recording.off()
            saver.pause("default")
            recording.on()

        def wake_up(self) -> None:
            saver.resume("default")

    worker = Worker()
    recording.saver(saver, regions={"default": True})
    recording.trainer(worker, sleep="sleep", wake_up="wake_up")
    worker.sleep()
    first = recording.path
    worker.wake_up()
    recording.close()
    assert told(first)[-2:] == ["call.begin trainer sleep", "closed"]
    assert told(recording.path)[:3] == ["saver.alloc default", "saver.pause default", "call.begin trainer wake_up"]
    assert recording.path is not None
    assert first is not None
    assert judge_files([first, recording.path]).counts == {}


def test_threads_share_one_file_without_a_gap(tmp_path: Path) -> None:
    saver = Saver()
    recording = record(tmp_path, rank=0)
    recording.saver(saver, regions={"default": True})
    threads = [threading.Thread(target=lambda: [saver.pause("other") for _ in range(500)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recording.close()
    assert sum(t.startswith("saver.call") for t in told(recording.path)) == 4000


def test_an_event_inside_the_write_of_another_follows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = record(tmp_path, rank=0)
    plain, again = MappedLog.append, [True]

    def interrupted(log: MappedLog, line: bytes) -> None:
        if b"handoff" in line and again:
            again.clear()
            recording.believed({"default": True})
        plain(log, line)

    monkeypatch.setattr(MappedLog, "append", interrupted)
    recording.handoff("first")
    recording.close()
    assert told(recording.path) == ["handoff", "believed", "closed"]


def test_every_complete_line_survives_sigkill(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", RECORDING_PROCESS, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"going\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    (path,) = tmp_path.glob("*.jsonl")
    seen = events(path)
    assert len(seen) > 20_000
    assert path.read_bytes()[-1:] in (b"\0", b"\n")


def test_a_forked_child_has_a_file_of_its_own(tmp_path: Path) -> None:
    saver = Saver()
    recording = record(tmp_path, rank=5, config={"lora": True}, from_start=True)
    recording.saver(saver, regions={"default": True})
    saver.pause("default")
    child = os.fork()
    if child == 0:
        saver.resume("default")
        recording.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    saver.resume("default")
    recording.close()
    mine = recording.path
    (other,) = [p for p in tmp_path.glob("*.jsonl") if p != mine]
    assert mine is not None
    assert open_all([other])[0].header.parent == mine.stem
    assert told(other) == ["config", "saver.call resume default", "closed"]
    assert told(mine)[-3:] == ["saver.call resume default", "saver.resume default", "closed"]


def test_a_forked_child_that_records_nothing_leaves_no_file(tmp_path: Path) -> None:
    recording = record(tmp_path, rank=0)
    recording.handoff()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    recording.close()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_stops_the_recording_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver()
    recording = record(tmp_path, rank=0)
    recording.saver(saver, regions={"default": True})

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    saver.pause("x")
    monkeypatch.setattr(os, "posix_fallocate", full)
    for _ in range(20_000):
        saver.pause("x")
    assert "No space left" in recording.problem
    recording.on()
    assert not recording.recording
    recording.close()
    assert len(saver.asked) > 20_000
    assert len(events(recording.path)) > 5_000


def test_an_async_client_is_spanned_to_its_last_step(tmp_path: Path) -> None:
    class Client:
        async def release_memory_occupation(self, tags: list[str]) -> str:
            await asyncio.sleep(0)
            return "done"

        async def generate(self, prompt: str) -> str:
            await asyncio.sleep(0)
            return prompt.upper()

    client = Client()
    with record(tmp_path, rank=1, config={"engine_mirror": True}) as recording:
        recording.engine(client, tags=["weights", "kv_cache"], release="release_memory_occupation", generate="generate")
        assert asyncio.run(client.generate("hi")) == "HI"
        assert asyncio.run(client.release_memory_occupation(["kv_cache"])) == "done"
        assert asyncio.run(client.release_memory_occupation(tags=["kv_cache", "weights"])) == "done"
    released = [e for e in events(recording.path) if isinstance(e, ev.EngineRelease)]
    assert [(e.tags, e.redundant) for e in released] == [(["kv_cache"], []), (["weights"], ["kv_cache"])]
    assert told(recording.path)[3:] == [
        "request.begin",
        "request.end",
        "engine.release",
        "saver.pause kv_cache",
        "engine.release",
        "saver.pause weights",
        "closed",
    ]


def test_a_handle_is_acknowledged_when_its_reference_is(tmp_path: Path) -> None:
    class ObjectRef:
        """Named as Ray's is."""

    class Handle:
        def sleep(self) -> ObjectRef:
            return ObjectRef()

        def wake_up(self) -> None:
            return None

    handle = Handle()
    with record(tmp_path, rank=0, owner="driver") as recording:
        recording.handle(handle, rank=7, sleep="sleep", wake_up="wake_up")
        reference = handle.sleep()
        recording.handoff("between")
        recording.acknowledged(reference)
        handle.wake_up()
    seen = events(recording.path)[1:]
    assert [(type(e).__name__, e.rank) for e in seen] == [
        ("CallIssue", 7),
        ("HandOff", 0),
        ("Ack", 7),
        ("CallIssue", 7),
        ("Ack", 7),
        ("Closed", 0),
    ]


def test_bytes_are_measured_on_request_and_a_failing_probe_only_ends_that(tmp_path: Path) -> None:
    saver, left = Saver(), [2]

    def probe() -> tuple[int, int]:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("no device")
        return 10, 100

    with record(tmp_path, rank=0, device_bytes=probe, host_bytes=True) as recording:
        recording.saver(saver, regions={"default": True})
        for _ in range(3):
            saver.pause("default")
    measured = [e for e in events(recording.path) if isinstance(e, ev.BytesSeen)]
    assert [(e.free, e.total) for e in measured] == [(10, 100)] * 2
    assert all(e.rss > 1 << 20 for e in measured)
    assert "no device" in recording.problem


def test_what_cannot_be_recorded_is_refused_in_one_line(tmp_path: Path) -> None:
    class Slotted:
        __slots__ = ()

        def region(self) -> None: ...
        def pause(self) -> None: ...
        def resume(self) -> None: ...

    recording = record(tmp_path, rank=0)
    with pytest.raises(TypeError, match="region of Slotted must be replaceable"):
        recording.saver(Slotted())
    with pytest.raises(TypeError, match="a saver has region, pause and resume"):
        recording.saver(object())
    with pytest.raises(TypeError, match="calls of a trainer are init, sleep"):
        recording.trainer(Trainer(None), rest="offload")
    with pytest.raises(TypeError, match="sleep='nap' must name a method of Trainer"):
        recording.trainer(Trainer(None), sleep="nap")
    with pytest.raises(ContractError):
        record(tmp_path, rank=0, claims={"lora": True})
    with pytest.raises(ValueError, match="rank must be 0 or more"):
        record(tmp_path, rank=-1)


def test_a_mapped_log_grows_by_chunks_and_is_cut_to_size(tmp_path: Path) -> None:
    log = MappedLog(tmp_path / "log", chunk=4096)
    lines = [b"x" * n for n in (1, 5000, 4095, 0, 8192, 3)]
    for line in lines:
        log.append(line)
    assert (tmp_path / "log").stat().st_size % 4096 == 0
    log.close()
    assert (tmp_path / "log").read_bytes() == b"".join(line + b"\n" for line in lines)


def test_the_file_is_readable_while_the_run_goes_on(tmp_path: Path) -> None:
    recording = record(tmp_path, rank=0)
    recording.handoff("so far")
    assert told(recording.path) == ["handoff"]
    recording.close()

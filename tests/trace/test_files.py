"""Traces are written a whole line at a time and read back as they were; a damaged one is named by its line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from colocert.trace import SCHEMA_VERSION, TraceError, TraceWriter, read_trace, schema
from colocert.trace import events as ev

HEADER = ev.Header(schema=SCHEMA_VERSION, scenario="s", profile="lifecycle", implementation="x")
SAMPLES: list[Any] = [
    ev.Config({"lora": True}),
    ev.ClaimsStated({"lora": True}),
    ev.CallIssue("sleep", 1, owner="engine"),
    ev.CallBegin("trainer", "sleep", 1),
    ev.SaverCall("pause", None, 1),
    ev.SaverAlloc("default", "base", 10, True, "base", 1, "#1"),
    ev.SaverPause("default", "base", 10, True, 1, "#1"),
    ev.SaverResume("default", "base", 10, True, 2, "#1", 1),
    ev.SaverFree("default", "base", 10, True),
    ev.SaverTouch("default", "base", "read"),
    ev.SaverRefused("pause", "default", 3),
    ev.SaverFatal("pause", "default", "base", 4, "double-release", True),
    ev.Data("default", "base", "read", "base", "#1"),
    ev.GroupCreate("world", {"ranks": [0, 1]}),
    ev.GroupDestroy("world"),
    ev.GroupUse("world", False),
    ev.Move("policy", "model", ["w"], "cpu", 10),
    ev.Send("adapter", 10, "host", 3, ["adapter"]),
    ev.EngineRelease(["weights"]),
    ev.EngineResume(["weights"]),
    ev.EngineAdmit(),
    ev.EngineDrain(),
    ev.EngineFlush(),
    ev.EngineServe("a", 1, 1),
    ev.RequestBegin("a", 1),
    ev.RequestEnd("a", 1),
    ev.Ack(1, rank=2),
    ev.Believed({"default": True}, statement=True),
    ev.Fault("send", "before"),
    ev.Change("groups.gone", {"groups": []}),
    ev.EngineSession("open"),
    ev.EngineLoad("adapter", "policy", 1, ["a"], ["b"], 10, True),
    ev.Measured("levels", {"files": 1}),
    ev.ModuleSeen({"w": ["frozen", "float32[2]", 8, "w"]}, 8, 8, ["planted"]),
    ev.TensorsSeen("offload", {"w": ["file", "#1", "float32[2]"]}),
    ev.MemorySeen("offload", 8, 0, 0, 8, 0, 0, 0, 1),
    ev.FolderSeen("suite", {"w.bin": "#1"}),
    ev.ProcessEnded("killed", "offload"),
    ev.EngineAsked(3, "release", ["weights"]),
    ev.EngineToken(3, "prompt", 2, 1, ["weights"], False, ["policy@1"]),
    ev.LevelsSeen("training", 5, {"trainer": 1}, {"trainer": 2}, {"trainer": 0}, {"trainer": 3}, {"trainer": 4}),
    ev.TagsMoved("release", "trainer", {"default": [3, 4]}, 5, 12, 2),
    ev.RunBegan(1, "plain"),
    ev.LossSeen(3, "0x1.8p+1", "a"),
    ev.TokensSeen("first", [1, 2], 7, [3, 4], "a"),
    ev.StateSeen("fingerprint", {"active": "actor"}),
    ev.Watch(["saver", "trainer"]),
    ev.BytesSeen(1, 2, 3),
    ev.HandOff(1, "to-train"),
    ev.Closed(),
    ev.Note("op", {"x": 1}, statement=True),
    ev.CallEnd("trainer", "sleep", 1),
    ev.CallRaise("trainer", "sleep", 2, "ValueError", "no"),
]


def write(path: Path, events: list[Any]) -> Path:
    writer = TraceWriter(path, HEADER)
    for seq, event in enumerate(events, 1):
        event.seq = seq
        writer(event)
    writer.close()
    return path


def test_every_kind_of_event_is_read_back_as_written(tmp_path: Path) -> None:
    got = list(read_trace(write(tmp_path / "t.jsonl", SAMPLES)))
    assert got == [HEADER, *SAMPLES]
    assert {type(e) for e in got} == set(ev.AnyEvent.__args__)


def test_the_published_schema_names_every_event() -> None:
    text = msgspec.json.encode(schema()).decode()
    for kind in ev.AnyEvent.__args__:
        assert f'"{kind.__struct_config__.tag}"' in text


DAMAGE = {
    "empty": (lambda lines: [], 1, "empty file"),
    "no-header": (lambda lines: lines[1:], 1, "header"),
    "other-schema": (lambda lines: [lines[0].replace(b'"schema":1', b'"schema":99'), *lines[1:]], 1, "99"),
    "not-json": (lambda lines: [*lines[:3], b"{oops\n", *lines[3:]], 4, "JSON"),
    "unknown-event": (lambda lines: [*lines[:3], b'{"ev":"saver.dance","seq":3}\n'], 4, "schema"),
    "wrong-type": (lambda lines: [*lines[:3], b'{"ev":"fault","point":3,"when":"x","seq":9}\n'], 4, "schema"),
    "swapped": (lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]], 4, "seq"),
    "twice": (lambda lines: [*lines[:3], lines[2], *lines[3:]], 4, "seq"),
    "torn": (lambda lines: [*lines[:-1], lines[-1][:20]], len(SAMPLES) + 1, "JSON"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_line_is_named_by_its_number(tmp_path: Path, name: str) -> None:
    damage, number, says = DAMAGE[name]
    path = write(tmp_path / "t.jsonl", SAMPLES)
    path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(TraceError, match=rf"t\.jsonl:{number}: ") as caught:
        list(read_trace(path))
    assert caught.value.line == number
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_a_trace_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="readable"):
        list(read_trace(tmp_path / "nothing.jsonl"))


def test_a_torn_tail_may_be_dropped(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", SAMPLES)
    path.write_bytes(path.read_bytes()[:-5])
    assert list(read_trace(path, allow_torn_tail=True)) == [HEADER, *SAMPLES[:-1]]


def test_what_was_written_survives_a_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from colocert.trace import SCHEMA_VERSION, TraceWriter\n"
        "from colocert.trace.events import Fault, Header\n"
        f"w = TraceWriter(Path({str(path)!r}), Header(schema=SCHEMA_VERSION, scenario='s', profile='p'))\n"
        "for seq in range(1, 1001):\n"
        "    w(Fault('x', 'before', seq=seq))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == -signal.SIGKILL
    assert len(list(read_trace(path))) == 1001

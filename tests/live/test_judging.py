"""`colocert judge FILES…`: merged, judged in one pass, and each unusable file told in one line."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import colocert_fixtures
from colocert.cli import main
from colocert.judge_stream import StreamJudge, judge_files
from colocert.judge_trace import judge_events
from colocert.live import record
from colocert.record.registry import BY_ID
from colocert.rig.contract import Claims
from colocert.rules.catalogue import catalogue
from colocert.rules.senses import _NEEDS, RECORDABLE, WORDS, lacking
from colocert.trace import TraceError, read_trace
from colocert.trace.events import SaverAlloc, SaverCall
from colocert.trace.merge import merged, open_all
from colocert_fixtures.mutants.handoff import (
    releases_without_draining,
    resumes_caches_before_sleep,
    resumes_every_tag,
    resumes_weights_beside_gradients,
    skips_the_last_sync,
)
from colocert_fixtures.mutants.lifecycle import (
    keeps_default,
    keeps_gradients,
    misspells_a_tag,
    releases_default_first,
    releases_twice,
    resumes_while_resident,
)
from colocert_fixtures.synthetic import write_run
from colocert_reference.colocert_impl import implementation

from . import handoffs

TRACES = sorted((Path(colocert_fixtures.__file__).parent / "traces").rglob("*.jsonl"))
SEEN = frozenset({"saver", "trainer", "engine", "send", "requests", "driver", "from-start"})


# ---- the same findings as the suite


@pytest.mark.parametrize("part", range(4))
def test_streamed_a_trace_has_the_findings_it_has_in_the_suite(part: int) -> None:
    for path in TRACES[part::4]:
        header, *events = read_trace(path)
        rules = [r for r in catalogue().values() if r.profile == header.profile]  # type: ignore[union-attr]
        whole, stream = judge_events(events, rules), StreamJudge(rules)
        for line, event in enumerate(events, 2):
            stream.feed(0, line, event)
        stream.end()
        assert stream.counts == Counter((f.rule, f.code) for f in whole.findings), path.name
        assert stream.exercised == whole.exercised, path.name


@pytest.mark.parametrize("part", range(2))
def test_a_stretch_has_the_findings_of_its_events_one_by_one(part: int) -> None:
    """At the same lines, whoever the events are of."""
    for path in TRACES[part::2]:
        header, *events = read_trace(path)
        rules = [r for r in catalogue().values() if r.profile == header.profile]  # type: ignore[union-attr]
        single, stretch = StreamJudge(rules), StreamJudge(rules)
        for line, event in enumerate(events, 2):
            single.feed(0, line, event)
        stretch.feed_all(0, 2, events)
        single.end()
        stretch.end()
        assert (stretch.found, stretch.counts, stretch.exercised) == (single.found, single.counts, single.exercised)


def test_a_tag_that_another_rank_allocates_after_an_engines_event_is_no_unknown_one() -> None:
    """All of it in one stretch."""
    rule = catalogue()["LC-20"]
    events: list[Any] = [
        SaverAlloc("weights", "w", 1 << 20, False, owner="engine"),
        SaverAlloc("default", "a", 1 << 20, True),
        SaverCall("pause", "default", 1, rank=1),
    ]
    for seq, event in enumerate(events, 1):
        event.seq = seq
    judge = StreamJudge([rule])
    judge.feed_all(0, 2, events)
    judge.end()
    assert judge.counts == {}
    alone = StreamJudge([rule])
    alone.feed_all(0, 2, events[2:])
    alone.end()
    assert alone.counts == {("LC-20", "unknown-tag"): 1}


def _able(claims: dict[str, Any], config: dict[str, Any], profile: str) -> set[tuple[str, str]]:
    rules = [r for r in catalogue().values() if r.profile == profile]
    return {(r.id, c) for r in rules for c in r.bound(claims) if not lacking(r, c, SEEN, config, True)}


LIFECYCLE = (keeps_default, keeps_gradients, releases_default_first, releases_twice, resumes_while_resident)


@pytest.mark.parametrize(
    "mutant", [None, *LIFECYCLE, misspells_a_tag], ids=lambda m: m.__name__.split(".")[-1] if m else "none"
)
@pytest.mark.parametrize("scenario", ["lora-cycle", "lora-three-cycles", "lora-sync-asleep", "full-cycle"])
def test_a_recorded_trainer_has_the_findings_of_the_suite_that_a_recording_can_see(
    mutant: Any, scenario: str, tmp_path: Path
) -> None:
    made = implementation if mutant is None else mutant.implementation
    events, paths = handoffs.of_a_trainer(made, BY_ID[scenario], tmp_path)
    claims, config = Claims.of(made.claims).facts(), BY_ID[scenario].build_config().facts()
    able = _able(claims, config, "lifecycle")
    rules = [r for r in catalogue().values() if r.profile == "lifecycle"]
    expected = {(f.rule, f.code) for f in judge_events(events, rules).findings} & able
    assert {k for k in judge_files(paths).counts if k[0].startswith("LC")} == expected


HANDOFF = (
    resumes_caches_before_sleep,
    resumes_every_tag,
    resumes_weights_beside_gradients,
    skips_the_last_sync,
    releases_without_draining,
)


@pytest.mark.parametrize("mutant", [None, *HANDOFF], ids=lambda m: m.__name__.split(".")[-1] if m else "none")
@pytest.mark.parametrize("scenario", ["gpu-lora-three", "gpu-lora-acks-0", "cpu-lora-three", "gpu-full-one"])
def test_a_recorded_hand_off_has_the_findings_of_the_suite_that_a_recording_can_see(
    mutant: Any, scenario: str, tmp_path: Path
) -> None:
    made = implementation if mutant is None else mutant.implementation
    events, paths = handoffs.of_a_driver(made, BY_ID[scenario], tmp_path)
    claims, config = Claims.of(made.claims).facts(), BY_ID[scenario].build_config().facts()
    able = _able(claims, config, "handoff")
    rules = [r for r in catalogue().values() if r.profile == "handoff"]
    expected = {(f.rule, f.code) for f in judge_events(events, rules).findings} & able
    assert {k for k in judge_files(paths).counts if k[0].startswith("HO")} == expected


def test_every_code_of_the_two_profiles_has_its_needs_in_words() -> None:
    for rule in catalogue().values():
        if rule.profile in ("lifecycle", "handoff"):
            assert set(_NEEDS[rule.id]) == {code.name for code in rule.codes}, rule.id
    needs = {need for codes in _NEEDS.values() for need_s in codes.values() for need in need_s.split()}
    assert needs | RECORDABLE <= set(WORDS)


# ---- large runs


def test_a_correct_run_of_many_ranks_has_no_finding(tmp_path: Path) -> None:
    result = judge_files(write_run(tmp_path, ranks=40, iterations=3))
    assert result.counts == {}
    assert result.judged.verdict == "incomplete"
    outcomes = {o.id: o for o in result.judged.rules}
    assert {i for i, o in outcomes.items() if o.outcome == "pass"} >= {
        "LC-01",
        "LC-02",
        "LC-03",
        "LC-05",
        "LC-20",
        "HO-01",
    }
    assert outcomes["LC-17"].outcome == "not-exercised"
    assert "contents of memory" in outcomes["LC-17"].reason


def test_one_fault_among_a_thousand_ranks_is_found_where_it_is(tmp_path: Path) -> None:
    paths = write_run(tmp_path, ranks=1000, iterations=1, fault=(617, 0))
    result = judge_files(paths)
    assert result.judged.exit_code == 1
    assert result.ranks == 1001
    (first,) = result.found["LC-01", "default-kept"]
    assert first.finding.rank == 617
    line = paths[first.place.file].read_text().splitlines()[first.place.line - 1]
    assert paths[first.place.file].name == "rank00617.jsonl"
    assert '"call.end"' in line
    assert '"sleep"' in line


PEAK = """
import resource, sys
from pathlib import Path
from colocert.judge_stream import judge_files
result = judge_files(sorted(Path(sys.argv[1]).glob("*.jsonl")))
(first,) = result.found["LC-01", "default-kept"]
print(result.events, first.finding.rank, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def _peak(folder: Path, ranks: int, iterations: int) -> tuple[int, int, int]:
    """Events, the rank that is at fault, and KiB that a process took to judge the run."""
    folder.mkdir()
    write_run(folder, ranks, iterations, fault=(ranks - 3, iterations // 2))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-c", PEAK, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    events, rank, peak = map(int, done.stdout.split())
    return events, rank, peak


@pytest.mark.slow
def test_memory_grows_with_ranks_and_not_with_events(tmp_path: Path) -> None:
    """Ten times the events of as many ranks take a few MiB more at most: what a file's blocks hold, once it is long."""
    short, long = (_peak(tmp_path / str(n), 100, n) for n in (20, 200))
    assert (short[1], long[1]) == (97, 97)
    assert long[0] > 9 * short[0]
    assert long[2] - short[2] < 8 << 10
    assert _peak(tmp_path / "many", 800, 20)[2] - short[2] < 64 << 10


def test_findings_are_counted_and_only_the_first_are_kept(tmp_path: Path) -> None:
    claims, config = Claims.of(implementation.claims), {"lora": True, "peak_device": "gpu"}

    class Trainer:
        def sleep(self) -> None: ...

    class Saver:
        region = pause = resume = lambda self, tag="default": None

    saver, trainer = Saver(), Trainer()
    with record(tmp_path, rank=0, claims=claims, config=config) as recording:
        recording.saver(saver, regions={"default": True})
        recording.trainer(trainer, sleep="sleep")
        for _ in range(50):
            trainer.sleep()
    assert recording.path is not None
    result = judge_files([recording.path])
    assert result.counts["LC-01", "default-kept"] == 50
    assert len(result.found["LC-01", "default-kept"]) == 3


@pytest.mark.parametrize("waits", [True, False])
def test_a_driver_that_does_not_wait_for_every_rank_is_found(waits: bool, tmp_path: Path) -> None:
    claims, config = Claims.of(implementation.claims), {"lora": True, "peak_device": "gpu"}

    class ObjectRef: ...

    class Handle:
        def train(self) -> ObjectRef:
            return ObjectRef()

        sleep = train

    with record(tmp_path, rank=0, owner="driver", claims=claims, config=config) as recording:
        handles = [recording.handle(Handle(), rank=n, train="train", sleep="sleep") for n in range(3)]
        for reference in [handle.train() for handle in handles][0 if waits else 1 :]:
            recording.acknowledged(reference)
        for handle in handles:
            handle.sleep()
    assert recording.path is not None
    result = judge_files([recording.path])
    assert set(result.counts) == (set() if waits else {("HO-07", "started-early")})
    assert {o.id: o.outcome for o in result.judged.rules}["HO-07"] == ("pass" if waits else "fail")


# ---- the order of several files


def test_two_ranks_are_merged_by_their_clock(tmp_path: Path) -> None:
    one, two = record(tmp_path, rank=0), record(tmp_path, rank=1)
    for i in range(20):
        random.Random(i).choice((one, two)).handoff(str(i))
    one.close()
    two.close()
    assert one.path is not None
    assert two.path is not None
    for paths in ([one.path, two.path], [two.path, one.path]):
        order = [e.name for _, e in merged(open_all(paths)) if hasattr(e, "name")]
        assert order == [str(i) for i in range(20)]


def _machine(path: Path, boot: str, ahead: int, marks: bool) -> Path:
    """A file of another machine, whose clock began elsewhere and whose time of day is off."""
    lines = [
        '{"ev":"trace","schema":1,"scenario":"","profile":"","live":true,"process":"%s","boot":"%s","wall":%d,"at":%d}'
    ]
    lines[0] %= (boot, boot, 1000 + ahead, 500 if boot == "a" else 9000)
    at = 500 if boot == "a" else 9000
    for n in range(1, 7):
        kind = f'"ev":"handoff","number":{n // 2}' if marks and n % 2 == 0 else f'"ev":"note","op":"{boot}{n}"'
        lines.append(f'{{{kind},"seq":{n},"at":{at + n}}}')
    path.write_text("\n".join(lines) + "\n")
    return path


def test_machines_are_ordered_by_hand_off_marks_before_their_time_of_day(tmp_path: Path) -> None:
    files = [_machine(tmp_path / "a", "a", 0, True), _machine(tmp_path / "b", "b", 1000, True)]
    order = [e.op for _, e in merged(open_all(files)) if hasattr(e, "op")]
    assert order == ["a1", "b1", "a3", "b3", "a5", "b5"]


def test_machines_without_marks_are_in_the_order_of_their_time_of_day_and_it_is_said(tmp_path: Path) -> None:
    files = [_machine(tmp_path / "a", "a", 0, False), _machine(tmp_path / "b", "b", 1000, False)]
    order = [e.op for _, e in merged(open_all(files)) if hasattr(e, "op")]
    assert order == [f"a{n}" for n in range(1, 7)] + [f"b{n}" for n in range(1, 7)]
    assert any("2 machines without hand-off marks" in note for note in judge_files(files).notes)


def test_machines_of_which_one_has_no_marks_are_refused(tmp_path: Path) -> None:
    files = [_machine(tmp_path / "a", "a", 0, True), _machine(tmp_path / "b", "b", 0, False)]
    with pytest.raises(TraceError, match="b:7: files of several machines need hand-off marks"):
        judge_files(files)


def test_a_process_that_took_anothers_place_does_not_inherit_its_memory(tmp_path: Path) -> None:
    claims, config = Claims.of(implementation.claims), {"lora": True, "peak_device": "gpu"}

    class Saver:
        region = pause = resume = lambda self, tag="default": None

    class Engine:
        def generate(self) -> None: ...

    first = record(tmp_path, rank=0, claims=claims, config=config, from_start=True)
    first.saver(Saver(), regions={"default": True})
    first.off()
    second = record(tmp_path, rank=0, claims=claims, config=config, from_start=True)
    saver, engine = Saver(), Engine()
    second.saver(saver, regions={"default": True})
    second.engine(engine, generate="generate")
    saver.pause("default")
    engine.generate()
    second.close()
    result = judge_files(sorted(tmp_path.glob("*.jsonl")))
    assert ("HO-11", "trainer-resident") not in result.counts


# ---- unusable files


def _edit(path: Path, change: Callable[[list[bytes]], None]) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    change(lines)
    path.write_bytes(b"".join(lines))


def _swap(lines: list[bytes]) -> None:
    lines[7], lines[8] = lines[8], lines[7]


def _schema(lines: list[bytes]) -> None:
    lines[0] = lines[0].replace(b'"schema":1', b'"schema":2')


def _claims(lines: list[bytes]) -> None:
    lines[2] = lines[2].replace(b'"lora":true', b'"lora":false')


def _mode(lines: list[bytes]) -> None:
    lines[1] = lines[1].replace(b'"gpu"', b'"cpu"')


def _clock(lines: list[bytes]) -> None:
    lines[9] = lines[9].replace(b'"at":', b'"at":-')


DAMAGES: dict[str, tuple[Callable[[list[bytes]], None], str]] = {
    "a line cut": (lambda lines: lines.__setitem__(6, lines[6][:20] + b"\n"), ":7: a line must be one JSON object"),
    "not an event": (lambda lines: lines.__setitem__(6, b'{"ev":"call.beg"}\n'), ":7: not an event of schema 1"),
    "a line removed": (lambda lines: lines.pop(6), ":7: seq must be 6, one more than in the line before (got 7)"),
    "lines exchanged": (_swap, ":8: seq must be 7"),
    "the clock falls": (_clock, ":10: the clock must not fall"),
    "no header": (lambda lines: lines.pop(0), ":1: a recording begins with a header line (got a Config event)"),
    "empty": (lambda lines: lines.clear(), ":1: a recording begins with a header line (got an empty file)"),
    "another version": (_schema, ":1: schema must be 1 (got 2)"),
    "other claims": (_claims, ":3: claims must be those of the other files"),
    "another mode": (_mode, ":2: config peak_device must be that of the other files, 'gpu' (got 'cpu')"),
    "joined": (lambda lines: lines.extend(list(lines)), "a header may only be the first line: two files were joined"),
    "more after the end": (lambda lines: lines.append(b'{"ev":"closed","seq":%d}\n' % len(lines)), "nothing follows"),
    "zero bytes inside": (lambda lines: lines.insert(5, b"\0" * 9 + b"\n"), "zero bytes may only be at the end"),
    "an endless line": (lambda lines: lines.__setitem__(6, b"x" * (5 << 20)), ":7: a line must be shorter than"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_an_unusable_file_is_one_line_with_file_and_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, expected = DAMAGES[name]
    paths = write_run(tmp_path, ranks=2, iterations=1)
    _edit(paths[2], change)
    assert main(["judge", *map(str, paths)]) == 4
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(paths[2]) in said
    assert expected in said


def test_an_incomplete_end_is_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write_run(tmp_path, ranks=2, iterations=1)
    whole = paths[2].read_bytes()
    paths[2].write_bytes(whole[:-30] + b"\0" * 500)
    assert main(["judge", *map(str, paths)]) == 10
    lines = len(whole.splitlines())
    assert f"note: {paths[2]}:{lines}: line {lines} is incomplete and was left out" in capsys.readouterr().out
    paths[2].write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]) + b"\0" * 500)
    assert main(["judge", *map(str, paths)]) == 10
    assert "ends without a closing line: the process ended, or still runs" in capsys.readouterr().out


def test_files_that_cannot_be_one_run_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path, *_) = write_run(tmp_path, ranks=1, iterations=1)
    assert main(["judge", str(path), str(path)]) == 4
    assert "process driver must be given once" in capsys.readouterr().err
    assert main(["judge", str(TRACES[0]), str(TRACES[1])]) == 4
    assert "a trace of the suite has no clock to merge by" in capsys.readouterr().err
    assert main(["judge", str(path), str(tmp_path / "none.jsonl")]) == 4
    assert "a recording must be readable (got No such file" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["judge", str(path), str(tmp_path / "empty")]) == 4
    assert "must be an evidence folder (record.json), or hold recordings" in capsys.readouterr().err


def test_an_unknown_profile_is_told(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"ev":"trace","schema":1,"scenario":"s","profile":"mine"}\n')
    with pytest.raises(TraceError, match="profile must be one with rules"):
        judge_files([path])


# ---- what is printed


def test_a_folder_of_recordings_is_judged_and_the_fault_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, ranks=3, iterations=2, fault=(1, 1))
    assert main(["judge", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "LC-01 (must), default-kept: weights, optimizer state or adapters stay resident" in out
    assert f"at          {tmp_path / 'rank00001.jsonl'}:" in out
    assert "> 1|" in out
    assert "expected    sleep() releases default" in out
    assert "LC-17   must    not-exercised" in out
    assert out.splitlines()[-1].startswith("colocert: not-conformant (")


def test_a_recording_without_claims_is_judged_on_what_needs_none(tmp_path: Path) -> None:
    with record(tmp_path, rank=0, from_start=True) as recording:

        class Saver:
            region = pause = resume = lambda self, tag="default": None

        saver = Saver()
        recording.saver(saver, regions={"default": True})
        saver.pause("defualt")
    assert recording.path is not None
    result = judge_files([recording.path])
    outcomes = {o.id: o.outcome for o in result.judged.rules}
    assert outcomes["LC-20"] == "fail"
    assert outcomes["LC-05"] == "pass"
    assert {o for i, o in outcomes.items() if i not in ("LC-05", "LC-20")} == {"not-exercised"}
    assert any("states claims" in reason for reason in result.judged.reasons)


def test_a_tag_that_another_rank_used_is_known(tmp_path: Path) -> None:
    class Saver:
        region = pause = resume = lambda self, tag="default": None

    made = [record(tmp_path, rank=n, from_start=True) for n in range(2)]
    savers = [Saver(), Saver()]
    for recording, saver, regions in zip(made, savers, ({"default": True}, {"grad_buffer": False}), strict=True):
        recording.saver(saver, regions=regions)
    savers[0].pause("grad_buffer")
    for recording in made:
        recording.close()
    result = judge_files([r.path for r in made if r.path is not None])
    assert {o.id: o.outcome for o in result.judged.rules}["LC-20"] == "pass"

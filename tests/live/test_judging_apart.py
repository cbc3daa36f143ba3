"""`colocert judge` on weight syncs, groups, engines and frozen weights: the same findings in a merged stream."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

import colocert_fixtures
from colocert.cli import main
from colocert.judge_stream import judge_files
from colocert.judge_trace import judge_events
from colocert.live import record
from colocert.rig.contract import Claims
from colocert.rules.catalogue import catalogue
from colocert.rules.senses import _NEEDS, _OF_A_PROFILE, RECORDABLE, WORDS, lacking
from colocert.trace import AnyEvent, read_trace
from colocert.trace.events import ClaimsStated, Config, Header, MemorySeen, ModuleSeen, TensorsSeen, Watch
from colocert_reference.colocert_impl import implementation

FIXTURES = Path(colocert_fixtures.__file__).parent / "traces"
APART = ("adapter-sync", "group", "engine")
TRACES = {
    profile: sorted(p for p in FIXTURES.rglob("*.jsonl") if p.parent.name[:2] == name)
    for profile, name in zip(APART, ("AS", "GR", "EN"), strict=True)
}
encode = msgspec.json.Encoder().encode


def written(path: Path, events: list[AnyEvent], start: int = 0, every: int = 10, **header: Any) -> Path:
    """A recording of these events, at these readings of the clock."""
    head = Header(1, "", "", live=True, process=path.stem, boot="b", wall=0, **header)
    head.at = start
    lines = [encode(head)]
    for number, event in enumerate(events, 1):
        event.seq, event.at = number, start + every * number
        lines.append(encode(event))
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def told(config: dict[str, Any], what: tuple[str, ...] = tuple(RECORDABLE)) -> list[AnyEvent]:
    """How a recording begins."""
    return [Config(config), ClaimsStated(Claims.of(implementation.claims).facts()), Watch(sorted(what))]


def a_cycle(folder: Path) -> Path:
    """Another process of the run: a trainer that sleeps and wakes, with nothing wrong."""
    config = {"lora": True, "peak_device": "gpu"}
    with record(folder, rank=7, claims=implementation.claims, config=config, from_start=True) as made:
        saver = made.saver(Saver(), regions={"default": True, "grad_buffer": False})
        trainer = made.trainer(Trainer(saver), sleep="sleep", wake_up="wake_up")
        for _ in range(3):
            trainer.sleep()
            trainer.wake_up()
    assert made.path is not None
    header, *events = read_trace(made.path)
    assert isinstance(header, Header)
    return written(folder / "cycle.jsonl", [e for e in events if e.__class__.__name__ != "Closed"], 5, 7, rank=7)


class Saver:
    region = pause = resume = lambda self, tag="default": None


class Trainer:
    def __init__(self, saver: Any) -> None:
        self.saver, self.broken = saver, False

    def sleep(self) -> None:
        if self.broken:
            raise RuntimeError("broken")
        self.saver.pause("grad_buffer")
        self.saver.pause("default")

    def wake_up(self) -> None:
        self.saver.resume("default")
        self.saver.resume("grad_buffer")


# ---- the same findings as the suite, beside another process


@pytest.mark.parametrize("profile", APART)
def test_in_a_merged_stream_a_trace_has_the_findings_it_has_in_the_suite(profile: str, tmp_path: Path) -> None:
    rules = [r for r in catalogue().values() if r.profile == profile]
    seen, found = frozenset(RECORDABLE), Counter[tuple[str, str]]()
    for number, path in enumerate(TRACES[profile]):
        _, *events = read_trace(path)
        facts = {e.__class__: e.facts for e in events if isinstance(e, (Config, ClaimsStated))}
        config = {**facts.get(Config, {}), "lora": facts.get(Config, {}).get("lora", True), "peak_device": "gpu"}
        claims = facts.get(ClaimsStated, Claims.of(implementation.claims).facts())
        mine = [e for e in events if e.__class__ not in (Config, ClaimsStated)]
        folder = tmp_path / str(number)
        folder.mkdir()
        begin = [Config(config), ClaimsStated(claims), Watch(sorted(RECORDABLE))]
        live = written(folder / "a.jsonl", [*begin, *mine])
        able = {(r.id, c) for r in rules for c in r.bound(claims) if not lacking(r, c, seen, config, True)}
        whole = judge_events([Config(config), ClaimsStated(claims), *mine], rules)
        expected = Counter(key for f in whole.findings if (key := (f.rule, f.code)) in able)
        result = judge_files([live])
        assert Counter({k: n for k, n in result.counts.items() if k[0][:2] == rules[0].id[:2]}) == expected, path.name
        assert {o.profile for o in result.judged.rules} == {"lifecycle", "handoff", profile}
        found += expected
    assert {rule for rule, _ in found} >= {r.id for r in rules if set(_able(r)) and r.id not in ("AS-16",)}


def _able(rule: Any) -> list[str]:
    config = dict.fromkeys(("lora", "colocated", "strategy", "merge_lora", "file_backed", "chunk", "peak_device"), 1)
    return [c.name for c in rule.codes if not lacking(rule, c.name, frozenset(RECORDABLE), config, True)]


def test_every_code_that_a_recording_can_be_judged_on_has_its_needs_in_words() -> None:
    for rule in catalogue().values():
        if rule.profile in (*_OF_A_PROFILE, "group"):
            assert set(_NEEDS[rule.id]) == {code.name for code in rule.codes}, rule.id
        else:
            assert rule.id not in _NEEDS
    needs = {need for codes in _NEEDS.values() for need_s in codes.values() for need in need_s.split()}
    assert needs | RECORDABLE | set(_OF_A_PROFILE.values()) <= set(WORDS)


def test_a_run_without_their_events_is_judged_as_before(tmp_path: Path) -> None:
    result = judge_files([a_cycle(tmp_path)])
    assert {o.profile for o in result.judged.rules} == {"lifecycle", "handoff"}
    assert {o.id for o in result.judged.rules if o.outcome == "pass"} >= {"LC-01", "LC-02", "LC-05"}


# ---- a weight sync that is recorded


class Workers:
    def offload(self, *kinds: str) -> None: ...
    def backload(self, *kinds: str) -> None: ...


class Client:
    def load(self) -> None: ...


class Dispatch:
    """Sends an adapter; `brings`: the base comes back for it. `fails`: the transfer raises after what was brought."""

    def __init__(self, policy: Workers, client: Client, brings: bool) -> None:
        self.policy, self.client, self.brings, self.fails = policy, client, brings, False

    def step(self) -> None:
        self.policy.backload("model", "adapters", "optimizer")
        self.policy.offload("optimizer")

    def send(self) -> None:
        if self.brings:
            self.policy.backload("model")
        if self.fails:
            raise ConnectionError("transfer")
        self.client.load()
        if self.brings:
            self.policy.offload("model")


def a_sync(folder: Path, brings: bool, fails: bool = False, **config: Any) -> Path:
    made = record(
        folder,
        rank=0,
        owner="driver",
        claims=implementation.claims,
        config={"lora": True, "colocated": True, "strategy": "megatron", "merge_lora": False, **config},
        from_start=True,
    )
    bytes_of = {"model": 64, "adapters": 4, "optimizer": 8}
    policy = made.worker(
        Workers(), role="policy", kinds=bytes_of, offloaded=bytes_of, kinds_of=lambda *kinds: kinds,
        offload="offload", backload="backload",
    )  # fmt: skip
    reference = made.worker(Workers(), role="ref", kinds={"model": 64}, offload="offload", backload="backload")
    client = made.engine(Client(), number=0, update="load")
    dispatch = made.weight_sync(Dispatch(policy, client, brings), train_step="step", sync="send")
    reference.offload()
    dispatch.fails = fails
    for _ in range(2):
        try:
            dispatch.send()
        except ConnectionError:
            continue
    made.close()
    assert not made.problem
    assert made.path is not None
    return made.path


def test_a_recorded_sync_that_brings_nothing_passes_what_a_recording_can_see(tmp_path: Path) -> None:
    result = judge_files([a_sync(tmp_path, brings=False)])
    outcomes = {o.id: o.outcome for o in result.judged.rules}
    assert {i for i, o in outcomes.items() if o == "pass"} >= {"AS-01", "AS-02", "AS-05", "AS-06"}
    assert result.counts == {}
    row = next(o for o in result.judged.rules if o.id == "AS-18")
    assert (row.outcome, row.reason) == ("not-exercised", "not recorded: reads of released memory (for read-released)")


def test_a_recorded_sync_that_brings_the_base_is_found(tmp_path: Path) -> None:
    path = a_sync(tmp_path, brings=True)
    result = judge_files([path, a_cycle(tmp_path)])
    assert set(result.counts) == {("AS-01", "base-backloaded"), ("AS-05", "first-sync-backloads")}
    first = result.found["AS-01", "base-backloaded"][0]
    assert (first.place.file, first.finding.observed) == (0, "64 bytes do")
    assert '"move"' in path.read_text().splitlines()[first.place.line - 1]


def test_a_recorded_sync_that_raises_and_leaves_what_it_brought_is_found(tmp_path: Path) -> None:
    result = judge_files([a_sync(tmp_path, brings=True, fails=True)], profiles=("adapter-sync",))
    assert ("AS-12", "left-on-device") in result.counts
    assert {o.profile for o in result.judged.rules} == {"adapter-sync"}


def test_a_merged_sync_may_bring_the_base(tmp_path: Path) -> None:
    assert judge_files([a_sync(tmp_path, brings=True, merge_lora=True)]).counts == {}


# ---- a group that is recorded


class Group:
    def __init__(self, trainers: list[Trainer], reaches: int) -> None:
        self.trainers, self.reaches = trainers, reaches

    def offload(self) -> None:
        for trainer in self.trainers[: self.reaches]:
            trainer.sleep()

    def onload(self) -> None:
        for trainer in self.trainers[: self.reaches]:
            trainer.wake_up()


@pytest.mark.parametrize("reaches", [3, 2])
def test_a_recorded_group_that_leaves_a_rank_out_is_found(reaches: int, tmp_path: Path) -> None:
    claims, config = implementation.claims, {"lora": True, "peak_device": "gpu"}
    ranks = [record(tmp_path, rank=n, claims=claims, config=config, from_start=True) for n in range(3)]
    trainers = []
    for made in ranks:
        saver = made.saver(Saver(), regions={"default": True, "grad_buffer": False})
        trainers.append(made.trainer(Trainer(saver), sleep="sleep", wake_up="wake_up"))
    driver = record(tmp_path, rank=0, owner="driver", claims=claims, config=config, from_start=True)
    group = driver.group(Group(trainers, reaches), offload="offload", onload="onload")
    for _ in range(2):
        group.offload()
        group.onload()
    for made in (*ranks, driver):
        made.close()
    result = judge_files(sorted(tmp_path.glob("*.jsonl")))
    outcome = {o.id: o.outcome for o in result.judged.rules}["GR-01"]
    if reaches == 3:
        assert (outcome, result.counts) == ("pass", {})
    else:
        assert outcome == "fail"
        assert {f.finding.observed for f in result.found["GR-01", "rank-left-out"]} == {"rank 2 did not get sleep()"}


def test_what_a_group_holds_before_its_first_call_is_known(tmp_path: Path) -> None:
    """A rank that was asleep before the recording of the group began is not left out of an `offload`."""
    ranks = [record(tmp_path, rank=n, claims=implementation.claims, config={"lora": True}, from_start=True)
             for n in range(2)]  # fmt: skip
    savers = [made.saver(Saver(), regions={"default": True}) for made in ranks]
    trainers = [m.trainer(Trainer(s), sleep="sleep") for m, s in zip(ranks, savers, strict=True)]
    savers[1].pause("default")
    group = ranks[0].group(Group(trainers, 1), offload="offload")
    group.offload()
    for made in ranks:
        made.close()
    assert not [key for key in judge_files(sorted(tmp_path.glob("*.jsonl"))).counts if key[0] == "GR-01"]


# ---- a frozen offload that says where its tensors are


def frozen(memory: bool, kept: bool) -> list[AnyEvent]:
    def held(place: str) -> dict[str, list[str]]:
        return {"w": [place, "1", "f32"], "a": ["device", "2", "f32"]}

    tensors: dict[str, list[Any]] = {"w": ["frozen", "f32", 64 << 20, "w"], "a": ["adapter", "f32", 4, "a"]}
    spent = [MemorySeen("offload", 0, 0, 0, 64 << 20, 0, 0, 0, 0)] if memory else []
    off = "device" if kept else "file"
    return [ModuleSeen(tensors, 64 << 20, 64 << 20), TensorsSeen("built", held("device")), *spent,
            TensorsSeen("offload", held(off)), TensorsSeen("backload", held("device"))]  # fmt: skip


@pytest.mark.parametrize("kept", [False, True])
def test_a_frozen_offload_is_judged_by_what_it_says_of_its_tensors(kept: bool, tmp_path: Path) -> None:
    config = {"lora": True, "file_backed": True, "chunk": 1 << 20}
    result = judge_files([written(tmp_path / "f.jsonl", [*told(config), *frozen(memory=True, kept=kept)])])
    outcomes = {o.id: o.outcome for o in result.judged.rules if o.profile == "frozen-offload"}
    assert outcomes["FO-01"] == ("fail" if kept else "pass")
    assert outcomes["FO-05"] == "not-exercised"


def test_events_that_do_not_fit_together_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"lora": True, "file_backed": True, "chunk": 1 << 20}
    path = written(tmp_path / "f.jsonl", [*told(config), *frozen(memory=False, kept=False)])
    assert main(["judge", str(path)]) == 4
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{path}:7: a TensorsSeen event must follow the ones that FO-01 and its like need" in said


# ---- what the command takes


def test_profiles_are_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(a_sync(tmp_path, brings=True))
    assert main(["judge", path, "--profile", "lifecycle"]) == 10
    assert "AS-01" not in capsys.readouterr().out
    assert main(["judge", path, "--profile=adapter-sync"]) == 1
    assert "colocert: not-conformant (adapter-sync)" in capsys.readouterr().out
    assert main(["judge", path, "--profile=group"]) == 10
    assert "not recorded: a group's calls" in " ".join(capsys.readouterr().out.split())
    assert main(["judge", path, "--profile=grupp"]) == 4
    assert "--profile must name some of lifecycle" in capsys.readouterr().err
    suite = str(TRACES["engine"][0])
    assert main(["judge", suite, "--profile=group"]) == 4
    assert "--profile must name engine, which" in capsys.readouterr().err


EXPECTED = '[[expected]]\nrule = "AS-01"\ncode = "%s"\nreason = "r"\nissue = "i"\nexpiry = 2999-01-01\n'


def expecting(*codes: str) -> str:
    return "".join(EXPECTED.replace("AS-01", c.partition(" ")[0]) % c.partition(" ")[2] for c in codes)


def test_known_failures_are_expected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, known = str(a_sync(tmp_path, brings=True)), tmp_path / "known.toml"
    known.write_text(expecting("AS-01 base-backloaded", "AS-05 first-sync-backloads"))
    assert main(["judge", path, "--profile=adapter-sync", f"--expect={known}"]) == 10  # not all is exercised
    assert re.search(r"not-conformant \(adapter-sync\).* 2 expected", capsys.readouterr().out)
    known.write_text(expecting("AS-01 base-backloaded"))
    assert main(["judge", path, "--profile=adapter-sync", f"--expect={known}"]) == 1
    known.write_text(expecting("AS-02 others-resident", "AS-01 base-backloaded", "AS-05 first-sync-backloads"))
    assert main(["judge", path, "--profile=adapter-sync", f"--expect={known}"]) == 1
    assert "AS-02 is expected to fail with others-resident" in capsys.readouterr().out
    assert main(["judge", path, f"--expect={tmp_path / 'none.toml'}"]) == 4


def test_the_pages_say_what_was_read_and_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jinja2")
    path, page, text = a_sync(tmp_path, brings=True), tmp_path / "out" / "r.html", tmp_path / "out" / "s.md"
    assert main(["judge", str(path), f"--report={page}", f"--summary={text}"]) == 1
    html, markdown = page.read_text(), text.read_text()
    assert f"{path}:" in html
    assert re.search(r"<pre[^>]*>[^<]*&gt;[^<]*move", html)
    assert "# colocert: not-conformant" in markdown
    assert "## AS-01 fail: base-backloaded" in markdown
    assert re.search(r"- \d+ events of 1 processes or ranks in 1 files", markdown)
    assert "## What ran" not in markdown


def test_an_evidence_folder_takes_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from colocert.record.manifest import Options
    from colocert.record.runner import record as run

    run("reference", tmp_path / "e", Options(profiles=("lifecycle", "engine"), depth=0, controls=False))
    text = tmp_path / "s.md"
    assert main(["judge", str(tmp_path / "e"), "--profile=engine", f"--summary={text}"]) == 10
    out = capsys.readouterr().out
    assert "EN-01" in out
    assert "LC-01" not in out
    assert "- engine: " in text.read_text()

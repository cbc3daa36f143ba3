"""The group's recording and rules on local processes: mutants are found out, correct groups of other shape are not."""

from __future__ import annotations

import importlib
import os
import pkgutil
from pathlib import Path
from typing import Any

import pytest

from colocert.judge_trace import judge_events
from colocert.record.group import failed_ranks
from colocert.record.group_files import RankFiles, abandoned
from colocert.record.group_scenarios import GROUP_SCENARIOS
from colocert.record.registry import BY_ID, run
from colocert.rig.contract import Claims
from colocert.rig.group_rank import RankFault
from colocert.rules.catalogue import catalogue
from colocert.trace import AnyEvent
from colocert_fixtures.mutants import group as mutants
from colocert_fixtures.variants import group_replaces_by_itself, group_undoes_at_once
from colocert_reference.group import GroupError

RULES = [rule for rule in catalogue().values() if rule.profile == "group"]
MODULES = [importlib.import_module(m.name) for m in pkgutil.iter_modules(mutants.__path__, mutants.__name__ + ".")]
VARIANTS = [group_replaces_by_itself, group_undoes_at_once]


def kills(implementation: Any, scenario: Any) -> set[tuple[str, str]]:
    events: list[AnyEvent] = []
    run(implementation, Claims.of(implementation.claims), scenario, events.append)
    return {(f.rule, f.code) for f in judge_events(events, RULES).findings}


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__.rpartition(".")[2])
def test_a_mutant_is_found_out_by_the_rule_and_code_it_names(module: Any) -> None:
    """On the scenarios that the rule names first."""
    first = [BY_ID[s] for s in catalogue()[module.KILLED_BY[0]].scenarios]
    rest = [s for s in GROUP_SCENARIOS if s not in first]
    assert any(module.KILLED_BY in kills(module.implementation, s) for s in (*first, *rest))


def test_every_code_has_a_mutant() -> None:
    assert {m.KILLED_BY for m in MODULES} == {(rule.id, code.name) for rule in RULES for code in rule.codes}


@pytest.mark.slow
@pytest.mark.parametrize("module", VARIANTS, ids=lambda m: m.__name__.rpartition(".")[2])
def test_a_correct_group_of_another_shape_is_not_found_fault_with(module: Any) -> None:
    claims = Claims.of(module.implementation.claims)
    wanted = [s for s in GROUP_SCENARIOS if s.wanted(claims)]
    assert {s.id: kills(module.implementation, s) for s in wanted} == {s.id: set() for s in wanted}


@pytest.mark.parametrize(
    "error",
    [
        GroupError("train", {0: RankFault(0, "a"), 2: RankFault(2, "b")}),
        type("Many", (Exception,), {"exceptions": [RankFault(0, "a"), RankFault(2, "b")]})(),
        type("Names", (Exception,), {"ranks": (0, 2)})(),
        RuntimeError([RankFault(0, "a")], RankFault(2, "b")),
    ],
    ids=["errors", "exceptions", "ranks", "arguments"],
)
def test_failed_ranks_are_found_however_they_are_packed(error: Exception) -> None:
    if isinstance(error, RuntimeError) and not isinstance(error, GroupError):
        error.__cause__ = RankFault(0, "a")
    assert failed_ranks(error) == [0, 2]


def test_an_error_that_is_hidden_is_not_found() -> None:
    error = RuntimeError("train")
    error.__context__, error.__suppress_context__ = RankFault(1, "a"), True
    assert failed_ranks(error) == []


def test_a_torn_last_line_of_a_killed_rank_is_dropped(tmp_path: Any) -> None:
    path = tmp_path / "rank-0.0.jsonl"
    facts = f'{{"incarnation":0,"pid":{os.getpid()},"since":0}}'
    path.write_text(f'{{"at":1,"event":{{"ev":"rig.change","what":"rank.started","facts":{facts}}}}}\n{{"at":2,"ev')
    seen: list[Any] = []
    files = RankFiles(tmp_path, seen.append)
    files.drain(watch=False)
    files.drain(watch=False)
    assert [e.what for e in seen] == ["rank.started"]
    assert seen[0].facts == {"incarnation": 0}


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory is files under /dev/shm on Linux")
def test_shared_memory_that_nobody_holds_is_abandoned() -> None:
    name = f"colocert-test-{os.getpid()}"
    path = Path("/dev/shm") / name
    with path.open("w") as held:
        try:
            assert abandoned({name}) == []
            held.close()
            assert abandoned({name}) == [name]
        finally:
            path.unlink()

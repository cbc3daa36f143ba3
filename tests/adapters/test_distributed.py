"""`torch.distributed` over the group double: adoption, recreation, and what a lost argument looks like."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from colocert.adapters.distributed import NCCL_TIMEOUT, Distributed
from colocert.rig import Faults, ProcessGroups
from colocert.trace.events import Event, GroupCreate

ARGS: dict[str, Any] = {"ranks": [0, 2], "backend": "nccl", "timeout": 7200, "options": {"priority": 1}}


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def groups(events: list[Event]) -> ProcessGroups:
    made = ProcessGroups(events.append, Faults(events.append))
    made.create("world", ranks=[0, 1, 2], backend="nccl", timeout=1800)
    made.create("data", **ARGS)
    events.clear()
    return made


def test_adopting_creates_nothing(groups: ProcessGroups, events: list[Event]) -> None:
    Distributed(groups).adopt()
    assert events == []


def test_adopting_passes_a_wrapper_every_group_but_the_world(groups: ProcessGroups) -> None:
    dist, seen = Distributed(groups), []
    dist.new_group = lambda **given: seen.append(given)  # type: ignore[assignment, method-assign]
    dist.adopt()
    assert seen == [
        {"ranks": [0, 2], "backend": "nccl", "timeout": timedelta(seconds=7200), "pg_options": {"priority": 1}}
    ]


def test_a_group_recreated_with_its_arguments_is_the_same(groups: ProcessGroups, events: list[Event]) -> None:
    dist = Distributed(groups)
    given: dict[str, Any] = {"timeout": timedelta(hours=2), "backend": "nccl", "pg_options": {"priority": 1}}
    dist.destroy_process_group(dist.new_group([0, 2], **given))
    dist.new_group([0, 2], **given)
    assert groups.arguments()["data"] == ARGS
    assert isinstance(events[-1], GroupCreate)


def test_a_lost_argument_becomes_torchs_default(groups: ProcessGroups) -> None:
    dist = Distributed(groups)
    dist.destroy_process_group(dist.new_group([0, 2]))
    dist.new_group([0, 2], backend="nccl")
    assert groups.arguments()["data"] == {**ARGS, "timeout": NCCL_TIMEOUT, "options": {}}


def test_other_ranks_are_another_group(groups: ProcessGroups) -> None:
    dist = Distributed(groups)
    dist.destroy_process_group(dist.new_group([0, 2]))
    dist.new_group([0, 1])
    assert sorted(groups.alive) == ["group[0, 1]", "world"]


def test_tearing_down_a_group_that_is_gone_raises_as_torch_does(groups: ProcessGroups) -> None:
    dist = Distributed(groups)
    group = dist.new_group([0, 2])
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="Invalid process group"):
        dist.destroy_process_group(group)
    assert dist.get_world_size(group) == 2
    assert dist.all_reduce(None, group=group) is None

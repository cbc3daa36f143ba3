"""The strict saver behaves as torch_memory_saver 0.0.10 does, and keeps the truth about every allocation."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from colocert.rig.faults import Faults, InjectedFault, SaverRefused
from colocert.rig.saver import GRANULE, SaverFatal, StrictSaver
from colocert.trace import POISON, Ledger
from colocert.trace import events as ev

MIB = 1 << 20


class Rigged:
    def __init__(self, capacity: int | None = None) -> None:
        self.events: list[Any] = []
        self.faults = Faults(self.events.append)
        self.saver = StrictSaver(self.events.append, capacity=capacity, faults=self.faults)
        with self.saver.region("default", enable_cpu_backup=True):
            self.base = self.saver.alloc(8 * MIB, name="base")
        with self.saver.region("grad_buffer"):
            self.grads = self.saver.alloc(4 * MIB, name="grads")

    def kinds(self) -> list[str]:
        return [type(e).__name__ for e in self.events]


def test_a_released_backup_comes_back_as_it_was() -> None:
    r = Rigged()
    before, address = r.base.content, r.base.address
    r.saver.pause("default")
    assert (r.saver.device_bytes, r.saver.host_bytes) == (4 * MIB, 8 * MIB)
    r.saver.resume("default")
    assert (r.base.content, r.base.address) == (before, address)
    assert (r.saver.device_bytes, r.saver.host_bytes) == (12 * MIB, 0)


def test_released_memory_without_backup_comes_back_poisoned() -> None:
    r = Rigged()
    r.saver.pause("grad_buffer")
    assert r.saver.host_bytes == 0
    r.saver.resume("grad_buffer")
    assert r.grads.content == POISON


def test_device_bytes_are_whole_granules() -> None:
    r = Rigged()
    with r.saver.region("odd"):
        odd = r.saver.alloc(GRANULE + 1)
    assert odd.size == 2 * GRANULE
    before = r.saver.device_bytes
    r.saver.pause("odd")
    assert before - r.saver.device_bytes == 2 * GRANULE


@pytest.mark.parametrize(
    ("calls", "reason", "partial"),
    [
        pytest.param([("pause", "default"), ("pause", "default")], "double-release", False, id="pause-twice"),
        pytest.param([("resume", "default")], "double-resume", False, id="resume-active"),
        pytest.param([("pause", "default"), ("pause", None)], "double-release", True, id="pause-all-after-one"),
        pytest.param([("pause", "default"), ("resume", None)], "double-resume", True, id="resume-all-after-one"),
        pytest.param([("pause", None), ("pause", None)], "double-release", False, id="pause-all-twice"),
    ],
)
def test_an_illegal_transition_ends_the_process(calls: list[Any], reason: str, partial: bool) -> None:
    r = Rigged()
    for op, tag in calls[:-1]:
        getattr(r.saver, op)(tag)
    op, tag = calls[-1]
    with pytest.raises(SaverFatal):
        getattr(r.saver, op)(tag)
    last = r.events[-1]
    assert isinstance(last, ev.SaverFatal)
    assert (last.reason, last.partial) == (reason, partial)
    assert not isinstance(SaverFatal(), Exception)
    with pytest.raises(SaverFatal):
        r.saver.pause("anything")
    assert r.events[-1] is last


def test_a_tagless_call_moves_everything_in_one_call() -> None:
    r = Rigged()
    r.saver.pause()
    assert {e.saver_call for e in r.events if isinstance(e, ev.SaverPause)} == {1}
    assert r.saver.device_bytes == 0


def test_an_unknown_tag_moves_nothing_silently() -> None:
    r = Rigged()
    r.saver.pause("grad_bufer")
    assert r.kinds()[-1] == "SaverCall"
    assert r.saver.device_bytes == 12 * MIB


def test_a_resume_that_does_not_fit_ends_the_process() -> None:
    r = Rigged(capacity=12 * MIB)
    r.saver.pause("default")
    r.saver.ballast = 2 * MIB
    with pytest.raises(SaverFatal):
        r.saver.resume("default")
    assert r.events[-1].reason == "out-of-memory"


def test_an_allocation_that_does_not_fit_is_an_error_that_can_be_caught() -> None:
    r = Rigged(capacity=12 * MIB)
    with pytest.raises(MemoryError, match="0 of"), r.saver.region("x"):
        r.saver.alloc(1)


def test_the_margin_holds_for_allocations_in_regions_only() -> None:
    r = Rigged(capacity=20 * MIB)
    r.saver.memory_margin_bytes = 8 * MIB
    with pytest.raises(MemoryError), r.saver.region("x"):
        r.saver.alloc(2 * MIB)
    assert r.saver.alloc(2 * MIB).tag == ""


def test_a_touch_of_released_memory_ends_the_process() -> None:
    r = Rigged()
    r.saver.pause("grad_buffer")
    with pytest.raises(SaverFatal):
        r.saver.touch(r.grads, "accumulate")
    assert isinstance(r.events[-1], ev.SaverTouch)


def test_the_host_copy_can_be_asked_for() -> None:
    r = Rigged()
    assert r.saver.get_cpu_backup(r.base) is None
    r.saver.pause("default")
    assert r.saver.get_cpu_backup("base") == r.base.content


def test_asking_for_a_copy_that_cannot_exist_ends_the_process() -> None:
    r = Rigged()
    r.saver.pause("grad_buffer")
    with pytest.raises(SaverFatal):
        r.saver.get_cpu_backup(r.grads)


def test_a_retained_copy_stays_on_the_host_over_a_resume() -> None:
    r = Rigged()
    r.saver.retain_cpu_backup = True
    r.saver.pause("default")
    r.saver.resume("default")
    assert (r.saver.device_bytes, r.saver.host_bytes) == (12 * MIB, 8 * MIB)
    assert r.saver.get_cpu_backup(r.base) is None
    changed = r.saver.touch(r.base, "overwrite")
    r.saver.pause("default")
    assert r.saver.host_bytes == 8 * MIB
    assert r.saver.get_cpu_backup(r.base) == changed
    ledger = Ledger()
    for event in r.events:
        ledger.apply(event)
    assert (ledger.device_bytes, ledger.host_bytes) == (r.saver.device_bytes, r.saver.host_bytes)
    r.saver.free(r.base)
    assert r.saver.host_bytes == 0


def test_an_empty_allocation_in_a_region_ends_the_process() -> None:
    r = Rigged()
    assert r.saver.alloc(0).size == 0
    with pytest.raises(SaverFatal), r.saver.region("x"):
        r.saver.alloc(0)


def test_a_refused_call_moves_nothing() -> None:
    r = Rigged()
    r.faults.arm("saver.pause", "refused")
    with pytest.raises(SaverRefused):
        r.saver.pause("default")
    assert not r.base.paused
    assert r.kinds()[-3:] == ["SaverCall", "Fault", "SaverRefused"]
    r.saver.pause("default")
    assert r.base.paused


def test_regions_nest_and_disable_leaves_them() -> None:
    r = Rigged()
    with r.saver.region("outer", enable_cpu_backup=True):
        with r.saver.region("inner"):
            assert r.saver.alloc(1).tag == "inner"
        with r.saver.disable():
            assert r.saver.alloc(1).tag == ""
        outer = r.saver.alloc(1)
    assert (outer.tag, outer.backup) == ("outer", True)
    with pytest.raises(AssertionError), r.saver.disable():
        pass


def test_options_that_exclude_each_other_are_refused() -> None:
    r = Rigged()
    with pytest.raises(AssertionError), r.saver.region("x", enable_cpu_backup=True, enable_disk_backup=True):
        pass
    with pytest.raises(ValueError, match="enable_cpu_backup"), r.saver.region("x", cpu_backup_backend="mmap"):
        pass


def test_settings_can_be_set_and_not_read_as_in_the_library() -> None:
    r = Rigged()
    r.saver.hook_mode = "preload"
    with pytest.raises(AttributeError):
        _ = r.saver.hook_mode
    with pytest.raises(NotImplementedError):
        _ = r.saver.memory_margin_bytes
    r.saver.retain_cpu_backup = True
    assert r.saver.retain_cpu_backup is True
    with r.saver.cuda_graph(object(), tag="graphs"):
        assert r.saver.alloc(1).tag == "graphs"


def test_it_is_a_drop_in_for_the_public_surface() -> None:
    library = pytest.importorskip("torch_memory_saver").torch_memory_saver
    theirs = {n for n in dir(type(library)) if not n.startswith("_")}
    assert theirs <= {n for n in dir(StrictSaver) if not n.startswith("_")}
    for name in ("region", "cuda_graph", "disable", "pause", "resume", "get_cpu_backup", "set_disk_backup_dir"):
        mine = inspect.signature(getattr(StrictSaver, name)).parameters
        for parameter, found in inspect.signature(getattr(type(library), name)).parameters.items():
            if parameter in ("self", "dispose_mem_pool_after_use", "args", "kwargs"):
                continue
            assert mine[parameter].default == found.default, (name, parameter)


def test_a_point_fails_before_or_after_its_effect() -> None:
    r = Rigged()
    done: list[str] = []
    for when, expected in (("before", []), ("after", ["effect"])):
        done.clear()
        r.faults.arm("send", when)
        with pytest.raises(InjectedFault), r.faults.point("send"):
            done.append("effect")
        assert done == expected
    with r.faults.point("send"):
        pass


def test_the_nth_passing_is_the_one_that_fails() -> None:
    r = Rigged()
    r.faults.arm("send", "before", 2)
    with r.faults.point("send"):
        pass
    with pytest.raises(InjectedFault), r.faults.point("send"):
        pass
    r.faults.arm("send", "before")
    assert r.faults.disarm()
    assert not r.faults.disarm()
    with r.faults.point("send"):
        pass

"""What the adapter-sync rules mean at their edges, on event lists written by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from colocert.judge import TraceJudged, judge_events
from colocert.rules.catalogue import catalogue
from colocert.trace import events as ev
from colocert_reference.colocert_impl import CLAIMS

RULES = [rule for rule in catalogue().values() if rule.profile == "adapter-sync"]


class Tape:
    """Writes events in order. The policy has base, adapters and optimizer, the ref a base; everything is on the device.

    `with tape.sync():` writes the begin and the end of a sync; `raises=True` makes it end with an error.
    """

    def __init__(self, *adapters: str, claims: dict[str, Any] | None = None, **config: Any) -> None:
        self.events: list[Any] = []
        facts = {"colocated": True, "lora": True, "strategy": "megatron", "merge_lora": False}
        self.add(ev.Config({**facts, "adapters": list(adapters or ("adapter",)), **config}))
        self.add(ev.ClaimsStated({**CLAIMS.facts(), **(claims or {})}))
        self.sizes: dict[tuple[str, str], int] = {}
        for kind, name in (("model", "base"), *(("adapters", a) for a in adapters or ("adapter",))):
            self.has("policy", kind, name)
        self.has("policy", "optimizer", "optimizer").has("ref", "model", "base")

    def add(self, event: Any, owner: str = "") -> Tape:
        event.owner, event.seq = owner or event.owner, len(self.events) + 1
        self.events.append(event)
        return self

    def has(self, role: str, kind: str, name: str) -> Tape:
        return self.add(ev.SaverAlloc(kind, name, 64, True, kind, content=f"#{name}"), role)

    def move(self, role: str, kind: str, to: str, *names: str, nbytes: int = 64) -> Tape:
        default = {"model": "base", "adapters": "adapter"}.get(kind, kind)
        return self.add(ev.Move(role, kind, list(names or (default,)), to, nbytes))

    def off(self, *kinds: str) -> Tape:
        """Of the policy; the ref's model goes in any case."""
        for kind in kinds:
            self.move("policy", kind, "host")
        return self.move("ref", "model", "host")

    @contextmanager
    def call(self, method: str, subject: str = "", *, raises: bool = False) -> Iterator[Tape]:
        self.add(ev.CallBegin("weight_sync", method, 1, subject))
        yield self
        ends = (
            ev.CallRaise("weight_sync", method, 1, "RuntimeError") if raises else ev.CallEnd("weight_sync", method, 1)
        )
        self.add(ends)

    def sync(self, subject: str = "", *, raises: bool = False) -> Any:
        return self.call("sync", subject, raises=raises)

    def send(self, *names: str, contents: tuple[str, ...] = ()) -> Tape:
        names = names or ("adapter",)
        sent = list(contents or (f"#{n}" for n in names))
        return self.add(ev.Send("adapter", 64, "device", 0, list(names), sent), "policy")

    def serve(self, name: str = "adapter", version: int = 0, content: str = "") -> Tape:
        return self.add(ev.EngineServe(name, version, 0, content or f"#{name}"), "engine")

    def trained(self, name: str = "adapter", content: str = "#new") -> Tape:
        return self.add(ev.Data("adapters", name, "overwrite", "adapters", content), "policy")

    def request(self, content: str, cached: str = "", *, ready: bool = True) -> Tape:
        return self.add(ev.RequestBegin("adapter", 0, ready, True, content, cached), "engine")

    def fault(self, point: str = "send", when: str = "before") -> Tape:
        return self.add(ev.Fault(point, when))

    def believes(self, **released: bool) -> Tape:
        return self.add(ev.Believed({k.replace("_", "."): v for k, v in released.items()}, statement=True))

    def judged(self) -> TraceJudged:
        return judge_events(self.events, RULES)

    def found(self, rule: str) -> list[str]:
        return [f.code for f in self.judged().findings if f.rule == rule]

    def times(self, rule: str, code: str) -> int:
        return self.judged().exercised[rule].get(code, 0)


def test_a_backload_that_moves_nothing_is_none() -> None:
    """A helper may be called; the storage counts."""
    tape = Tape().off("model", "optimizer")
    with tape.sync():
        tape.move("policy", "model", "device", nbytes=0).send()
    assert (tape.found("AS-01"), tape.times("AS-01", "base-backloaded")) == ([], 1)


def test_a_sync_that_finds_the_base_resident_says_nothing_about_backloads() -> None:
    tape = Tape()
    with tape.sync():
        tape.send()
    assert tape.times("AS-01", "base-backloaded") == 0


def test_an_adapter_may_be_brought_on_to_be_read() -> None:
    tape = Tape().off("model", "adapters", "optimizer")
    with tape.sync():
        tape.move("policy", "adapters", "device").send().serve(version=1)
    assert tape.judged().findings == ()


@pytest.mark.parametrize("config", [{"merge_lora": True}, {"lora": False}, {"strategy": "fsdp"}, {"colocated": False}])
def test_only_adapter_only_syncs_are_held_to_the_skip(config: dict[str, Any]) -> None:
    tape = Tape(**config).off("model", "optimizer")
    with tape.sync():
        tape.move("policy", "model", "device").send()
    assert (tape.found("AS-01"), tape.found("AS-05"), tape.found("AS-06")) == ([], [], [])


def test_others_are_looked_at_when_the_engine_takes_the_adapter() -> None:
    """It may be exported before they go, and they may be back before the version is told."""
    tape = Tape()
    with tape.sync():
        tape.send().move("ref", "model", "host").move("policy", "optimizer", "host").serve()
        tape.move("ref", "model", "device").serve(version=1)
    assert (tape.found("AS-02"), tape.times("AS-02", "others-resident")) == ([], 1)
    with tape.sync():
        tape.send().serve(version=2)
    assert tape.found("AS-02") == ["others-resident"]


@pytest.mark.parametrize(("claimed", "codes"), [((), ["optimizer-resident"]), (("optimizer",), [])])
def test_what_is_claimed_to_stay_may_stay(claimed: tuple[str, ...], codes: list[str]) -> None:
    tape = Tape(claims={"resident_while_released": list(claimed)}).move("ref", "model", "host")
    with tape.sync():
        tape.send().serve()
    assert tape.found("AS-02") == codes


def test_a_host_copy_is_valid_while_it_is_what_the_tensor_holds() -> None:
    tape = Tape(merge_lora=True)
    with tape.sync():
        tape.send("adapter", "base")
    tape.trained()
    with tape.sync():
        tape.send("adapter", "base", contents=("#adapter", "#base"))
    assert tape.found("AS-03") == ["stale-copy"]


def test_a_move_of_nothing_is_allowed_apart() -> None:
    tape = Tape(colocated=False)
    with tape.sync():
        tape.move("policy", "model", "host", nbytes=0).send()
    assert (tape.found("AS-04"), tape.times("AS-04", "moved")) == ([], 1)


@pytest.mark.parametrize("between", ["train_step", "forward"])
def test_only_the_first_sync_after_building_is_the_first(between: str) -> None:
    tape = Tape().off("model", "optimizer")
    with tape.call(between):
        pass
    with tape.sync():
        tape.move("policy", "model", "device").send()
    assert tape.found("AS-05") == []


def test_a_finish_that_offloads_a_resident_model_copies_what_it_must() -> None:
    tape = Tape().off("optimizer")
    with tape.sync():
        tape.send().move("policy", "model", "host")
    assert (tape.found("AS-06"), tape.times("AS-06", "copied-at-finish")) == ([], 0)


def test_beliefs_are_judged_once_something_moved_and_by_kind() -> None:
    tape = Tape("alpha", "beta").believes(policy_model=True)
    assert (tape.found("AS-06"), tape.times("AS-06", "belief-differs")) == ([], 0)
    tape.move("policy", "adapters", "host", "alpha").believes(policy_model=False, policy_adapters=True)
    assert (tape.found("AS-06"), tape.times("AS-06", "belief-differs")) == ([], 1)
    tape.move("policy", "adapters", "host", "beta").believes(policy_adapters=False, nobody_model=True)
    assert tape.found("AS-06") == ["belief-differs"]


def test_a_version_whose_answer_got_lost_is_not_the_failed_syncs() -> None:
    tape = Tape()
    with tape.sync(raises=True):
        tape.send().serve(version=1).fault("engine.serve", "after")
    with tape.sync():
        tape.send().serve(version=1)
    assert tape.found("AS-09") == []


def test_a_version_that_was_raised_before_an_error_is() -> None:
    tape = Tape()
    with tape.sync(raises=True):
        tape.serve(version=1).fault("send", "before")
    assert tape.found("AS-09") == ["changed-on-failure"]


def test_a_version_put_back_after_an_error_did_not_change() -> None:
    tape = Tape()
    with tape.sync(raises=True):
        tape.serve(version=1).fault("send", "before").serve(version=0)
    assert tape.found("AS-09") == []


def test_a_sync_of_nothing_new_may_leave_the_version() -> None:
    tape = Tape()
    with tape.sync():
        tape.serve(version=1)
    with tape.sync():
        tape.serve(version=1)
    assert (tape.found("AS-09"), tape.times("AS-09", "not-changed")) == ([], 1)
    tape.trained()
    with tape.sync():
        tape.serve(version=1, content="#new")
    assert tape.found("AS-09") == ["not-changed"]


def test_each_adapter_has_a_version_of_its_own() -> None:
    tape = Tape("alpha", "beta")
    with tape.sync("alpha"):
        tape.serve("alpha", 1)
    with tape.sync("beta"):
        tape.serve("beta", 2)
    assert tape.found("AS-09") == []


def test_a_stale_prefix_counts_after_a_sync_that_returned_only() -> None:
    tape = Tape().request("#old")
    with tape.sync(raises=True):
        pass
    tape.request("#new", "#old")
    assert tape.found("AS-10") == []
    with tape.sync():
        tape.request("#new", "#old")
    assert tape.found("AS-10") == []
    tape.request("#new", "#old")
    assert tape.found("AS-10") == ["stale-prefix"]


def test_a_hit_of_what_is_served_is_no_fault_and_a_first_request_says_nothing() -> None:
    tape = Tape()
    with tape.sync():
        pass
    tape.request("#a")
    assert tape.times("AS-10", "stale-prefix") == 0
    tape.request("#b", "#b").request("#b", ready=False)
    assert (tape.found("AS-10"), tape.times("AS-10", "stale-prefix")) == ([], 1)


def test_what_was_on_the_device_before_may_be_there_after_an_error() -> None:
    tape = Tape().off("model")
    with tape.sync(raises=True):
        tape.move("policy", "adapters", "host").move("policy", "adapters", "device").fault()
    assert (tape.found("AS-12"), tape.times("AS-12", "left-on-device")) == ([], 1)
    with tape.sync(raises=True):
        tape.move("policy", "model", "device").fault()
    assert tape.found("AS-12") == ["left-on-device"]


def test_a_retry_is_the_next_sync_for_the_same_adapter_without_a_fault() -> None:
    tape = Tape("alpha", "beta")
    with tape.sync("alpha", raises=True):
        tape.fault()
    with tape.sync("beta"):
        tape.serve("beta")
    assert tape.times("AS-12", "not-delivered") == 0
    with tape.sync("alpha", raises=True):
        tape.fault()
    with tape.sync("alpha"):
        tape.serve("alpha", content="#older")
    assert (tape.found("AS-12"), tape.times("AS-12", "not-delivered")) == (["not-delivered"], 1)


def test_a_retry_may_deliver_what_was_trained_since() -> None:
    tape = Tape()
    with tape.sync(raises=True):
        tape.fault()
    tape.trained()
    with tape.sync():
        tape.serve(content="#new")
    assert tape.found("AS-12") == []


def test_full_weights_are_delivered_as_the_base() -> None:
    tape = Tape(lora=False)
    with tape.sync(raises=True):
        tape.fault()
    with tape.sync():
        tape.serve("", content="#base")
    assert (tape.found("AS-12"), tape.times("AS-12", "not-delivered")) == ([], 1)


def test_the_adapter_asked_for_is_exported_alone_and_served() -> None:
    tape = Tape("alpha", "beta")
    with tape.sync("alpha"):
        tape.send("alpha").serve("alpha", 1)
    assert tape.found("AS-16") == []
    with tape.sync("alpha"):
        tape.send("alpha", "beta").serve("alpha", 2)
    with tape.sync("beta"):
        tape.send("beta").serve("alpha", 3, "#beta")
    assert tape.found("AS-16") == ["wrong-adapter", "wrong-adapter"]


def test_reading_counts_after_a_sync_and_outside_of_it() -> None:
    tape = Tape()
    with tape.call("forward", "policy"):
        tape.add(ev.SaverTouch("model", "base", "read"), "policy")
    with tape.sync(raises=True):
        tape.add(ev.SaverTouch("model", "base", "read"), "policy")
    assert (tape.found("AS-18"), tape.times("AS-18", "read-released")) == ([], 0)
    with tape.call("train_step"):
        tape.add(ev.Data("model", "base", "read", "model", "#base"), "policy")
        tape.add(ev.SaverTouch("optimizer", "optimizer", "read"), "policy")
    assert (tape.found("AS-18"), tape.times("AS-18", "read-released")) == (["read-released"], 1)

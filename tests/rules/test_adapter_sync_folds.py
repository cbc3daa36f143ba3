"""What the adapter-sync rules mean at their edges, on event lists written by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from colocert.judge_trace import TraceJudged, judge_events
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


def test_a_version_of_merged_weights_before_a_later_error_is_the_failed_syncs() -> None:
    """They are served as "": an error that is not the engine's own call loses no answer of it."""
    tape = Tape(merge_lora=True)
    with tape.sync(raises=True):
        tape.send().serve("", version=1, content="#adapter+#base")
        tape.move("policy", "model", "host").fault("worker.policy.model.host", "after")
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


BACKLOADS = [("AS-01", "base-backloaded"), ("AS-05", "first-sync-backloads"), ("AS-16", "base-backloaded")]
OTHERS = ({"merge_lora": True}, {"lora": False}, {"strategy": "fsdp"})


@pytest.mark.parametrize(("rule", "code"), BACKLOADS)
def test_a_backload_is_a_move_of_the_model_to_the_device_in_a_sync(rule: str, code: str) -> None:
    tape = Tape().off("model", "optimizer").move("policy", "model", "device").move("policy", "model", "host")
    with tape.sync("adapter"):
        tape.move("policy", "model", "host").move("policy", "optimizer", "device").send().serve(version=1)
    assert (tape.found(rule), tape.times(rule, code)) == ([], 1)
    with tape.call("forward", "policy"):
        tape.move("policy", "model", "device")
    assert tape.found(rule) == []
    again = Tape().off("model", "optimizer")
    with again.sync("adapter"):
        again.move("policy", "model", "device").send().serve(version=1)
    assert again.found(rule) == [code]


@pytest.mark.parametrize(("rule", "code"), BACKLOADS)
@pytest.mark.parametrize("what", ["merged", "nothing sent", "resident"])
def test_a_backload_cannot_be_missed_where_none_was_in_question(rule: str, code: str, what: str) -> None:
    tape = Tape(merge_lora=what == "merged").off(*([] if what == "resident" else ["model"]), "optimizer")
    with tape.sync("adapter"):
        if what != "nothing sent":
            tape.send()
        tape.serve(version=1)
    assert tape.times(rule, code) == 0


def test_the_first_sync_alone_counts_as_the_first_and_a_later_backload_is_not_its() -> None:
    tape = Tape().off("model", "optimizer")
    for version in (1, 2):
        with tape.sync():
            tape.send().serve(version=version)
    with tape.sync():
        tape.move("policy", "model", "device")
    assert (tape.found("AS-05"), tape.times("AS-05", "first-sync-backloads")) == ([], 1)


def test_a_first_sync_that_finds_the_base_resident_may_move_it() -> None:
    tape = Tape()
    with tape.sync():
        tape.move("policy", "model", "host").send().move("policy", "model", "device")
    assert tape.found("AS-05") == []


@pytest.mark.parametrize("config", [{}, *OTHERS])
def test_emptied_storage_is_that_of_a_sync_that_sends_the_model_or_fsdp(config: dict[str, Any]) -> None:
    tape = Tape(**config).add(ev.SaverTouch("model", "base", "read"), "policy").send()
    with tape.sync(raises=True):
        tape.add(ev.SaverTouch("model", "base", "read"), "policy").send()
    assert tape.found("AS-03") == (["emptied-storage"] if config else [])
    assert tape.times("AS-03", "emptied-storage") == (2 if config else 0)


def test_an_adapter_sync_apart_is_none_that_sends_the_model() -> None:
    tape = Tape(colocated=False)
    with tape.sync():
        tape.send(contents=("#old",))
    assert (tape.found("AS-03"), tape.times("AS-03", "stale-copy")) == ([], 0)


@pytest.mark.parametrize(("colocated", "sends", "times"), [(True, True, 0), (False, False, 0), (False, True, 1)])
def test_apart_is_a_sync_that_sends_and_what_moves_in_it(colocated: bool, sends: bool, times: int) -> None:
    tape = Tape(colocated=colocated).move("policy", "optimizer", "host")
    with tape.sync():
        if sends:
            tape.send()
    assert (tape.found("AS-04"), tape.times("AS-04", "moved")) == ([], times)
    with tape.sync():
        tape.move("ref", "model", "host")
    assert tape.found("AS-04") == ([] if colocated else ["moved"])


def test_a_finish_is_what_comes_after_the_send_and_moves_the_policys_model() -> None:
    tape = Tape().off("optimizer")
    with tape.sync():
        tape.move("policy", "model", "host").send().move("ref", "model", "device").move("policy", "optimizer", "device")
        tape.move("policy", "model", "host", nbytes=0)
    assert (tape.found("AS-06"), tape.times("AS-06", "copied-at-finish")) == ([], 1)
    with tape.sync():
        tape.send().move("policy", "model", "device")
    assert tape.found("AS-06") == ["copied-at-finish"]


@pytest.mark.parametrize("what", ["apart", "raises", "nothing sent"])
def test_a_finish_needs_a_colocated_sync_that_sent_and_returned(what: str) -> None:
    tape = Tape(colocated=what != "apart").off("model", "optimizer").send()
    with tape.sync(raises=what == "raises"):
        if what != "nothing sent":
            tape.send()
        tape.move("policy", "model", "device")
    assert (tape.found("AS-06"), tape.times("AS-06", "copied-at-finish")) == ([], 0)


def test_what_a_true_belief_says_is_no_finding() -> None:
    tape = Tape().off("model").believes(policy_model=True, policy_optimizer=False)
    assert (tape.found("AS-06"), tape.times("AS-06", "belief-differs")) == ([], 2)


@pytest.mark.parametrize("config", [{"colocated": False}, *OTHERS])
def test_others_may_stay_beside_a_sync_of_another_kind(config: dict[str, Any]) -> None:
    tape = Tape(**config)
    with tape.sync():
        tape.send().serve()
    assert (tape.found("AS-02"), tape.times("AS-02", "others-resident")) == ([], 0)


def test_what_the_engine_takes_outside_of_a_sync_or_unsent_is_not_looked_at() -> None:
    tape = Tape().send().serve()
    with tape.sync():
        tape.serve(version=1)
    assert tape.times("AS-02", "others-resident") == 0


def test_a_fault_before_an_effect_or_after_another_call_loses_no_answer() -> None:
    for point, when in (("engine.serve", "before"), ("worker.policy.model.host", "after")):
        tape = Tape()
        with tape.sync(raises=True):
            tape.serve(version=1)
            if when == "after":
                tape.move("policy", "model", "host")
            tape.fault(point, when)
        assert tape.found("AS-09") == ["changed-on-failure"]


def test_beliefs_after_a_later_call_are_no_longer_the_errors() -> None:
    tape = Tape().off("model")
    with tape.sync(raises=True):
        tape.fault()
    tape.believes(policy_model=True)
    assert (tape.found("AS-12"), tape.times("AS-12", "belief-differs")) == ([], 1)
    with tape.call("forward", "policy"):
        pass
    tape.believes(policy_model=False)
    assert (tape.found("AS-12"), tape.found("AS-06")) == ([], ["belief-differs"])


def test_only_reads_of_a_forward_or_step_count() -> None:
    tape = Tape()
    with tape.sync():
        tape.add(ev.Data("model", "base", "read", "model", "#base"), "policy")
    tape.add(ev.SaverTouch("model", "base", "read"), "policy")
    with tape.call("train_step"):
        tape.trained()
    with tape.call("after_build"):
        tape.add(ev.SaverTouch("model", "base", "read"), "policy")
    assert (tape.found("AS-18"), tape.times("AS-18", "read-released")) == ([], 0)


@pytest.mark.parametrize(("rule", "code"), BACKLOADS)
def test_what_moves_between_calls_is_no_syncs(rule: str, code: str) -> None:
    tape = Tape().off("model", "optimizer")
    with tape.sync("adapter"):
        tape.send().serve(version=1)
    tape.move("policy", "model", "device")
    assert tape.found(rule) == []


def test_a_backload_for_no_adapter_by_name_or_for_a_merged_sync_is_not_an_activations() -> None:
    for subject, merged in (("", False), ("adapter", True)):
        tape = Tape(merge_lora=merged).off("model", "optimizer")
        with tape.sync(subject):
            tape.move("policy", "model", "device").send().serve(version=1)
        assert tape.found("AS-16") == []


def test_a_request_while_the_next_sync_runs_is_not_looked_at() -> None:
    tape = Tape().request("#old")
    with tape.sync():
        pass
    with tape.sync():
        tape.request("#new", "#old")
    assert tape.found("AS-10") == []


def test_what_is_read_between_calls_is_no_forwards() -> None:
    tape = Tape()
    with tape.sync():
        pass
    with tape.call("forward", "policy"):
        pass
    tape.add(ev.SaverTouch("model", "base", "read"), "policy")
    assert tape.found("AS-18") == []

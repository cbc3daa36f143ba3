"""What the hand-off rules mean at their edges, on event lists written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from colocert.judge_trace import TraceJudged, judge_events
from colocert.rules.catalogue import catalogue
from colocert.trace import events as ev
from colocert_reference.colocert_impl import CLAIMS

RULES = [rule for rule in catalogue().values() if rule.profile == "handoff"]
ALL_TAGS = ("weights", "kv_cache", "cuda_graph")


class Tape:
    """Writes events in order. Engines have their tags from the start, trainers what `starts` gives them."""

    def __init__(self, *, engines: int = 1, claims: dict[str, Any] | None = None, **config: Any) -> None:
        self.events: list[Any] = []
        facts = {"lora": True, "peak_device": "gpu", "engine_server": "strict", "engine_releases": list(ALL_TAGS)}
        self.add(ev.Config({**facts, **config}))
        self.add(ev.ClaimsStated({**CLAIMS.facts(), **(claims or {})}))
        for rank in range(engines):
            for tag in ALL_TAGS:
                self.add(ev.SaverAlloc(tag, f"engine.{tag}", 64, tag == "weights", tag), rank, "engine")

    def add(self, event: Any, rank: int = 0, owner: str = "") -> Tape:
        event.rank, event.owner, event.seq = rank, owner, len(self.events) + 1
        self.events.append(event)
        return self

    # trainers

    def begin(self, method: str, rank: int = 0, actor: str = "trainer") -> Tape:
        return self.add(ev.CallBegin(actor, method, 1), rank)

    def end(self, method: str, rank: int = 0, actor: str = "trainer") -> Tape:
        return self.add(ev.CallEnd(actor, method, 1), rank)

    def fails(self, method: str, rank: int = 0, actor: str = "trainer") -> Tape:
        return self.add(ev.CallRaise(actor, method, 1, "RuntimeError"), rank)

    def alloc(self, name: str, tag: str = "default", kind: str = "base", rank: int = 0) -> Tape:
        return self.add(ev.SaverAlloc(tag, name, 64, tag == "default", kind), rank)

    def starts(self, *ranks: int) -> Tape:
        """`init()` of each rank: base, adapter and gradients."""
        for rank in ranks or (0,):
            self.begin("init", rank).alloc("base", rank=rank).alloc("adapter", kind="adapter", rank=rank)
            self.alloc("grads", "grad_buffer", "grads", rank).end("init", rank)
        return self

    def out(self, *names: str, rank: int = 0) -> Tape:
        for name in names:
            tag = "grad_buffer" if name == "grads" else "default"
            self.add(ev.SaverPause(tag, name, 64, tag == "default", 1), rank)
        return self

    def back(self, *names: str, rank: int = 0) -> Tape:
        for name in names:
            tag = "grad_buffer" if name == "grads" else "default"
            self.add(ev.SaverResume(tag, name, 64, tag == "default", 1), rank)
        return self

    def reads(self, *names: str, rank: int = 0) -> Tape:
        for name in names:
            self.add(ev.Data("default", name, "read"), rank)
        return self

    def sends(self) -> Tape:
        return self.add(ev.Send("adapter", 64, "device", 1, ["adapter"]))

    # engines

    def release(self, *tags: str, rank: int = 0) -> Tape:
        self.add(ev.EngineRelease(list(tags)), rank, "engine")
        for tag in tags:
            self.add(ev.SaverPause(tag, f"engine.{tag}", 64, tag == "weights", 1), rank, "engine")
        return self

    def resume(self, *tags: str, rank: int = 0) -> Tape:
        self.add(ev.EngineResume(list(tags)), rank, "engine")
        for tag in tags:
            self.add(ev.SaverResume(tag, f"engine.{tag}", 64, tag == "weights", 1), rank, "engine")
        return self

    def request(self, version: int = 0, rank: int = 0, **facts: bool) -> Tape:
        self.add(ev.RequestBegin("adapter", version, **facts), rank, "engine")
        return self.add(ev.RequestEnd("adapter", version), rank, "engine")

    # remote calls

    def issue(self, method: str, rank: int = 0, owner: str = "", call: int = 1) -> Tape:
        return self.add(ev.CallIssue(method, call), rank, owner)

    def ack(self, rank: int = 0, owner: str = "", call: int = 1) -> Tape:
        return self.add(ev.Ack(call), rank, owner)

    # the verdict

    def judged(self) -> TraceJudged:
        return judge_events(self.events, RULES)

    def found(self, rule: str) -> set[str]:
        return {f.code for f in self.judged().findings if f.rule == rule}

    def met(self, rule: str, code: str) -> int:
        return self.judged().exercised[rule].get(code, 0)


# ---- the sync window (HO-04)


def window(ranks: int = 2, **more: Any) -> Tape:
    """cpu-peak, trained and asleep, engine weights about to come."""
    tape = Tape(peak_device="cpu", ranks=ranks, **more)
    tape.release(*ALL_TAGS).starts(*range(ranks))
    for rank in range(ranks):
        tape.begin("train", rank).end("train", rank).begin("sleep", rank).out("grads", "base", rank=rank)
        tape.end("sleep", rank)
    return tape


def test_in_the_window_the_trainer_may_hold_what_the_sync_reads() -> None:
    """On every rank, also where another rank does the reading, until each has been through its part."""
    tape = window().resume("weights")
    tape.begin("update_weights").reads("adapter").sends().out("adapter").end("update_weights")
    tape.begin("update_weights", 1).out("adapter", rank=1).end("update_weights", 1)
    assert tape.found("HO-04") == set()
    assert tape.met("HO-04", "more-than-the-sync-reads") == 1


def test_what_the_sync_does_not_read_is_found_in_the_window() -> None:
    tape = window().resume("weights").begin("update_weights").sends().out("adapter").end("update_weights")
    tape.begin("update_weights", 1).out("adapter", rank=1).end("update_weights", 1)
    assert tape.found("HO-04") == {"more-than-the-sync-reads"}


def test_the_window_ends_with_the_last_rank_and_then_nothing_may_be_held() -> None:
    tape = window().resume("weights").begin("update_weights").reads("adapter").sends().out("adapter")
    tape.end("update_weights").begin("update_weights", 1).end("update_weights", 1)
    assert tape.found("HO-04") == {"resident-together"}


def test_the_window_stays_open_while_nothing_was_sent() -> None:
    """A first, fruitless round of the sync does not end it."""
    tape = window(1).resume("weights").begin("update_weights").reads("adapter").end("update_weights")
    assert tape.found("HO-04") == set()
    tape.begin("update_weights").reads("adapter").sends().out("adapter").end("update_weights")
    assert tape.found("HO-04") == set()


def test_a_rollout_closes_a_window_without_a_sync() -> None:
    assert window().out("adapter").out("adapter", rank=1).resume("weights").request().found("HO-04") == set()
    assert window().resume("weights").request().found("HO-04") == {"more-than-the-sync-reads", "resident-together"}


def test_transport_buffers_are_allowed_in_the_window_and_not_during_generation() -> None:
    """A buffer is what a rank allocates during its part of the sync."""
    tape = window(1).out("adapter").resume("weights").begin("update_weights").alloc("bucket", "transport", "other")
    tape.sends().end("update_weights")
    assert tape.found("HO-04") == set()
    assert tape.resume("kv_cache", "cuda_graph").found("HO-06") == set()
    assert tape.request().found("HO-11") == {"trainer-resident"}


def test_weights_that_the_driver_never_releases_are_not_judged_in_cpu_peak() -> None:
    """By its claim, whatever the scenario's engine could do."""
    tape = Tape(peak_device="cpu", claims={"engine_releases": ["kv_cache"]}).starts().begin("train").end("train")
    judged = tape.judged()
    assert judged.exercised["HO-04"] == judged.exercised["HO-05"] == {}


# ---- outstanding acknowledgements (HO-07)


def test_calls_of_one_phase_overlap() -> None:
    tape = Tape(engines=2).issue("sleep").issue("sleep", 1).ack().ack(1)
    tape.issue("resume", 0, "engine").issue("resume", 1, "engine", call=7)
    assert tape.found("HO-07") == set()
    assert tape.met("HO-07", "started-early") == 2


@pytest.mark.parametrize("issued", ["engine", "plain"])
def test_another_phase_waits_for_the_last_acknowledgement(issued: str) -> None:
    """Also where the engine is called directly, with no acknowledgement of its own."""
    tape = Tape().issue("sleep").issue("sleep", 1).ack()
    _ = tape.issue("resume", 0, "engine") if issued == "engine" else tape.resume("weights")
    assert tape.found("HO-07") == {"started-early"}


def test_housekeeping_is_no_phase() -> None:
    """Clearing, draining, flushing and admitting move nothing between the sides."""
    tape = Tape().issue("clear_memory").issue("drain", 0, "engine").issue("sleep", 0, call=2)
    assert tape.found("HO-07") == set()


def test_an_error_is_an_acknowledgement_and_a_dead_rank_owes_none() -> None:
    tape = Tape().starts(0, 1).issue("wake_up").issue("wake_up", 1)
    tape.begin("wake_up").fails("wake_up").ack()
    tape.begin("wake_up", 1).add(ev.SaverFatal("resume", "default", "base", 1, "out-of-memory"), 1)
    assert tape.issue("sleep", 0, call=2).found("HO-07") == set()


# ---- start-up (HO-05)


def test_each_rank_starts_once_with_its_first_allocation() -> None:
    tape = Tape().starts(0, 1).alloc("late")
    assert tape.met("HO-05", "weights-out-at-start") == 2
    assert tape.release("weights").alloc("later").found("HO-05") == set()


def test_a_trainer_that_starts_outside_a_call_is_judged_too() -> None:
    """As one that a factory builds."""
    assert Tape().release("weights").alloc("base").found("HO-05") == {"weights-out-at-start"}
    assert Tape(peak_device="cpu").alloc("base").found("HO-05") == {"weights-in-at-start"}


def test_gpu_peak_weights_stay_while_some_rank_still_starts() -> None:
    tape = Tape().begin("init").alloc("base").release("weights")
    assert tape.found("HO-05") == {"weights-out-at-start"}
    assert Tape().starts().release("weights").found("HO-05") == set()


def test_weights_that_are_never_released_satisfy_the_start_in_gpu_peak() -> None:
    tape = Tape(claims={"engine_releases": ["kv_cache"]}).starts()
    assert (tape.found("HO-05"), tape.met("HO-05", "weights-out-at-start")) == (set(), 1)


# ---- the claimed resident set


def test_claimed_gradients_may_stay_and_others_may_not() -> None:
    for claimed, expected in ((["grads"], set()), ([], {"weights-before-grads"})):
        tape = Tape(claims={"resident_while_released": claimed}).starts().release("weights").resume("weights")
        assert tape.found("HO-01") == expected
    for claimed, expected in ((["grads", "adapters"], set()), (["grads"], {"trainer-resident"})):
        tape = Tape(claims={"resident_while_released": claimed}).starts().out("base").request()
        assert tape.found("HO-11") == expected


def test_an_owner_whose_resident_set_stays_is_not_half_released() -> None:
    for claimed, expected in ((["adapters"], set()), ([], {"half-released"})):
        tape = Tape(claims={"resident_while_released": claimed}).starts().begin("run", actor="driver")
        tape.begin("train").end("train").out("grads", "base").sends().end("run", actor="driver")
        assert tape.found("HO-09") == expected


# ---- the engine's manners (HO-15)


def test_a_redundant_resume_is_found_under_the_strict_server_and_counted_under_the_lenient_one() -> None:
    for server, expected in (("strict", {"redundant-resume"}), ("lenient", set())):
        tape = Tape(engine_server=server).resume("weights")
        tape.add(ev.EngineResume(["kv_cache"], ["weights"]), 0, "engine")
        assert tape.found("HO-15") == expected
        assert tape.met("HO-15", "redundant-resume") >= 2


# ---- deaths and errors (HO-10)


def death() -> Tape:
    return (
        Tape()
        .starts(0, 1)
        .begin("run", actor="driver")
        .begin("wake_up")
        .add(ev.SaverFatal("resume", "default", "base", 1, "out-of-memory"))
    )


def test_a_run_that_returns_after_a_death_swallows_it() -> None:
    assert death().end("run", actor="driver").found("HO-10") == {"death-swallowed"}
    raised = death().fails("run", actor="driver")
    assert (raised.found("HO-10"), raised.met("HO-10", "death-swallowed")) == (set(), 1)


def test_after_a_death_the_order_is_no_longer_judged() -> None:
    """What a driver does with the survivors is not HO-01's."""
    tape = death().fails("run", actor="driver").release("weights").out("base", rank=1)
    assert {f.rule for f in tape.judged().findings} == set()


def test_the_run_of_the_fault_is_not_the_recovery() -> None:
    fault = ev.Fault("trainer.sleep", "before")
    tape = Tape().starts().begin("run", actor="driver").add(fault).fails("run", actor="driver")
    assert tape.judged().exercised["HO-10"] == {}
    assert tape.begin("run", actor="driver").fails("run", actor="driver").found("HO-10") == {"not-recovered"}


def test_an_error_of_the_drivers_own_is_recovered_from_too() -> None:
    tape = Tape().starts().begin("run", actor="driver").fails("run", actor="driver")
    assert tape.judged().exercised["HO-10"] == {}
    assert tape.out("base").begin("close", actor="driver").end("close", actor="driver").found("HO-10") == {
        "left-half-released"
    }


def test_close_after_an_error_leaves_nothing_half_released_or_in_flight() -> None:
    def after() -> Tape:
        fault = ev.Fault("engine.generate", "before")
        return Tape().starts().begin("run", actor="driver").add(fault).fails("run", actor="driver")

    assert after().out("base").begin("close", actor="driver").end("close", actor="driver").found("HO-10") == {
        "left-half-released"
    }
    tape = after().add(ev.RequestBegin("adapter"), 0, "engine").begin("close", actor="driver")
    assert tape.end("close", actor="driver").found("HO-10") == {"left-half-released"}


# ---- versions, transport, refusals


def test_a_rollout_sees_what_was_synced_last() -> None:
    serve = ev.EngineServe("adapter", 2, 0)
    assert Tape(engines=2).starts().add(serve, 0, "engine").request(2).found("HO-09") == set()
    assert Tape(engines=2).starts().add(serve, 0, "engine").request(1, 1).found("HO-09") == {"stale-version"}
    assert Tape().starts().request(0, valid=False).found("HO-09") == {"stale-version"}


def test_transport_is_judged_at_the_next_wake_up_of_the_same_rank() -> None:
    tape = Tape().starts(0, 1).out("grads", "base", "adapter").begin("update_weights").alloc("bucket", "transport")
    tape.end("update_weights").begin("wake_up", 1)
    assert tape.met("HO-13", "transport-kept") == 0
    assert tape.begin("wake_up").found("HO-13") == {"transport-kept"}


def test_transport_of_a_sync_before_the_sleep_counts_although_less_is_held_than_then() -> None:
    def synced(*, frees: bool, replaces: bool = False) -> Tape:
        tape = Tape().starts().begin("update_weights").alloc("bucket", "transport").end("update_weights")
        if frees:
            tape.add(ev.SaverFree("transport", "bucket", 64, released=False))
        if replaces:
            tape.add(ev.SaverFree("grad_buffer", "grads", 64, released=False))
        return tape.out("base", "adapter").begin("wake_up")

    assert synced(frees=False).found("HO-13") == {"transport-kept"}
    assert synced(frees=True).found("HO-13") == set()
    assert synced(frees=False, replaces=True).found("HO-13") == set()


def test_a_critics_steps_owe_no_sync_and_its_memory_is_judged_as_the_trainers() -> None:
    tape = Tape(peak_device="cpu").starts().out("grads", "base", "adapter")
    tape.begin("init", 1, "critic").alloc("base", rank=1).end("init", 1, "critic").out("base", rank=1)
    tape.begin("train", 1, "critic").end("train", 1, "critic")
    tape.request(0)
    assert tape.found("HO-09") | tape.found("HO-11") == set()
    assert tape.back("base", rank=1).request(0).found("HO-11") == {"trainer-resident"}


def test_the_sync_window_does_not_wait_for_critics() -> None:
    tape = Tape(peak_device="cpu").release("weights").starts().out("grads", "base", "adapter")
    tape.begin("init", 1, "critic").alloc("base", rank=1).end("init", 1, "critic").out("base", rank=1)
    tape.resume("weights").begin("update_weights").end("update_weights")
    assert tape.met("HO-04", "more-than-the-sync-reads") == 1


def test_an_engine_that_gives_nothing_back_may_be_refused() -> None:
    """That is a run without rollout offload, and no word about LoRA."""
    tape = Tape(engine_releases=[]).begin("build", actor="driver").fails("build", actor="driver")
    assert tape.found("HO-08") == set()


def test_lora_is_refused_wherever_the_refusal_comes_from() -> None:
    """In the factory or in the run, as long as nothing was done before."""
    assert Tape().begin("build", actor="driver").fails("build", actor="driver").found("HO-08") == {"lora-refused"}
    built = Tape().begin("build", actor="driver").end("build", actor="driver").begin("run", actor="driver")
    assert built.fails("run", actor="driver").found("HO-08") == {"lora-refused"}
    ran = Tape().begin("run", actor="driver").starts().fails("run", actor="driver")
    assert ran.found("HO-08") == set()


def test_doing_nothing_counts_for_nothing() -> None:
    tape = Tape().begin("run", actor="driver").end("run", actor="driver").begin("close", actor="driver")
    assert not any(tape.end("close", actor="driver").judged().exercised.values())

"""HO-01 … HO-08: the order of a hand-off, and what may be on the device and on the host together.

Knows the sentences of these rules as folds over a whole run. Does not know which driver or scenario produced a trace.
The other half of the profile is in `handoff_state`.
"""

from __future__ import annotations

from types import MappingProxyType

from colocert.rules.fold import RunFold
from colocert.rules.run import CACHES, DEFAULT, ENGINE, GRADS, GRAPH, KV, WEIGHTS, Held, RunView
from colocert.trace.events import (
    Ack,
    AnyEvent,
    CallBegin,
    CallEnd,
    CallIssue,
    CallRaise,
    Data,
    EngineRelease,
    EngineResume,
    RequestBegin,
    SaverAlloc,
    SaverPause,
    SaverResume,
    Send,
)


def caches(tags: list[str]) -> list[str]:
    """The KV cache and graph tags among these."""
    return [tag for tag in tags if tag in CACHES]


class GpuPeakToRollout(RunFold):
    """HO-01: gpu-peak, train→rollout: gradients, engine weights, trainer, sync, KV and graphs, in that order.

    "Of the steps that occur": an engine whose weights never go is not waited for. Judged while no fault was injected:
    what a driver does to recover is HO-10's.
    """

    rule = "HO-01"
    by_kind = MappingProxyType({EngineResume: "_resumed", SaverPause: "_paused", Send: "_sent"})

    def idle(self) -> bool:
        return not self.view.gpu_peak

    def _paused(self, event: SaverPause) -> None:
        view = self.view
        if event.owner or event.tag != DEFAULT or WEIGHTS not in view.releases or view.faults or not view.started:
            return
        self.met("trainer-before-weights")
        if view.engine_without(WEIGHTS):
            self.found(event, "trainer-before-weights", "engine weights are resumed first", "they are released")

    def _sent(self, event: Send) -> None:
        view = self.view
        if WEIGHTS not in view.releases or view.faults or not view.started:
            return
        self.met("sync-before-weights")
        if view.engine_without(WEIGHTS):
            self.found(event, "sync-before-weights", "engine weights are resumed first", "they are released")

    def _resumed(self, event: EngineResume) -> None:
        view = self.view
        if view.faults or not view.started:
            return
        if WEIGHTS in event.tags and view.lora and "grads" not in view.claims.get("resident_while_released", ()):
            self.met("weights-before-grads")
            if view.trainer_holds(GRADS):
                self.found(
                    event, "weights-before-grads", f"{GRADS} is released before engine weights resume", "it is resident"
                )
        if caches(event.tags):
            self.met("caches-before-sync")
            self.met("caches-before-trainer")
            if view.trained:
                self.found(event, "caches-before-sync", "the sync comes before KV and graphs", "nothing was sent yet")
            if held := view.trainer_holds():
                self.found(
                    event,
                    "caches-before-trainer",
                    "the trainer is released before KV and graphs resume",
                    f"{view.tags_of(held)} is resident",
                )


class GpuPeakToTrain(RunFold):
    """HO-02: gpu-peak, rollout→train: KV and graphs, trainer, engine weights, computation, in that order."""

    rule = "HO-02"
    by_kind = MappingProxyType({SaverResume: "_trainer", EngineRelease: "_engine", Data: "_computed"})

    def idle(self) -> bool:
        return not self.view.gpu_peak

    def _computed(self, event: Data) -> None:
        view = self.view
        if view.calls.get(event.rank) != "train" or WEIGHTS not in view.releases or view.faults or not view.started:
            return
        self.met("computed-before-weights")
        if view.engine_has(WEIGHTS):
            expected = "engine weights are released first"
            self.found(event, "computed-before-weights", expected, "they are resident")

    def _engine(self, event: EngineRelease) -> None:
        view = self.view
        if WEIGHTS not in event.tags or view.faults or not view.started:
            return
        if view.lacks_trainer_default():
            self.found(event, "weights-before-trainer", "the trainer is resumed first", "it is released")
        else:
            self.met("weights-before-trainer")

    def _trainer(self, event: SaverResume) -> None:
        view = self.view
        if event.owner or event.tag != DEFAULT or view.faults or not view.started:
            return
        kv, graph = KV in view.releases, GRAPH in view.releases
        if kv or graph:
            self.met("trainer-before-caches")
            if (kv and view.engine_has(KV)) or (graph and view.engine_has(GRAPH)):
                what = ", ".join(sorted(view.engine_holds(*(tag for tag in CACHES if tag in view.releases))))
                self.found(event, "trainer-before-caches", "KV and graphs are released first", f"{what} is resident")


class CopiesNeverCoexist(RunFold):
    """HO-03: gpu-peak: trainer backup and engine mirror never coexist on the host."""

    rule = "HO-03"
    by_kind = MappingProxyType({SaverPause: "_paused"})

    def idle(self) -> bool:
        return not self.view.gpu_peak

    def _paused(self, event: SaverPause) -> None:
        view = self.view
        if not event.backup or view.faults:
            return
        self.met("copies-coexist")
        trainer, engine = view.host_bytes(""), view.host_bytes(ENGINE)
        if trainer and engine and not view.claims.get("retained_backup"):
            self.found(
                event,
                "copies-coexist",
                "host bytes hold the trainer's backup or the engine's mirror, never both",
                f"{trainer} bytes of backup and {engine} bytes of mirror",
            )


class CpuPeakApart(RunFold):
    """HO-04: cpu-peak: trainer memory and engine weights are never on the device together, but for the sync window.

    The window runs from the engine's weight resume to the end of the sync: every living rank has been through its part,
    and what was trained is sent. In it the trainer holds what the sync reads on any rank, and transport buffers.
    """

    rule = "HO-04"
    sees = (EngineResume, EngineRelease, SaverResume, SaverPause, Data, CallEnd, RequestBegin)

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.window = False
        self.synced: set[int] = set()
        self.reads: set[str] = set()
        self.held: set[Held] = set()

    def idle(self) -> bool:
        return self.view.gpu_peak or WEIGHTS not in self.view.releases

    def on(self, event: AnyEvent) -> None:
        view = self.view
        if view.gpu_peak or WEIGHTS not in view.releases or view.faults or not view.started:
            return
        if isinstance(event, EngineResume) and WEIGHTS in event.tags and not self.window:
            self.window, self.synced, self.reads, self.held = True, set(), set(), set()
        elif isinstance(event, Data) and self.window and view.calls.get(event.rank) == "update_weights":
            self.reads.add(event.alloc)
        elif self.window and self._closes(event):
            self.window = False
            self._judge_window(event)
        if self.window:
            self.held |= set(view.trainer_holds())
        elif not isinstance(event, Data):
            self._judge_apart(event)

    def _closes(self, event: AnyEvent) -> bool:
        if isinstance(event, CallEnd) and event.method == "update_weights":
            self.synced.add(event.rank)
            return self.view.ranks() <= self.synced and not self.view.trained
        if isinstance(event, CallEnd):
            return event.actor == "driver"
        return isinstance(event, (EngineRelease, RequestBegin))

    def _judge_window(self, event: AnyEvent) -> None:
        self.met("more-than-the-sync-reads")
        if extra := {h for h in self.held if h[2] not in self.reads}:
            self.found(
                event,
                "more-than-the-sync-reads",
                "in the sync window the trainer holds only what the sync reads",
                f"{self.view.tags_of(extra)} was resident",
            )

    def _judge_apart(self, event: AnyEvent) -> None:
        self.met("resident-together")
        held = self.view.trainer_holds()
        if held and self.view.engine_holds(WEIGHTS):
            self.found(
                event,
                "resident-together",
                "trainer memory and engine weights are never on the device together",
                f"{self.view.tags_of(held)} beside engine weights",
            )


class StartUp(RunFold):
    """HO-05: the side that starts second finds the other in the state that the mode prescribes."""

    rule = "HO-05"
    sees = (SaverAlloc, EngineRelease)

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.seen: set[int] = set()

    def on(self, event: AnyEvent) -> None:
        view = self.view
        if view.faults:
            return
        if isinstance(event, EngineRelease):
            if view.gpu_peak and WEIGHTS in event.tags and "init" in view.under_way:
                self.found(
                    event, "weights-out-at-start", "engine weights stay through initialisation", "they were released"
                )
        elif not event.owner and event.rank not in self.seen:
            self.seen.add(event.rank)
            self._starts(event)

    def _starts(self, event: AnyEvent) -> None:
        view = self.view
        if view.gpu_peak:
            self.met("weights-out-at-start")
            if view.engine_lacks(WEIGHTS):
                self.found(
                    event,
                    "weights-out-at-start",
                    "engine weights are resident while the trainer starts",
                    "they are released",
                )
        elif WEIGHTS in view.releases:
            self.met("weights-in-at-start")
            if view.engine_has(WEIGHTS):
                self.found(
                    event,
                    "weights-in-at-start",
                    "engine weights are released while the trainer starts",
                    "they are resident",
                )


class CachesLast(RunFold):
    """HO-06: KV and graphs are resumed after the sync has finished and the trainer is released."""

    rule = "HO-06"
    sees = (EngineResume,)

    def on(self, event: AnyEvent) -> None:
        view = self.view
        if not isinstance(event, EngineResume) or not caches(event.tags) or view.faults or not view.started:
            return
        self.met("before-sync")
        self.met("before-release")
        syncing = "update_weights" in view.under_way or "update_weights" in view.awaited
        if view.trained or syncing:
            self.found(
                event, "before-sync", f"{KV} resumes after the sync has finished", "weights were trained and not sent"
            )
        if held := view.trainer_holds():
            self.found(
                event,
                "before-release",
                f"{KV} resumes after the trainer is released",
                f"{view.tags_of(held)} is resident",
            )


PHASES = {
    "sleep": "trainer release",
    "offload_grad_buffer": "gradient release",
    "wake_up": "trainer resume",
    "train": "training",
    "update_weights": "sync",
    "init": "trainer start",
    "release": "engine release",
    "resume": "engine resume",
    "generate": "rollout",
}
"""Calls that are a phase; clearing caches, draining, admitting and flushing move nothing between the sides."""


class PhasesWait(RunFold):
    """HO-07: a phase starts only after every rank and engine acknowledged the one before."""

    rule = "HO-07"
    by_kind = MappingProxyType(
        {
            CallIssue: "_issued",
            CallBegin: "_begun",
            EngineRelease: "_released",
            EngineResume: "_resumed",
            RequestBegin: "_requested",
        }
    )

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.phase = ""

    def _begun(self, event: CallBegin) -> None:
        if event.actor != "driver":
            self._moves(event, event.method)

    def _issued(self, event: CallIssue) -> None:
        self._moves(event, event.method)

    def _released(self, event: EngineRelease) -> None:
        self._moves(event, "release")

    def _resumed(self, event: EngineResume) -> None:
        self._moves(event, "resume")

    def _requested(self, event: RequestBegin) -> None:
        self._moves(event, "generate")

    def _moves(self, event: AnyEvent, method: str) -> None:
        """What a driver's call moves; what an engine does is told as the call that it follows from."""
        phase = PHASES.get(method)
        if phase is None:
            return
        if phase != self.phase:
            self.met("started-early")
            self.phase = phase
        awaited = self.view.awaited
        if len(awaited) == 1 and method in awaited:
            return
        for other in awaited:
            if PHASES.get(other, phase) != phase:
                self._early(event, phase)
                break

    def _early(self, event: AnyEvent, phase: str) -> None:
        late = {PHASES.get(m, phase) for m in self.view.awaited} - {phase}
        self.found(
            event,
            "started-early",
            f"the {phase} starts after the {', '.join(sorted(late))} was acknowledged by all",
            "some have not acknowledged it",
        )


class RefusedConfigurations(RunFold):
    """HO-08: gpu-peak without the offloads it needs, or with an unsupported critic, raises before any effect."""

    rule = "HO-08"
    by_kind = MappingProxyType(
        {
            **dict.fromkeys(
                (SaverAlloc, SaverPause, SaverResume, EngineRelease, EngineResume, RequestBegin, Ack), "_effect"
            ),
            CallEnd: "_ended",
            CallRaise: "_ended",
        }
    )
    actors = frozenset({"driver"})

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.effect = ""

    def _effect(self, event: AnyEvent) -> None:
        if not self.effect and self.view.driver:
            self.effect = type(event).__name__

    def _ended(self, event: CallEnd | CallRaise) -> None:
        if event.actor == "driver" and event.method in ("build", "run"):
            self._closed(event)

    def _possible(self, event: CallEnd | CallRaise) -> None:
        if not self.view.config.get("engine_releases"):
            return  # an engine that gives nothing back has no rollout offload: refusing it is not refusing LoRA
        if isinstance(event, CallRaise) and not self.effect:
            self.found(event, "lora-refused", "LoRA in gpu-peak mode is not refused", f"it raised {event.error}")
        elif event.method == "run" and self.effect:
            self.met("lora-refused")

    def impossible(self) -> str:
        """Why the scenario's configuration cannot be run in gpu-peak mode, or nothing."""
        config, claims = self.view.config, self.view.claims
        if not self.view.gpu_peak:
            return ""
        if not config.get("offload_train", True):
            return "without train offload"
        if not config.get("offload_rollout", True):
            return "without rollout offload"
        if config.get("use_critic") and not claims.get("gpu_peak_with_critic"):
            return "with a critic"
        return ""

    def _closed(self, event: CallEnd | CallRaise) -> None:
        why = self.impossible()
        if not why:
            if self.view.gpu_peak and self.view.lora and not self.view.faults:
                self._possible(event)
            return
        if event.method == "build" and isinstance(event, CallEnd):
            return
        self.met("not-refused")
        if isinstance(event, CallEnd):
            self.found(event, "not-refused", f"gpu-peak {why} is refused", "it ran")
            return
        self.met("effect-before-refusal")
        if self.effect:
            self.found(
                event, "effect-before-refusal", "the refusal comes before any effect", f"{self.effect} came first"
            )

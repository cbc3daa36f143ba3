"""AS-01 … AS-06: what an adapter-only sync leaves where it is, and from where the others read.

Knows the sentences of these rules as folds over a whole run. Does not know which implementation or scenario produced a
trace. The other half of the profile is in `adapter_sync_served`.
"""

from __future__ import annotations

from collections.abc import Iterator

from colocert.rules.run import RunView
from colocert.rules.sync_state import HOST, MODEL, OPTIMIZER, POLICY, SyncFold, SyncState
from colocert.trace.events import AnyEvent, Believed, CallBegin, CallEnd, CallRaise, EngineServe, Move, SaverTouch, Send


class NoBaseBackload(SyncFold):
    """AS-01: an adapter-only sync backloads no frozen base, counted at the storage.

    It occurs where the base is off the device when the sync sends or has moved it there.
    """

    rule = "AS-01"

    def synced(self, event: CallEnd | CallRaise) -> None:
        state = self.state
        if state.adapter_only and state.sends and state.base_off(state.on_before):
            self.met("base-backloaded")

    def happened(self, event: AnyEvent) -> None:
        if isinstance(event, Move) and backloads(self, event) and self.state.adapter_only:
            self.found(event, "base-backloaded", "no byte of the frozen base comes back", f"{event.nbytes} bytes do")


def backloads(fold: SyncFold, event: Move) -> bool:
    """Whether model memory comes onto the device during a sync."""
    return fold.state.syncing and event.kind == MODEL and event.to != HOST and event.nbytes > 0


class OthersAreOff(SyncFold):
    """AS-02: when the engine takes what an adapter-only sync sent, the other models and the optimizer are off.

    Less what `resident_while_released` claims. What is exported earlier, while the engine is asleep, takes no room.
    """

    rule = "AS-02"

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.sent = False

    def happened(self, event: AnyEvent) -> None:
        state = self.state
        if isinstance(event, (CallBegin, Send)):
            self.sent = isinstance(event, Send) and state.syncing and state.adapter_only
        elif isinstance(event, EngineServe) and self.sent:
            self.sent = False
            self._taken(event)

    def _taken(self, event: EngineServe) -> None:
        state = self.state
        if others := [role for role in state.roles() if role not in (POLICY, "")]:
            self.met("others-resident")
            if held := [f"{role}: {', '.join(state.held(role))}" for role in others if state.held(role)]:
                self.found(event, "others-resident", "the other models are off the device", "; ".join(held))
        if OPTIMIZER not in state.kept:
            self.met("optimizer-resident")
            if held := state.held(POLICY, OPTIMIZER):
                self.found(event, "optimizer-resident", "the optimizer is off the device", f"{', '.join(held)} is on")


class ReadsValidMemory(SyncFold):
    """AS-03: merged, full-parameter and FSDP syncs read every tensor they send from valid memory.

    Colocated or not. A host copy is complete if it is what the storage holds.
    """

    rule = "AS-03"

    def happened(self, event: AnyEvent) -> None:
        state = self.state
        if not state.syncing or not self._other_kind():
            return
        if isinstance(event, SaverTouch):
            what = f"{event.owner}'s {event.alloc} was read while it was released"
            self.found(event, "emptied-storage", "what is sent is read where it is", what)
        elif isinstance(event, Send):
            self.met("emptied-storage")
            self.met("stale-copy")
            held = [state.contents.get((event.owner, name), "") for name in event.tensors]
            old = [n for n, now, sent in zip(event.tensors, held, event.contents, strict=False) if now != sent]
            if old:
                self.found(event, "stale-copy", "a host copy that is read is complete", f"{', '.join(old)} has changed")

    def _other_kind(self) -> bool:
        config = self.state.config
        return config.get("strategy") == "fsdp" or bool(config.get("merge_lora")) or not config.get("lora")


class ApartMovesNothing(SyncFold):
    """AS-04: a sync that is not colocated moves nothing."""

    rule = "AS-04"

    def synced(self, event: CallEnd | CallRaise) -> None:
        if not self.state.colocated and self.state.sends:
            self.met("moved")

    def happened(self, event: AnyEvent) -> None:
        if isinstance(event, Move) and event.nbytes and self.state.syncing and not self.state.colocated:
            what = f"{event.owner}'s {', '.join(event.tensors)} went to the {event.to}"
            self.found(event, "moved", "a sync that is not colocated moves nothing", what)


class FirstSyncBackloadsNothing(SyncFold):
    """AS-05: the first sync after building, with the base off the device since, needs no backload either."""

    rule = "AS-05"

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.worked = False

    def synced(self, event: CallEnd | CallRaise) -> None:
        if self.state.syncs == 1 and self.state.sends and self._applies():
            self.met("first-sync-backloads")

    def happened(self, event: AnyEvent) -> None:
        if isinstance(event, CallBegin):
            self.worked |= event.method in ("train_step", "forward")
        elif isinstance(event, Move) and backloads(self, event) and not self.state.syncs and self._applies():
            told = f"{event.nbytes} bytes of the base come back"
            self.found(event, "first-sync-backloads", "the first sync after building backloads nothing", told)

    def _applies(self) -> bool:
        state = self.state
        return not self.worked and state.adapter_only and state.base_off(state.on_before)


class FinishCopiesNothing(SyncFold):
    """AS-06: finishing a sync on an offloaded model copies 0 bytes; `believed()` equals residency at every return.

    Finishing is what comes after the last send. What is believed is judged once something was moved.
    """

    rule = "AS-06"

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.offloaded = False
        self.copied: list[Move] = []

    def happened(self, event: AnyEvent) -> None:
        state = self.state
        if isinstance(event, Send):
            self.offloaded, self.copied = state.base_off(state.on), []
        elif isinstance(event, Move) and state.syncing and self.offloaded:
            self.copied += [event] if (event.owner, event.kind) == (POLICY, MODEL) and event.nbytes else []
        for told in beliefs(state, event) if isinstance(event, Believed) else ():
            self.met("belief-differs")
            if told:
                self.found(event, "belief-differs", "what is believed is where the storages are", told)

    def synced(self, event: CallEnd | CallRaise) -> None:
        state = self.state
        if not state.colocated or not state.sends or not self.offloaded or isinstance(event, CallRaise):
            return
        self.met("copied-at-finish")
        if self.copied:
            told = f"{sum(move.nbytes for move in self.copied)} bytes of the model move after it"
            self.found(self.copied[0], "copied-at-finish", "the model was off the device when it was sent", told)


def beliefs(state: SyncState, event: Believed) -> Iterator[str]:
    """What is believed of each kind, as how it differs from where its storages are; empty where it does not.

    Nothing before something was moved. A kind that is in both places is not judged.
    """
    for key, released in event.released.items() if state.moved else ():
        role, _, kind = key.partition(".")
        there = {place in state.on for place, held in state.kinds.items() if place[0] == role and held == kind}
        if len(there) == 1:
            resident = True in there
            told = f"{key} is {'resident' if resident else 'released'} after {state.call}()"
            yield told if released is resident else ""

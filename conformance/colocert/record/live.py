"""Driving a live pair: its calls in order, and what the suite measures around them. Does not know rules.

    build KIND                       a new pair, on a device of its own; KIND (plain, hand-offs) says what it is for
    train BATCH [ADAPTER [hold]]     a training step; `hold` leaves its gradients pending
    rollout   training               a hand-off, and what every process holds then
    release OWNER   resume OWNER     its tags, one call each where they can go apart
    ask WHEN                         the prompts, under each adapter
    look WHEN                        what every process holds
    cycles N                         N times a hand-off and back, with nothing between
    fingerprint   state ADAPTER      digests that the pair gives
    renew ADAPTER                    its slot is given to a new adapter
    agreed WHAT                      ends the scenario, not run, where two runs, or two askings, do not agree
    close                            the pair's end; another `build` may follow

A call that raises, or a process that ends, ends the scenario. What the saver ended because it did not fit is written
for the rules to judge; anything else is `died`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from colocert.record.drive import NotRun, ProcessGone, TrainerShapeError
from colocert.record.scenarios import Scenario
from colocert.rig.contract import Claims
from colocert.rig.live_device import NoLiveDevice, device_name, lacking
from colocert.rig.live_rig import ADAPTER_METHODS, ENGINE, GIB, PAIR_METHODS, LiveConfig, LiveRig
from colocert.trace.events import (
    AnyEvent,
    CallBegin,
    CallEnd,
    CallRaise,
    Change,
    LossSeen,
    ProcessEnded,
    RunBegan,
    StateSeen,
    TagsMoved,
    TokensSeen,
)

ACTOR = "pair"
PROMPTS = ((3, 1, 4, 1), (2, 7, 1, 8), (1, 6, 1, 8))
SEED = 7
TRAINER_TAGS = ("grad_buffer", "default")
"""In the order in which a trainer releases them."""

GRACE = 1.0
"""Seconds after a call that raised within which the death of a process counts as its reason."""

ENGINE_TAGS = ("kv_cache", "cuda_graph", "weights")


class PairEnded(Exception):
    """A process of the pair has ended, as the trace says; nothing more can be asked of it."""


class LiveSession:
    """One scenario's pairs, one after the other. Calls raise `PairEnded` or `ProcessGone` where they cannot go on."""

    def __init__(self, rig: LiveRig, implementation: Any) -> None:
        self.rig, self.implementation = rig, implementation
        self.pair: Any = None
        self.number = self._calls = 0
        self.losses: list[list[tuple[int, str]]] = []
        self.asked: dict[str, list[list[int]]] = {}

    # ---- pairs

    def build(self, kind: str) -> None:
        """The factory. Raises what it raises, and `TrainerShapeError` for a pair without the calls of one."""
        self.number += 1
        self.losses.append([])
        self.rig.emit(RunBegan(self.number, kind))
        self.pair = self.rig.run(self.implementation.live(self.rig))
        wanted = [*PAIR_METHODS, *(ADAPTER_METHODS if self.rig.config.multi_lora else ())]
        missing = [m for m in wanted if not callable(getattr(self.pair, m, None))]
        if missing:
            raise TrainerShapeError(
                f"live(rig) must return an object with {', '.join(m + '()' for m in wanted)} (got "
                f"{type(self.pair).__name__} without {', '.join(m + '()' for m in missing)})"
            )
        self.rig.emit(self.rig.levels("training"))

    def close(self) -> None:
        """The pair's own end, and then that of whatever is left of it."""
        if self.pair is not None:
            self.call("close")
            self.pair = None
            self.rig.forget()

    def lacks(self, what: str) -> NoReturn:
        """Ends the scenario, not run."""
        self.rig.emit(Change("not-run", {"reason": what}))
        raise NotRun(what)

    # ---- calls

    def call(self, method: str, *args: Any, subject: str = "", **named: Any) -> Any:
        """What the pair's method returned."""
        self._calls += 1
        call, emit = self._calls, self.rig.emit
        emit(CallBegin(ACTOR, method, call, subject))
        try:
            value = self.rig.run(getattr(self.pair, method)(*args, **named))
        except Exception as error:
            emit(CallRaise(ACTOR, method, call, type(error).__name__, str(error)[:300]))
            self._alive(method, GRACE)
            raise ProcessGone(f"{method}() raised {type(error).__name__}: {error}") from error
        except BaseException as error:
            emit(CallRaise(ACTOR, method, call, type(error).__name__, str(error)[:300]))
            raise ProcessGone(f"{method}() ended the process with {type(error).__name__}: {error}") from error
        if method != "close":
            self._alive(method)
        emit(CallEnd(ACTOR, method, call))
        return value

    def _alive(self, method: str, grace: float = 0.0) -> None:
        """Raises for a process that has ended: `PairEnded` where the saver found no room for it, else `ProcessGone`.

        Its files close before the kernel says that it has ended, so whoever met that may be ahead by `grace` seconds.
        """
        end = time.monotonic() + grace
        while (death := self.rig.died()) is None and time.monotonic() < end:
            time.sleep(0.01)
        if death is None:
            return
        self.rig.emit(ProcessEnded(death.how, method, owner=death.owner))
        if death.how == "out-of-memory":
            raise PairEnded
        raise ProcessGone(f"the {death.owner} process ended in {method}() with {death.how}: {death.last_words}")

    # ---- steps

    def train(self, batch: int, adapter: str = "", *, hold: bool = False) -> None:
        """A training step, and its loss."""
        named: dict[str, Any] = {"adapter": adapter, "step": not hold} if adapter else {}
        loss = self.call("train_step", batch, subject=adapter, **named)
        told = float(loss).hex() if isinstance(loss, (int, float)) else f"not a number: {loss!r}"[:60]
        self.losses[-1].append((batch, told))
        self.rig.emit(LossSeen(batch, told, adapter))

    def hand_off(self, to: str) -> None:
        """To rollout or to training."""
        self.call(f"to_{to}")
        self.rig.emit(self.rig.levels(to))

    def move(self, op: str, owner: str) -> None:
        """Releases or resumes an owner's tags and measures what that does to the device."""
        for tags in self._apart(op, owner):
            regions = self.rig.run(self.pair.regions())
            stated = {tag: [int(n) for n in regions.get(owner, {}).get(tag, ())] for tag in tags}
            nbytes = sum(map(sum, stated.values()))
            before = self.rig.device.free()
            self.call(op, owner, list(tags), subject=f"{owner} {','.join(tags)}")
            after = self._settled(before + nbytes if op == "release" else before - nbytes, rising=op == "release")
            self.rig.emit(TagsMoved(op, owner, stated, before, after, self.rig.device.granule))

    def _settled(self, wanted: int, *, rising: bool) -> int:
        return self.rig.device.settled(lambda free: free >= wanted if rising else free <= wanted)

    def _apart(self, op: str, owner: str) -> list[tuple[str, ...]]:
        """The tags of each call: what is released by itself in real use is measured by itself."""
        claims = self.rig.claims
        if owner == ENGINE:
            tags = [tag for tag in ENGINE_TAGS if tag in claims.engine_releases]
            return [(tag,) for tag in (tags if op == "release" else reversed(tags))]
        mine = tuple(
            tag for tag in TRAINER_TAGS if tag != "grad_buffer" or "grads" not in claims.resident_while_released
        )
        if op == "release" and claims.early_grad_release and self.rig.config.lora:
            return [(tag,) for tag in mine]
        return [mine if op == "release" else tuple(reversed(mine))]

    def ask(self, when: str) -> None:
        """Every prompt under every adapter; without LoRA of the model as it is."""
        adapters: tuple[str | None, ...] = self.rig.config.adapters if self.rig.config.lora else (None,)
        for adapter in adapters:
            for prompt in PROMPTS:
                tokens = [int(t) for t in self.call("generate", list(prompt), SEED, adapter, subject=adapter or "")]
                self.asked.setdefault(when, []).append(tokens)
                self.rig.emit(TokensSeen(when, list(prompt), SEED, tokens, adapter or ""))

    def look(self, when: str) -> None:
        self.rig.emit(self.rig.levels(when))

    def cycles(self, times: int) -> None:
        """Without a look in between, which would take longer than a cycle."""
        for _ in range(times):
            self.call("to_rollout")
            self.call("to_training")

    def state(self, of: str, facts: Mapping[str, str]) -> None:
        self.rig.emit(StateSeen(of, {str(name): str(value) for name, value in facts.items()}))

    def agreed(self, what: str) -> None:
        """Ends the scenario where what is to be compared differs by itself."""
        if what == "losses":
            pairs = zip(self.losses[0], self.losses[1], strict=True)
            differ = next((n for n, (one, two) in enumerate(pairs, 1) if one != two), None)
            if differ is not None:
                one, two = self.losses[0][differ - 1][1], self.losses[1][differ - 1][1]
                self.lacks(
                    f"two runs without hand-offs must agree in their losses first (step {differ}: {one} and {two})"
                )
        elif self.asked["trained"] != self.asked["trained-again"]:
            self.lacks("two generations without a cycle between them must agree in their tokens first (they differ)")


def run_live(implementation: Any, claims: Claims, scenario: Scenario, sink: Callable[[AnyEvent], None]) -> None:
    """Takes every step of the scenario; events go to `sink` as they happen. Raises `NotRun` without the device."""
    if not hasattr(implementation, "live"):
        return
    peak = "gpu" if "gpu" in claims.peak_device else "cpu"
    try:
        device = device_name()
    except NoLiveDevice as error:
        raise NotRun(str(error)) from None
    config = {"peak_device": peak, "device": device, "capacity": GIB, "engine_releases": claims.engine_releases}
    rig = LiveRig(LiveConfig(**{"regions": {}, **config, **scenario.config}), claims, sink)
    session = LiveSession(rig, implementation)
    try:
        if why := lacking(device):
            session.lacks(why)
        for step in scenario.steps:
            take_step(session, step)
        session.close()
    except PairEnded:
        pass
    finally:
        with contextlib.suppress(Exception):
            if session.pair is not None:
                rig.run(session.pair.close())
        rig.close()


def take_step(session: LiveSession, step: str) -> None:
    """One step."""
    word, *rest = step.split()
    if word == "train":
        session.train(int(rest[0]), *rest[1:2], hold="hold" in rest)
    elif word in ("rollout", "training"):
        session.hand_off(word)
    elif word in ("release", "resume"):
        session.move(word, rest[0])
    elif word == "cycles":
        session.cycles(int(rest[0]))
    elif word == "fingerprint":
        session.state(word, session.call(word))
    elif word == "state":
        session.state(rest[0], session.call("adapter_state", rest[0], subject=rest[0]))
    elif word == "renew":
        session.call("renew_adapter", rest[0], subject=rest[0])
    else:
        getattr(session, word)(*rest)

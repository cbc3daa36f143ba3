"""What the rules of the group profile look at: the ranks after each event, and the group call under way.

Knows which ranks live, what each has released, and what each has answered. Does not know any rule's sentence.
"""

from __future__ import annotations

from colocert.rules.fold import RunFold
from colocert.rules.run import GRADS, RunView
from colocert.trace.events import (
    AnyEvent,
    CallBegin,
    CallEnd,
    CallRaise,
    Change,
    Fault,
    GroupUse,
    SaverAlloc,
    SaverFatal,
    SaverFree,
    SaverPause,
    SaverResume,
    SaverTouch,
)

RANK_METHOD = {
    "onload": "wake_up",
    "offload": "sleep",
    "offload_grad_buffer": "offload_grad_buffer",
    "clear_memory": "clear_memory",
    "train": "train",
    "update_weights": "update_weights",
}
"""The phases of a group, and the call of a rank that each stands for."""

COMPUTES = ("train", "update_weights")
SEEN = (
    CallBegin,
    CallEnd,
    CallRaise,
    Change,
    Fault,
    GroupUse,
    SaverAlloc,
    SaverFatal,
    SaverFree,
    SaverPause,
    SaverResume,
    SaverTouch,
)


class Ranks:
    """The ranks after each event, and what each has answered in the group call under way.

    `lost`: processes that ended or hang. `outcome`: in this group call, by rank and method, whether it last raised.
    `took_part`: live ranks at the beginning of this call that were neither lost nor replaced in it. `named`: the ranks
    that the error being raised tells of.
    """

    def __init__(self) -> None:
        self.tags: dict[int, dict[str, str]] = {}
        self.out: dict[int, set[str]] = {}
        self.incarnation: dict[int, int] = {}
        self.lost: set[int] = set()
        self.lost_now: set[int] = set()
        self.replaced_now: set[int] = set()
        self.phase = ""
        self.in_group = False
        self.took_part: set[int] = set()
        self.inside: dict[int, str] = {}
        self.outcome: dict[tuple[int, str], bool] = {}
        self.named: set[int] = set()

    def live(self) -> list[int]:
        return sorted(self.tags.keys() - self.lost)

    def released(self, rank: int) -> frozenset[str]:
        """The tags of which the rank has released something."""
        return frozenset(self.tags[rank][name] for name in self.out[rank])

    def agree(self) -> bool:
        """Whether all live ranks have released the same."""
        return len({self.released(rank) for rank in self.live()}) <= 1

    def shown(self) -> str:
        """What each live rank has released, for a message."""
        return "; ".join(f"rank {r}: {', '.join(sorted(self.released(r))) or 'nothing'}" for r in self.live())

    def raised(self) -> set[int]:
        """Live ranks whose last answer to some method, in this group call, was an error."""
        return {rank for (rank, _), failed in self.outcome.items() if failed and rank in self.took_part}

    def reached(self, rank: int) -> bool:
        """Whether the call under way has got to the rank: it was called, or what is asked of it already holds."""
        if (rank, RANK_METHOD[self.phase]) in self.outcome:
            return True
        released, all_tags = self.released(rank), frozenset(self.tags[rank].values())
        if self.phase == "onload":
            return not released
        if self.phase == "offload":
            return released == all_tags
        return self.phase == "offload_grad_buffer" and GRADS in released

    def apply(self, event: AnyEvent) -> None:
        """Moves the state past one event."""
        rank = event.rank
        if isinstance(event, Change):
            self._change(event)
        elif isinstance(event, (SaverFatal, SaverTouch)) or _loses(event):
            self._lose(rank)
        elif isinstance(event, SaverAlloc):
            self.tags.setdefault(rank, {})[event.alloc] = event.tag
            self.out.setdefault(rank, set())
        elif isinstance(event, SaverPause):
            self.out[rank].add(event.alloc)
        elif isinstance(event, (SaverResume, SaverFree)):
            self.out[rank].discard(event.alloc)
        elif isinstance(event, (CallBegin, CallEnd, CallRaise)):
            self._call(event)

    def _call(self, event: CallBegin | CallEnd | CallRaise) -> None:
        begins = isinstance(event, CallBegin)
        if event.actor == "group":
            self.in_group = begins
            if begins:
                self.phase = event.method
                self.took_part = set(self.live())
                self.lost_now, self.replaced_now, self.named = set(), set(), set()
                self.outcome = {}
        elif begins:
            self.inside[event.rank] = event.method
        else:
            self.inside.pop(event.rank, None)
            self.outcome[event.rank, event.method] = isinstance(event, CallRaise)

    def _change(self, event: Change) -> None:
        if event.what == "rank.started":
            self.tags[event.rank], self.out[event.rank] = {}, set()
            self.incarnation[event.rank] = event.facts["incarnation"]
            self.lost.discard(event.rank)
            self.inside.pop(event.rank, None)
            self.took_part.discard(event.rank)
            if event.facts["incarnation"]:
                self.replaced_now.add(event.rank)
        elif event.what == "rank.ended":
            self._lose(event.rank)
        elif event.what == "group.raised":
            self.named = set(event.facts["ranks"])

    def _lose(self, rank: int) -> None:
        if rank not in self.lost:
            self.lost_now.add(rank)
        self.lost.add(rank)
        self.took_part.discard(rank)
        self.inside.pop(rank, None)


def _loses(event: AnyEvent) -> bool:
    """Whether the suite made the rank end or hang here."""
    return isinstance(event, Fault) and event.when in ("hang", "killed")


class GroupFold(RunFold):
    """A fold over the state of the ranks. A base: it has no rule of its own."""

    sees = SEEN

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.ranks = Ranks()

    def on(self, event: AnyEvent) -> None:
        self.ranks.apply(event)
        if isinstance(event, (CallEnd, CallRaise)) and event.actor == "group":
            self.ended(event)
        else:
            self.happened(event)

    def ended(self, event: CallEnd | CallRaise) -> None:
        """A call of the group returned or raised."""

    def happened(self, event: AnyEvent) -> None:
        """Anything else."""

"""GR-01 … GR-03: calls over a group of ranks, some of which fail, hang, die or are replaced.

Knows the sentences of these rules as folds over a whole run. Does not know which group or scenario produced a trace,
nor through what the ranks were called.
"""

from __future__ import annotations

from colocert.rules.group_state import COMPUTES, RANK_METHOD, GroupFold
from colocert.rules.run import RunView
from colocert.trace.events import AnyEvent, CallBegin, CallEnd, CallRaise, Change, GroupUse


class ReachesEveryRank(GroupFold):
    """GR-01: a group call reaches every live rank, returns after the last, and hides no rank's error.

    A rank that had not begun when the call ended was left out, unless it begins later: then the call returned early.
    A call that raises before any rank has got it was refused as a whole, which is not judged here.
    """

    rule = "GR-01"

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.open: dict[int, tuple[CallEnd | CallRaise, str]] = {}

    def happened(self, event: AnyEvent) -> None:
        if isinstance(event, CallBegin) and event.actor != "group" and event.rank in self.open:
            self._settle(event.rank, event.method)
        elif isinstance(event, Change) and event.what == "call.overdue":
            self.found(event, "overdue", "a rank that does not answer is an error within the deadline", "no end")
        elif isinstance(event, Change) and event.what == "group.closed":
            left = [*event.facts["processes"], *event.facts["shared_memory"]]
            if left or self.ranks.incarnation:  # a group that started no rank has cleared nothing up
                self.met("left-behind")
            if left:
                self.found(event, "left-behind", "nothing of the ranks outlives close()", ", ".join(left))

    def ended(self, event: CallEnd | CallRaise) -> None:
        ranks = self.ranks
        if event.method not in RANK_METHOD:
            return
        method = RANK_METHOD[event.method]
        begun = {r for r in ranks.took_part if ranks.inside.get(r) == method}
        answered = {r for r in ranks.took_part if ranks.reached(r)}
        for rank in sorted(ranks.took_part) if begun or answered or isinstance(event, CallEnd) else ():
            self.met("rank-left-out")
            self.met("returned-early")
            if rank in ranks.inside:
                told = f"rank {rank} is still in {ranks.inside[rank]}()"
                self.found(event, "returned-early", "the call ends after the last live rank has answered", told)
            elif rank not in answered:
                self.open[rank] = (event, method)
        if ranks.lost_now:
            self.met("overdue")
        self._errors(event)

    def _errors(self, event: CallEnd | CallRaise) -> None:
        ranks = self.ranks
        raised, lost = ranks.raised(), ranks.lost_now - ranks.replaced_now
        if not raised and not lost:
            return
        self.met("error-hidden")
        expected = "the call raises, and what it raises tells every failed rank's error"
        if isinstance(event, CallEnd):
            told = ", ".join(f"rank {r}" for r in sorted(raised | lost))
            self.found(event, "error-hidden", expected, f"{told} failed, and the call returned")
        elif len(raised | lost) > 1 and (hidden := raised - ranks.named):
            told = ", ".join(f"rank {r}" for r in sorted(hidden))
            self.found(event, "error-hidden", expected, f"{told} failed too, which {event.error} does not tell")

    def _settle(self, rank: int, method: str) -> None:
        event, wanted = self.open.pop(rank)
        again = self.ranks.in_group and RANK_METHOD.get(self.ranks.phase) == wanted
        if method == wanted and not again:
            told = f"rank {rank} begins {method}() afterwards"
            self.found(event, "returned-early", "the call ends after the last live rank has answered", told)
        else:
            self._left_out(event, rank, wanted)

    def _left_out(self, event: CallEnd | CallRaise, rank: int, method: str) -> None:
        told = f"rank {rank} did not get {method}()"
        self.found(event, "rank-left-out", "the call reaches every live rank", told)

    def end(self) -> None:
        for rank, (event, method) in sorted(self.open.items()):
            self._left_out(event, rank, method)


class RanksAgree(GroupFold):
    """GR-02: after a partial failure all live ranks agree on what is released before the next phase.

    The next phase starts where the first rank computes or sends; of a phase that only moves memory, what counts is
    where it ends: moving everybody to one state is how ranks come to agree.
    """

    rule = "GR-02"

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.failed = False
        self.computing = False

    def happened(self, event: AnyEvent) -> None:
        if not isinstance(event, CallBegin):
            return
        if event.actor == "group":
            self.computing = False
        elif not self.computing and event.method in COMPUTES and event.method == self.ranks.phase:
            self.computing = True
            self._check(event)

    def ended(self, event: CallEnd | CallRaise) -> None:
        ranks = self.ranks
        if event.method not in RANK_METHOD:
            return
        if isinstance(event, CallEnd):
            self._check(event)
            self.failed = False
        elif ranks.raised() or ranks.lost_now:
            self.failed = True

    def _check(self, event: AnyEvent) -> None:
        if not self.failed or len(self.ranks.live()) < 2:
            return
        self.met("ranks-disagree")
        if not self.ranks.agree():
            self.found(event, "ranks-disagree", "all live ranks have released the same", self.ranks.shown())
            self.failed = False


class JoinsAsPrescribed(GroupFold):
    """GR-03: a replacement joins in the others' state, with its base marked invalid; the old process is not used.

    It has joined when the call that started it ends.
    """

    rule = "GR-03"

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.doubtful: set[int] = set()
        self.marked: set[int] = set()
        self.gone: set[str] = set()
        self.known_gone: dict[int, set[str]] = {}

    def happened(self, event: AnyEvent) -> None:
        rank = event.rank
        if isinstance(event, Change):
            self._change(event)
        elif isinstance(event, CallBegin) and event.actor != "group":
            self.known_gone[rank] = set(self.gone)
            if rank in self.doubtful and event.method in COMPUTES:
                self._computes(event)
        elif isinstance(event, GroupUse) and self.gone:
            self.met("old-connection-used")
            if event.name in self.known_gone.get(rank, ()):
                told = f"rank {rank} uses {event.name}"
                self.found(event, "old-connection-used", "a replaced process is not used any more", told)

    def _change(self, event: Change) -> None:
        if event.what == "rank.started" and event.facts["incarnation"]:
            self.doubtful.add(event.rank)
            self.marked.discard(event.rank)
            self.gone.add(f"rank-{event.rank}.{event.facts['incarnation'] - 1}")
        elif event.what == "base.invalid":
            self.marked.add(event.rank)
        elif event.what == "old.call":
            told = f"{event.facts['method']}() reaches the process that rank {event.rank} had before"
            self.found(event, "old-connection-used", "a replaced process is not used any more", told)

    def _computes(self, event: CallBegin) -> None:
        self.met("base-trusted")
        self.doubtful.discard(event.rank)
        if event.rank not in self.marked:
            told = f"rank {event.rank} begins {event.method}() with the base it was built with"
            self.found(event, "base-trusted", "the base of a replacement is marked invalid first", told)

    def ended(self, event: CallEnd | CallRaise) -> None:
        ranks = self.ranks
        others = [r for r in ranks.live() if r not in ranks.replaced_now]
        states = {ranks.released(r) for r in others}
        if isinstance(event, CallRaise) or len(states) != 1:
            return
        (prescribed,) = states
        for rank in sorted(ranks.replaced_now - ranks.lost):
            self.met("joins-in-another-state")
            if ranks.released(rank) != prescribed:
                self.found(
                    event,
                    "joins-in-another-state",
                    f"rank {rank} has released {', '.join(sorted(prescribed)) or 'nothing'}, as the others",
                    f"{', '.join(sorted(ranks.released(rank))) or 'nothing'} is released",
                )

"""The group of trainer ranks: every call goes to all of them, and whatever happens to one is told of all.

Knows which ranks live, what they were last asked to release, and how they come to agree. Does not know what a rank is
or how it is reached: `Ranks` is a port, with Ray (`real.ray_group`) or local processes (`rank_processes`) behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from colocert_reference.ports import DEFAULT

AWAKE, GRADS_OUT, ASLEEP = "awake", "grads out", "asleep"
START_SECONDS = 50.0


class RankLost(RuntimeError):
    """A rank's process has ended, or it did not answer in time and was ended."""


class GroupError(RuntimeError):
    """Some ranks or engines failed; all others have answered. `errors` are by index."""

    def __init__(self, call: str, errors: Mapping[int, Exception]) -> None:
        text = "; ".join(f"{i}: {type(e).__name__}: {e}" for i, e in sorted(errors.items()))
        super().__init__(f"{call}() failed on {text}")
        self.errors = dict(errors)


class Rank(Protocol):
    """One rank's process."""

    async def call(self, method: str, *args: Any) -> Any:
        """Raises what the rank raised, or `RankLost` once its process has ended."""

    def kill(self) -> None:
        """Ends the process, whatever it is doing. May be repeated."""


class Ranks(Protocol):
    """Where ranks come from."""

    async def start(self, rank: int) -> Rank:
        """A new process for this rank, ready to be called."""


class Group:
    """N ranks called as one.

    Timeline of a call: agree, if a call before it failed on some ranks; call every live rank; await the last; raise
    one `GroupError` that names every rank that failed. A rank that does not answer within `deadline` is ended. A rank
    that was lost is named by every call until `replace()` has put a new process in its place.

    Which ranks have released what is asked of them, never remembered. A half-made change is completed, not undone.
    """

    def __init__(self, ranks: Ranks, count: int, deadline: float) -> None:
        self.ranks, self.count, self.deadline = ranks, count, deadline
        self.live: dict[int, Rank] = {}
        self.lost: dict[int, RankLost] = {}
        self.wanted = AWAKE
        self.unsure = False

    async def start(self) -> None:
        """Starts every rank. If one does not start, none stays."""
        try:
            made = await asyncio.gather(*(self._started(rank) for rank in range(self.count)))
            self.live = dict(enumerate(made))
        except BaseException:
            self.close()
            raise

    # ---- the calls of the group

    async def onload(self) -> None:
        await self._move("wake_up", AWAKE)

    async def offload(self) -> None:
        await self._move("sleep", ASLEEP)

    async def offload_grad_buffer(self) -> None:
        await self._agree()
        await self._move("offload_grad_buffer", ASLEEP if self.wanted == ASLEEP else GRADS_OUT)

    async def clear_memory(self) -> None:
        await self._agree()
        await self._everyone("clear_memory")

    async def train(self) -> None:
        await self._agree()
        await self._move("train", AWAKE)

    async def update_weights(self) -> None:
        await self._agree()
        await self._everyone("update_weights")

    async def replace(self, rank: int) -> None:
        """Puts a new process in the place of this rank, in the state of the others, known to all of them."""
        if rank in self.live:
            self._lose(rank, RankLost(f"rank {rank} is being replaced"))
        self.lost.setdefault(rank, RankLost(f"rank {rank} is being replaced"))
        await self._agree(without=rank)
        new = await self._started(rank)
        try:
            await self._join(rank, new)
        except BaseException:
            new.kill()
            raise

    def close(self) -> None:
        """Ends every process. May be repeated."""
        for rank in self.live.values():
            rank.kill()
        self.live.clear()

    # ---- how

    async def _started(self, rank: int) -> Rank:
        return await asyncio.wait_for(self.ranks.start(rank), START_SECONDS)

    async def _move(self, method: str, wanted: str) -> None:
        """A call that changes what is released."""
        self.wanted = wanted
        await self._everyone(method)

    async def _everyone(self, method: str) -> None:
        """Calls every live rank; ranks that were lost before are named with those that fail now."""
        _, errors = await self._ask(method, self.live)
        if errors:
            self.unsure = True
        errors = {**self.lost, **errors}
        if errors:
            raise GroupError(method, errors)

    async def _ask(
        self, method: str, ranks: Mapping[int, Rank], *args: Any
    ) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Calls these ranks and awaits all, at most for the deadline: results and errors by rank."""
        if not ranks:
            return {}, {}
        tasks = {rank: asyncio.ensure_future(port.call(method, *args)) for rank, port in ranks.items()}
        _, late = await asyncio.wait(tasks.values(), timeout=self.deadline)
        results: dict[int, Any] = {}
        errors: dict[int, Exception] = {}
        for rank, task in tasks.items():
            if task in late:
                task.cancel()
                errors[rank] = RankLost(f"rank {rank} did not answer {method}() within {self.deadline:g} s")
            elif (error := task.exception()) is None:
                results[rank] = task.result()
            elif isinstance(error, Exception):
                errors[rank] = error
            else:
                raise error
            lost = errors.get(rank)
            if isinstance(lost, RankLost):
                self._lose(rank, lost)
        return results, errors

    def _lose(self, rank: int, why: RankLost) -> None:
        """The rank is out of the group, and its process ended."""
        port = self.live.pop(rank, None)
        if port is not None:
            port.kill()
            self.lost[rank] = why

    async def _agree(self, without: int | None = None) -> None:
        """After a failure: all live ranks release the same before anything else is started.

        Raises `GroupError` if they cannot be brought there; it names also the ranks that were lost in the attempt.
        """
        if not self.unsure:
            return
        held, errors = await self._ask("released", self.live)
        if not errors and len(set(map(tuple, held.values()))) > 1:
            errors = await self._bring(self.live, self.wanted)
        if errors:
            raise GroupError("agree", {**{r: e for r, e in self.lost.items() if r != without}, **errors})
        self.unsure = False

    async def _bring(self, ranks: Mapping[int, Rank], wanted: str) -> dict[int, Exception]:
        """Brings ranks from any state into this one; a rank that is there already is left alone."""
        held, errors = await self._ask("released", ranks)
        asleep = {r: p for r, p in ranks.items() if DEFAULT in held.get(r, ())}
        answering = {r: p for r, p in ranks.items() if r in held}
        if wanted == ASLEEP:
            moves = [("sleep", answering)]
        elif wanted == AWAKE:
            moves = [("wake_up", answering)]
        else:
            moves = [("wake_up", asleep), ("offload_grad_buffer", answering)]
        for method, which in moves:
            _, failed = await self._ask(method, {r: p for r, p in which.items() if r not in errors})
            errors |= failed
        return errors

    async def _join(self, rank: int, new: Rank) -> None:
        """A new process takes part: in the others' state, its base marked invalid, every connection made anew."""
        errors = await self._bring({rank: new}, await self._state())
        _, failed = await self._ask("invalidate_base", {rank: new})
        everyone = {**self.live, rank: new}
        addresses, unknown = await self._ask("address", everyone)
        _, unconnected = await self._ask("connect", everyone, addresses)
        if errors := {**errors, **failed, **unknown, **unconnected}:
            raise GroupError("replace", errors)
        self.live = dict(sorted(everyone.items()))
        self.lost.pop(rank, None)

    async def _state(self) -> str:
        """What the live ranks have released; with none left, what they were last asked for."""
        held, _ = await self._ask("released", dict(list(self.live.items())[:1]))
        for released in held.values():
            return ASLEEP if DEFAULT in released else GRADS_OUT if released else AWAKE
        return self.wanted

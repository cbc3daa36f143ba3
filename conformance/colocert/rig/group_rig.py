"""The rig of a train group: how a framework builds its ranks, and the time that a call of the group may take.

Knows each rank's plan and how many processes it has had. Does not know what the ranks do or how they are called.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from colocert.rig.contract import Claims, Config
from colocert.rig.group_rank import address
from colocert.rig.rig import Rig
from colocert.trace.events import AnyEvent

GROUP_METHODS = ("onload", "offload", "offload_grad_buffer", "clear_memory", "train", "update_weights")
"""What `train_group(rig)` returns has these, `close()`, and with the claim `replacement` also `replace(rank)`.

What a group call raises tells which ranks failed: the errors of the ranks are reachable from it (`errors` by rank,
`exceptions`, `__cause__` …), or `ranks` names them.
"""


class GroupRig(Rig):
    """The rig that `train_group` gets. `config.ranks` is the size; the ranks live in processes of the framework's own.

    `deadline`: seconds for which a group call may wait for a rank; one that does not answer counts as failed. Here
    time is real: coroutines run on an ordinary event loop.
    """

    def __init__(
        self,
        config: Config,
        claims: Claims,
        sink: Callable[[AnyEvent], None],
        plans: Mapping[int, Sequence[tuple[str, str, int]]],
        deadline: float,
    ) -> None:
        self._plans = plans
        self._processes = [0] * config.ranks
        self._loop: asyncio.AbstractEventLoop | None = None
        self.deadline = deadline
        super().__init__(config, claims, sink)

    def start(self) -> None:
        """Nothing: the memory is the ranks'."""

    def rank_arguments(self, rank: int) -> tuple[int, str, dict[str, Any]]:
        """What `RankDouble` is built with: plain data. Asked again, it describes the replacement of that rank."""
        incarnation = self._processes[rank]
        self._processes[rank] += 1
        plan = {
            "config": self.config.facts(),
            "incarnation": incarnation,
            "addresses": {r: address(r, max(0, n - 1)) for r, n in enumerate(self._processes)},
            "faults": [] if incarnation else [list(fault) for fault in self._plans.get(rank, ())],
        }
        return rank, str(self.directory), plan

    def run(self, value: Any) -> Any:
        """Runs a coroutine to its end on this rig's loop; passes any other value through."""
        if not inspect.isawaitable(value):
            return value
        if self._loop is None:
            self._loop = asyncio.new_event_loop()

        async def waited() -> Any:
            return await value

        return self._loop.run_until_complete(waited())

    def close(self) -> None:
        """Ends the loop with what is still waiting on it, and removes the ranks' files."""
        if self._loop is not None:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.close()
            self._loop = None
        super().close()

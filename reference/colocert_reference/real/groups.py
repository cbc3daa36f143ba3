"""The groups port over torch.distributed and megatron's parallel_state.

Knows how groups are made, destroyed and made again with the same arguments, and where megatron's objects keep
references to them. Does not know memory or the lifecycle.

    RealGroups(world) -> rebuild()                          the first time, before the model exists
    attach(ddp, optimizer)                                  whose references a later rebuild replaces
    tear_down() ... rebuild() ... tear_down() ...

A group object is dead once it is destroyed, and a rebuilt one is another object. Modules, DDP, its buffers and bucket
groups and the optimizer each hold some; after a rebuild every one of these points to the successor. Groups succeed each
other by their place in the order of creation, which is the same for the same arguments.

A rebuild is collective: it ends with all ranks having met, so one that fails on one rank fails on all, by its timeout.
The key-value store that ranks meet in is made once and kept, so no port has to be free again at the rebuild.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection


@dataclass(frozen=True, kw_only=True)
class World:
    """What the groups are made with, kept for every rebuild. `parallel`: for `initialize_model_parallel`, verbatim.

    `address` is where rank 0 serves the store; a world of one needs none. `timeout_minutes` holds for every group.
    """

    backend: str = "gloo"
    rank: int = 0
    size: int = 1
    address: tuple[str, int] = ("127.0.0.1", 0)
    timeout_minutes: int = 10
    parallel: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tensor(self) -> int:
        """How many ranks share one model. They are neighbours: megatron counts tensor-parallel ranks fastest."""
        return int(self.parallel.get("tensor_model_parallel_size", 1))

    @property
    def data_rank(self) -> int:
        """Which share of the data this rank trains on."""
        return self.rank // self.tensor

    def store(self) -> dist.Store:
        if self.size == 1:
            return dist.HashStore()
        host, port = self.address
        if not port:
            raise ValueError(f"address must name the port of rank 0's store in a world of {self.size} (got port 0)")
        return dist.TCPStore(host, port, self.size, is_master=self.rank == 0, timeout=self.timeout)

    @property
    def timeout(self) -> timedelta:
        return timedelta(minutes=self.timeout_minutes)


class RealGroups:
    """Torn down and rebuilt as a whole: destroying the default group takes all others with it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._store = world.store()
        self._attempts = self._meetings = self._said = 0
        self._roots: tuple[object, ...] = ()
        self._last: list[dist.ProcessGroup] = []

    def attach(self, *roots: object) -> None:
        """The objects whose references a rebuild replaces, and all that they lead to."""
        self._roots = roots

    def tear_down(self) -> None:
        if parallel_state._global_process_group_list is not None:
            parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()

    def rebuild(self) -> None:
        if dist.is_initialized() and parallel_state.is_initialized():
            return
        self.tear_down()  # what a failed rebuild, or somebody else, left half there
        self._attempts += 1
        try:
            self._create()
        except BaseException:
            self.tear_down()
            raise
        now = self._alive()
        assert not self._last or len(self._last) == len(now), f"{len(self._last)} groups became {len(now)}"
        rebind(self._roots, dict(zip(map(id, self._last), now)))  # noqa: B905  # empty the first time
        self._last = now

    @contextlib.contextmanager
    def on_host(self) -> Iterator[Callable[[torch.Tensor, int], torch.Tensor]]:
        """Gathers shards on the host (tensor, dimension) while the groups may be gone; every rank of a model enters.

        By gloo, over a connection of its own that is made through the store and is gone at the end.
        """
        world, size = self.world, self.world.tensor
        if size == 1:
            yield lambda shard, dim: shard
            return
        self._meetings += 1
        store = dist.PrefixStore(f"host/{self._meetings}/{world.data_rank}", self._store)
        group = dist.ProcessGroupGloo(store, world.rank % size, size, world.timeout)

        def whole(shard: torch.Tensor, dim: int) -> torch.Tensor:
            own = shard.contiguous()
            parts = [torch.empty_like(own) for _ in range(size)]
            group.allgather([[part.view(torch.uint8) for part in parts]], [own.view(torch.uint8)]).wait()
            return torch.cat(parts, dim=dim)

        yield whole

    def everyone(self, said: Any) -> list[Any]:
        """What each rank says, as JSON through the store: awake or asleep. Every rank calls."""
        world, now = self.world, self._said + 1
        self._said = now
        said = json.dumps(said)
        if world.size == 1:
            return [json.loads(said)]
        self._store.set(f"said/{now}/{world.rank}", said)
        keys = [f"said/{now}/{rank}" for rank in range(world.size)]
        self._store.wait(keys, world.timeout)
        if now > 2:  # whoever speaks now has read what was said before last
            self._store.delete_key(f"said/{now - 2}/{world.rank}")
        return [json.loads(self._store.get(key)) for key in keys]

    def arguments(self) -> list[dict[str, Any]]:
        """What each group of this rank is made with, read back from torch, in order of creation."""
        return [_arguments(group) for group in self._alive()]

    def _create(self) -> None:
        world, store = self.world, dist.PrefixStore(f"groups/{self._attempts}", self._store)
        dist.init_process_group(
            world.backend, store=store, rank=world.rank, world_size=world.size, timeout=world.timeout
        )
        parallel_state.initialize_model_parallel(
            **{"distributed_timeout_minutes": world.timeout_minutes, **world.parallel}
        )
        store.set(f"ready/{world.rank}", "")
        store.wait([f"ready/{rank}" for rank in range(world.size)], world.timeout)

    def _alive(self) -> list[dist.ProcessGroup]:
        if not dist.is_initialized():
            return []
        made = parallel_state._global_process_group_list or []  # begins with None for the default group
        world = dist.group.WORLD
        assert world is not None
        return [world, *(group for group in made if group is not None)]


def _arguments(group: dist.ProcessGroup) -> dict[str, Any]:
    backend = dist.get_backend(group)
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    options: Any = group._get_backend(device).options
    return {
        "name": group.group_desc,
        "ranks": dist.get_process_group_ranks(group),
        "backend": backend,
        "timeout": options._timeout.total_seconds(),
        "options": {"is_high_priority_stream": getattr(options, "is_high_priority_stream", False)},
    }


def rebind(roots: tuple[object, ...], successors: Mapping[int, dist.ProcessGroup]) -> None:
    """Replaces by identity each group that `roots` lead to, through megatron's objects, modules, dicts and lists."""
    seen: set[int] = set()
    waiting: list[Any] = list(roots) if successors else []
    while waiting:
        owner = waiting.pop()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        slots = owner if isinstance(owner, (dict, list)) else getattr(owner, "__dict__", {})
        for key, value in list(slots.items() if isinstance(slots, dict) else enumerate(slots)):
            if id(value) in successors:
                slots[key] = successors[id(value)]
            elif _holds_groups(value):
                waiting.append(value)


def _holds_groups(value: object) -> bool:
    if isinstance(value, (dict, list, torch.nn.Module, ProcessGroupCollection)):
        return True
    return type(value).__module__.startswith("megatron.")

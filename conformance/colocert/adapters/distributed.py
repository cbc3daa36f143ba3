"""`torch.distributed` over the group double, for frameworks that wrap it: patched in as a module's `dist`.

Knows how groups are made and torn down there. Everything else of `torch.distributed` does nothing.
"""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from colocert.rig import ProcessGroups

WORLD = "world"
NCCL_TIMEOUT = 600
"""torch's default for a new NCCL group, in seconds."""


class Distributed:
    """One rank's view. `known`: the groups that existed at the start, with their arguments, by name.

    torch names no group on creation, so a new group is recognised by its ranks.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups, self.known = groups, groups.arguments()
        self.P2POp = type("P2POp", (), {})

    def adopt(self) -> None:
        """Runs every group that exists, but the world's, through `new_group`, which a framework may have wrapped."""
        for args in [args for name, args in self.known.items() if name != WORLD]:
            self.new_group(
                ranks=args["ranks"],
                backend=args["backend"],
                timeout=timedelta(seconds=args["timeout"]),
                pg_options=args["options"],
            )

    def new_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,
        **other: Any,
    ) -> SimpleNamespace:
        """Creates a group, or returns the one that exists."""
        alike = (name for name, args in self.known.items() if args["ranks"] == ranks and name != WORLD)
        name = next(alike, f"group{ranks}")
        if name not in self.groups.alive:
            seconds = int(timeout.total_seconds()) if timeout else NCCL_TIMEOUT
            self.groups.create(name, ranks=ranks, backend=backend or "nccl", timeout=seconds, options=pg_options)
        return SimpleNamespace(desc=name, ranks=ranks)

    def destroy_process_group(self, group: SimpleNamespace) -> None:
        """Tears a group down; for one that is gone it raises what torch raises."""
        if group.desc not in self.groups.alive:
            raise ValueError(f"Invalid process group specified: {group.desc} is gone")
        self.groups.destroy(group.desc)

    def get_rank(self, group: Any = None) -> int:
        return 0

    def get_world_size(self, group: Any = None) -> int:
        return len(group.ranks) if group else 1

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None

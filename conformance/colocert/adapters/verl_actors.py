"""The other processes of verl's weight sync: what a worker, the manager and the rollout's client call in them.

Knows their methods and what each does to the rig's engine, with the lines of verl 0.9.1 that say so. Does not know who
calls them when, worker groups or rules.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from colocert.rig.sync_engine import SyncEngine


@dataclass
class Wire:
    """What lies between the processes. `adapter` is the name that an adapter is served as, `each` reads any iterator.

    `carried`: sent to another device and not yet received. `sent`: in the engine's process. `loaded`: what the last
    load was named, "" for a base.
    """

    engine: SyncEngine
    adapter: str
    each: Callable[[Any], AsyncIterator[tuple[str, str]]]
    carried: list[tuple[str, str]] = field(default_factory=list)
    sent: dict[str, str] = field(default_factory=dict)
    loaded: str = ""


class Call:
    """A call of a remote actor, made when it is awaited."""

    def __init__(self, made: Callable[[], Any]) -> None:
        self.made = made

    def __await__(self) -> Generator[Any, Any, Any]:
        made = self.made()
        return (yield from made.__await__()) if isinstance(made, Awaitable) else made


class Handle:
    """`handle.method.remote(...)`, as Ray's."""

    def __init__(self, actor: object) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.actor, name)
        return SimpleNamespace(remote=lambda *args, **kwargs: Call(lambda: method(*args, **kwargs)))


def get(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """As `ray.get`: the results, in order. Nothing here waits for anything else."""
    results = []
    for call in calls:
        try:
            next(call.__await__())
        except StopIteration as done:
            results.append(done.value)
        else:
            raise RuntimeError("a call of an actor must end without waiting here")
    return results


class Server:
    """vLLM's server and the replica before it, in the file vllm_rollout/vllm_async_server.py. One of each."""

    workers = ()

    def __init__(self, wire: Wire) -> None:
        self.wire, self.engine = wire, wire.engine

    async def wake_up(self, tags: list[str]) -> None:
        """Lines 836-841."""
        self.engine.resume(tags)
        self.engine.flush()

    async def sleep(self) -> None:
        """Lines 853-858. The depth is not told apart."""
        self.engine.release()

    async def clear_kv_cache(self) -> None:
        """Lines 864-873."""
        self.engine.flush()

    async def release_kv_cache(self) -> None:
        """Lines 882-883: all is released, and the weights come back."""
        self.engine.release()
        self.engine.resume(["weights"])

    async def resume_kv_cache(self) -> None:
        """Lines 891-892."""
        self.engine.resume(["kv_cache"])
        self.engine.flush()

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self.engine.drain()

    async def resume_generation(self) -> None:
        self.engine.admit()

    async def set_global_steps(self, global_steps: int) -> None:
        """Line 924. It starts with none, so the first step is one more than that."""
        self.engine.serve(self.wire.loaded, global_steps + 1)

    async def collective_rpc(self, method: str, timeout: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """`update_weights_from_ipc` in the workers: an adapter where it comes with its configuration, else a base."""
        only = bool(kwargs.get("peft_config")) and bool(kwargs.get("base_sync_done"))
        self.wire.loaded = self.wire.adapter if only else ""
        self.engine.load("adapter" if only else "base", self.wire.sent, self.wire.loaded)


class Group:
    """A worker group of one worker."""

    world_size = 1

    def __init__(self, update_weights: Callable[..., Awaitable[Any]]) -> None:
        self.update = update_weights

    def update_weights(self, **kwargs: Any) -> list[Awaitable[Any]]:
        return [Call(lambda: self.update(**kwargs))]

    def execute_checkpoint_engine(self, method: list[str]) -> list[Awaitable[Any]]:
        return [Call(lambda: None)]


class Transport:
    """The bucket between two processes on a device, and the checkpoint engine between two devices: what goes in."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    async def async_send_weights(self, weights: Any) -> None:
        self.wire.sent = {name: content async for name, content in self.wire.each(weights)}

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        self.wire.carried = [item async for item in self.wire.each(weights)]

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, str]]:
        for item in self.wire.carried:
            yield item

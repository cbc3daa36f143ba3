"""The reference engine over ports of its own: turns, drains and copies, without the kit."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from colocert_reference.engine import (
    AdapterRequired,
    Engine,
    EngineNotReady,
    EngineSettings,
    UnknownAdapter,
)

TAGS = frozenset({"weights", "kv_cache", "cuda_graph"})


class Ports:
    """A log of what is done, tokens that tell the adapter they came from, and a model that waits to be let go on."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.go = asyncio.Event()
        self.go.set()
        self.broken = False
        self.finished = 0

    def pause(self, tag: str) -> None:
        self.log.append(f"-{tag}")

    def resume(self, tag: str) -> None:
        self.log.append(f"+{tag}")

    async def write_base(self, source: Any) -> None:
        if self.broken:
            raise OSError("half-way")
        self.log.append("base")

    async def copied(self, source: Mapping[str, Any]) -> Mapping[str, Any]:
        await asyncio.sleep(0)
        if self.broken:
            raise OSError("half-way")
        return dict(source)

    async def compute(self, request: Any, adapter: Mapping[str, Any] | None, cached: Any) -> Any:
        await self.go.wait()
        self.log.append("token")
        return SimpleNamespace(token=(adapter or {}).get("v"), entry=cached or len(self.log))

    def done(self, request: Any) -> None:
        self.finished += 1


def made(**settings: Any) -> tuple[Engine, Ports]:
    ports = Ports()
    wanted = {"tags": TAGS, "lora": True, "mirror": True, "base_requests": False, **settings}
    return Engine(ports, EngineSettings(**wanted)), ports


def ask(adapter: str | None = "a", prompt: str = "p", tokens: int = 2) -> Any:
    return SimpleNamespace(adapter=adapter, prompt=prompt, tokens=tokens)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def started(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    task = asyncio.ensure_future(work)
    for _ in range(5):
        await asyncio.sleep(0)
    return task


def test_memory_goes_caches_first_and_comes_back_weights_first_and_only_once() -> None:
    async def story() -> None:
        engine, ports = made()
        await engine.release(["weights", "kv_cache", "cuda_graph"])
        await engine.release(["weights"])
        await engine.resume(["kv_cache", "weights"])
        assert not engine.ready()
        await engine.resume(TAGS)
        await engine.resume(TAGS)
        assert engine.ready()
        assert ports.log == ["-kv_cache", "-cuda_graph", "-weights", "+weights", "+kv_cache", "+cuda_graph"]
        with pytest.raises(ValueError, match=r"must be of .* \(got \['kv'\]\)"):
            await engine.release(["kv"])

    run(story())


def test_a_release_waits_for_requests_under_way_and_admits_none_meanwhile() -> None:
    async def story() -> None:
        engine, ports = made()
        await engine.load_adapter("a", 1, {"v": 1})
        ports.go.clear()
        under_way = await started(engine.generate(ask()))
        release = await started(engine.release(["kv_cache"]))
        with pytest.raises(EngineNotReady):
            await engine.generate(ask())
        ports.go.set()
        assert await under_way == [1, 1]
        await release
        assert ports.log == ["token", "token", "-kv_cache"]

    run(story())


def test_a_request_keeps_the_version_that_it_began_with() -> None:
    async def story() -> None:
        engine, ports = made()
        await engine.load_adapter("a", 1, {"v": 1})
        ports.go.clear()
        under_way = await started(engine.generate(ask()))
        await engine.load_adapter("a", 2, {"v": 2})
        ports.go.set()
        assert await under_way == [1, 1]
        assert await engine.generate(ask()) == [2, 2]

    run(story())


def test_a_prefix_is_kept_by_version_and_not_by_a_request_that_began_before_a_flush() -> None:
    async def story() -> None:
        engine, ports = made()
        await engine.load_adapter("a", 1, {"v": 1})
        await engine.generate(ask())
        await engine.load_adapter("a", 2, {"v": 2})
        await engine.generate(ask())
        assert [key[1:] for key in engine.prefixes.entries] == [("a", 1, "p"), ("a", 2, "p")]
        ports.go.clear()
        under_way = await started(engine.generate(ask(prompt="q")))
        await engine.flush()
        ports.go.set()
        await under_way
        assert engine.prefixes.entries == {}

    run(story())


def test_after_a_failed_base_nothing_is_served_until_one_succeeds() -> None:
    async def story() -> None:
        engine, ports = made()
        await engine.load_adapter("a", 1, {"v": 1})
        ports.broken = True
        with pytest.raises(OSError, match="half-way"):
            await engine.update_base(1, {})
        ports.broken = False
        assert not engine.ready()
        with pytest.raises(EngineNotReady):
            await engine.generate(ask())
        await engine.update_base(2, {})
        assert await engine.generate(ask()) == [1, 1]

    run(story())


def test_after_a_failed_load_only_that_adapter_is_not_served() -> None:
    async def story() -> None:
        engine, ports = made()
        await engine.load_adapter("a", 1, {"v": 1})
        await engine.load_adapter("b", 1, {"v": 5})
        ports.broken = True
        with pytest.raises(OSError, match="half-way"):
            await engine.load_adapter("a", 2, {})
        with pytest.raises(EngineNotReady):
            await engine.generate(ask())
        assert await engine.generate(ask("b")) == [5, 5]

    run(story())


def test_weights_without_a_mirror_are_invalid_after_a_release() -> None:
    async def story() -> None:
        engine, _ = made(mirror=False)
        await engine.release(["weights"])
        with pytest.raises(EngineNotReady, match="resume them first"):
            await engine.update_base(1, {})
        with pytest.raises(EngineNotReady, match="resume them first"):
            await engine.load_adapter("a", 1, {})
        await engine.resume(["weights"])
        assert not engine.ready()
        await engine.update_base(1, {})
        assert engine.ready()

    run(story())


def test_who_asks_for_an_adapter_that_is_not_there_or_for_none_gets_an_error() -> None:
    async def story() -> None:
        engine, _ = made()
        with pytest.raises(UnknownAdapter, match="a must be loaded"):
            await engine.generate(ask())
        with pytest.raises(AdapterRequired):
            await engine.generate(ask(None))
        engine, _ = made(base_requests=True)
        assert await engine.generate(ask(None)) == [None, None]

    run(story())


def test_a_request_that_fails_is_no_longer_under_way() -> None:
    async def story() -> None:
        engine, ports = made()
        await engine.load_adapter("a", 1, {"v": 1})
        ports.go.clear()
        under_way = await started(engine.generate(ask()))
        under_way.cancel()
        await asyncio.wait([under_way])
        await asyncio.wait_for(engine.release(["kv_cache"]), 1.0)
        assert (ports.log, ports.finished) == (["-kv_cache"], 1)

    run(story())

"""Remote calls on a virtual clock: what Ray's handles look like to a driver, without Ray and without waiting.

Knows time, delays and the order of acknowledgements. Does not know what is called.

The loop's time jumps to the next thing that is due, so that a scenario of minutes takes microseconds; the delays come
from a seed, so that each seed is one order in which calls take effect and are acknowledged.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

LONGEST_DELAY = 1.0
"""Seconds of virtual time between issue and effect, and between effect and acknowledgement, at most."""


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits for time to pass: it moves the loop's time instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is not None and timeout > 0:
            self.now += timeout
            timeout = 0
        return super().select(timeout)


class _JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


class VirtualClock:
    """One scenario's event loop and its source of delays."""

    def __init__(self, seed: int) -> None:
        self._loop = _JumpingLoop()
        # A driver that never asks for a result never sees its error: that is for the rules, not for a log.
        self._loop.set_exception_handler(lambda loop, context: None)
        self._random = random.Random(seed)

    def run(self, awaitable: Any) -> Any:
        """Runs an awaitable to its end."""

        async def waited() -> Any:
            return await awaitable

        return self._loop.run_until_complete(waited())

    def task(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts a coroutine of the driver's own; it goes on whenever something is waited for."""
        return self._loop.create_task(coroutine)

    def start(self, work: Callable[[], Any]) -> asyncio.Task[Any]:
        """Starts work that takes effect after a delay and is acknowledged after another."""
        before, after = self._random.uniform(0, LONGEST_DELAY), self._random.uniform(0, LONGEST_DELAY)

        async def task() -> Any:
            await asyncio.sleep(before)
            try:
                result = work()
                return await result if inspect.isawaitable(result) else result
            finally:
                await asyncio.sleep(after)

        return self._loop.create_task(task())

    def close(self) -> None:
        """Cancels what nobody waited for and closes the loop."""
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()


class Remote:
    """A handle on an object, as `ray.remote` gives it: `handle.method.remote(...)`."""

    def __init__(self, obj: object, clock: VirtualClock) -> None:
        self._obj, self._clock = obj, clock

    def __getattr__(self, name: str) -> RemoteMethod:
        return RemoteMethod(self._obj, name, self._clock)


class RemoteMethod:
    """One method of a handle."""

    def __init__(self, obj: object, name: str, clock: VirtualClock) -> None:
        self._obj, self._name, self._clock = obj, name, clock
        getattr(obj, name)

    def remote(self, *args: Any, **kwargs: Any) -> asyncio.Task[Any]:
        """Issues the call; the result, or its error, comes with the acknowledgement."""
        issued = getattr(self._obj, "issue", None)
        if issued is None:
            return self._clock.start(lambda: getattr(self._obj, self._name)(*args, **kwargs))
        call = issued(self._name)
        task = self._clock.start(lambda: self._obj.perform(self._name, call, args, kwargs))  # type: ignore[attr-defined]
        task.add_done_callback(lambda _: self._obj.acknowledge(call))  # type: ignore[attr-defined]
        return task

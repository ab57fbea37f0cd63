"""The gate between a thread that moves a lease's bytes and the event loop that ends the lease."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


def post(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> bool:
    """call_soon_threadsafe that says False instead of raising when the loop has been closed."""
    try:
        loop.call_soon_threadsafe(call, *args)
    except RuntimeError:
        return False
    return True


class Fence:
    """Open until closed, once. A thread goes in for one bounded piece of work (a copy, a recv, a send) at a time:

        if fence.enter():
            try: ...touch the blocks...
            finally: fence.leave()

    After `await fence.shut()` nobody is inside and nobody gets in: the blocks may belong to someone else. The loop
    never blocks on a thread; it is told when the last one leaves.
    """

    __slots__ = ("_closed", "_inside", "_lock", "_waiters")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._closed = False
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    @property
    def closed(self) -> bool:
        return self._closed

    def enter(self) -> bool:
        with self._lock:
            if self._closed:
                return False
            self._inside += 1
            return True

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside or not self._waiters:
                return
            waiters, self._waiters = self._waiters, []
        for loop, waiter in waiters:
            post(loop, _resolve, waiter)

    def close(self) -> None:
        """Nobody gets in from now on; somebody may still be inside. From any thread."""
        with self._lock:
            self._closed = True

    async def shut(self) -> None:
        """close(), and wait until nobody is inside."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._closed = True
            if not self._inside:
                return
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.append((loop, waiter))
        await waiter


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)

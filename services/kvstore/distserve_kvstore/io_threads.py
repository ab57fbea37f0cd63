"""Threads for calls that block on a disk or an object store."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_Job = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]


class IoThreads:
    """A few daemon threads that take calls in order. Unlike an executor's they hold up no exit: a call that hangs in
    the kernel for ever ends with the process.

    A call that was begun can't be stopped: cancelling the wait for it leaves it running, so what it works on stays its
    own until it returns. Who needs to know keeps the task that waits, and waits in peace (`asyncio.shield`).
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._began: list[float | None] = [None] * num_threads  # of each thread the call that it runs; each its own
        for i in range(num_threads):
            threading.Thread(target=self._run, args=(i,), name=f"{name}-{i}", daemon=True).start()

    @property
    def longest_s(self) -> float:
        """For how long the oldest of the calls under way has been so, whether or not anybody waits for it."""
        now = time.monotonic()
        return max((now - began for began in self._began if began is not None), default=0.0)

    async def run(self, call: Callable[[], T]) -> T:
        """What `call` returns or raises."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._jobs.put((loop, done, call))
        return await done

    def close(self) -> None:
        """No further calls. Those under way go on; nobody waits for them here."""
        for _ in self._began:
            self._jobs.put(None)

    def _run(self, number: int) -> None:
        while (job := self._jobs.get()) is not None:
            loop, done, call = job
            result: Any = None
            error: BaseException | None = None
            self._began[number] = time.monotonic()
            try:
                result = call()
            except BaseException as e:  # handed to who waits
                error = e
            self._began[number] = None
            try:
                loop.call_soon_threadsafe(_settle, done, result, error)
            except RuntimeError:
                return  # the loop is closed: the process ends


async def on_daemon(call: Callable[[], T]) -> T:
    """One call on a thread of its own that holds up no exit."""
    thread = IoThreads("once", 1)
    try:
        return await thread.run(call)
    finally:
        thread.close()


def _settle(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)

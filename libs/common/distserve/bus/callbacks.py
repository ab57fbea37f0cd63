"""How messages become running callbacks. Every bus starts them through this file, so that the rules are the same."""

import asyncio
import logging

from distserve.bus.base import BusStats, Callback, Delivery

MAX_RUNNING = 4096
"""Callbacks of one subscription that may run at once. Beyond it messages wait in the subscription, which is bounded
too: what is over its pending limit is dropped and counted."""

_log = logging.getLogger(__name__)


class Callbacks:
    """Runs one subscription's callback: as tasks that start in order of arrival, or inline, one after another."""

    def __init__(self, subject: str, callback: Callback, stats: BusStats, *, inline: bool) -> None:
        self._subject = subject
        self._callback = callback
        self._stats = stats
        self.inline = inline
        self.closed = False
        self._slots = asyncio.Semaphore(MAX_RUNNING)
        self._running: set[asyncio.Task[None]] = set()

    async def deliver(self, delivery: Delivery) -> None:
        """Start the callback; returns at once unless it is inline or MAX_RUNNING callbacks run already."""
        if self.inline:
            await self._run(delivery)
            return
        await self._slots.acquire()
        task = asyncio.create_task(self._run(delivery))
        self._running.add(task)
        task.add_done_callback(self._done)

    async def all_started(self) -> None:
        """Returns once every callback has started that deliver() has made a task for: tasks run in the order in which
        they were made."""
        await asyncio.sleep(0)

    def close(self) -> None:
        """No callback starts after this, not even one whose task exists already. Running ones go on."""
        self.closed = True

    async def cancel(self, timeout_s: float) -> None:
        """Close, and cancel what runs; returns when it has ended, or after timeout_s."""
        self.close()
        mine = asyncio.current_task()
        running = [task for task in self._running if task is not mine]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=timeout_s)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._slots.release()

    async def _run(self, delivery: Delivery) -> None:
        if self.closed:
            return
        try:
            await self._callback(delivery)
        except Exception:
            self._stats.callback_errors += 1
            _log.exception("the callback for %s failed on a message to %s", self._subject, delivery.subject)

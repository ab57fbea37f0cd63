"""Endless tasks of a service, tied to a scope."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

log = logging.getLogger(__name__)


@asynccontextmanager
async def background(*coroutines: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run them until the scope ends, then cancel them and wait. One that fails takes the service down: it asks the
    process to drain (SIGTERM), since a worker whose loop is dead must not stay registered."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("%s failed: the service ends", task.get_coro(), exc_info=error)
            os.kill(os.getpid(), signal.SIGTERM)

    tasks = [asyncio.create_task(c) for c in coroutines]
    for task in tasks:
        task.add_done_callback(ended)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=10.0)

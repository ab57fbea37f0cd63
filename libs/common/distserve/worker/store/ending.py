"""Waiting for what must be over before a block has another owner."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Iterable
from typing import Any

STOP_S = 5.0  # a transfer that is given up has ended by then, or never will


async def ended(coroutine: Coroutine[Any, Any, None]) -> None:
    """Waits for it to its end, also when we are cancelled meanwhile; then raises CancelledError. For what has a
    deadline of its own."""
    ending = asyncio.ensure_future(coroutine)
    await all_ended([ending])
    ending.result()


async def all_ended(tasks: Iterable[asyncio.Future[Any]], *, timeout_s: float = math.inf) -> set[asyncio.Future[Any]]:
    """As ended(). Whatever has become of them: that is for the caller to see. Those that have not ended after
    timeout_s, if any."""
    waiting = {task for task in tasks if not task.done()}
    deadline = time.monotonic() + timeout_s
    cancelled = False
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        try:
            _, waiting = await asyncio.wait(waiting, timeout=None if math.isinf(left_s) else left_s)
        except asyncio.CancelledError:
            cancelled = True
            waiting = {task for task in waiting if not task.done()}
    if cancelled:
        raise asyncio.CancelledError
    return waiting

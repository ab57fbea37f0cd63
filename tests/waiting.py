"""Waiting for a condition, with a deadline, instead of sleeping and hoping."""

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], bool], timeout_s: float = 10.0, what: str = "the condition") -> None:
    """Returns once `condition()` is true; fails the test when it isn't within timeout_s."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s} s"
        await asyncio.sleep(0.005)

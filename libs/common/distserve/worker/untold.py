"""Spans of what is over, which wait for a moment in which nobody waits for the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


def _never() -> bool:
    return False


class Untold:
    """Belongs to the event loop. What is added is told once and in order: a stay's end comes after its parts. One of
    them takes about a tenth of a millisecond, and hundreds come at once where a batch ends together."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, one: Callable[[], None]) -> None:
        self._waiting.append(one)

    async def tell(self, until: Callable[[], bool] = _never) -> None:
        """What is here by now, until that is true; between any two of them the loop turns to whatever else there is."""
        for _ in range(len(self._waiting)):
            if not self._waiting or until():  # another may be telling, too
                return
            self._waiting.popleft()()
            await asyncio.sleep(0)

    def tell_all(self) -> None:
        """At once: for the end, when nothing is computed any more."""
        while self._waiting:
            self._waiting.popleft()()

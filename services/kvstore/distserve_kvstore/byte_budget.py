"""So many bytes of memory and no more, for work of which some may run at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ByteBudget:
    """Belongs to the event loop. Given out in order of asking; what is larger than the whole goes alone."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num_used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def taken(self, num_bytes: int) -> AsyncIterator[None]:
        """Of these bytes, while inside."""
        num_bytes = min(num_bytes, self.num_bytes)
        if self._waiting or self.num_used + num_bytes > self.num_bytes:
            await self._turn(num_bytes)
        else:
            self.num_used += num_bytes
        try:
            yield
        finally:
            self._give_back(num_bytes)

    async def _turn(self, num_bytes: int) -> None:
        mine = (num_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(mine)
        try:
            await mine[1]
        except asyncio.CancelledError:
            if mine in self._waiting:
                self._waiting.remove(mine)
                self._give_back(0)  # those behind it may fit
            else:  # it had its turn already
                self._give_back(num_bytes)
            raise

    def _give_back(self, num_bytes: int) -> None:
        self.num_used -= num_bytes
        while self._waiting and self.num_used + self._waiting[0][0] <= self.num_bytes:
            wanted, turn = self._waiting.popleft()
            self.num_used += wanted
            if not turn.cancelled():
                turn.set_result(None)

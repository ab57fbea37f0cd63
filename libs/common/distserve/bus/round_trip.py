"""Waiting until a server has taken everything that a client sent before."""

import asyncio
from collections.abc import Awaitable, Callable

_LATE_S = 60  # an answer to a ping that is later than this will not come


class RoundTrips:
    """Those under way on one bus."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    async def __call__(self, ping: Callable[[int], Awaitable[None]], timeout_s: float) -> None:
        """`ping(timeout_s)` returns with the answer to one ping. Raises TimeoutError, and what ping raises.

        Two pings, since the client writes a ping at once but what was sent before it a moment later: the first one's
        answer shows that all of that is on its way, the second one's that it has arrived. Pings are left running when
        they take longer: cancelled, they would leave a dead future behind that ends the client's reader when the
        server's late answer comes.
        """

        async def ping_twice() -> None:
            await ping(_LATE_S)
            await ping(_LATE_S)

        task = asyncio.create_task(ping_twice())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if not done:
            task.add_done_callback(lambda t: t.cancelled() or t.exception())
            raise TimeoutError
        task.result()

    def cancel(self) -> None:
        """Once the connection is closed: nothing answers any more."""
        for task in self._running:
            task.cancel()

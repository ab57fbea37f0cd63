"""Whether a bus has its connection now: the same bookkeeping on every bus."""

import asyncio
import time

from distserve.bus.exchange import timed_out
from distserve.errors import BusError, Field


class Online:
    """Begins without a connection. `where` is what it leads to, for messages; `fields` go with the error."""

    def __init__(self, where: str, **fields: Field) -> None:
        self._where = where
        self._fields = fields
        self._event = asyncio.Event()
        self.since: float | None = None  # time.monotonic(); None while cut off
        self.closed = False  # for good, on purpose

    @property
    def now(self) -> bool:
        return self.since is not None

    def up(self) -> None:
        self.since = time.monotonic()
        self._event.set()

    def down(self) -> None:
        self.since = None
        self._event.clear()

    def check_open(self) -> None:
        """Raises BusError once the bus is closed."""
        if self.closed:
            raise BusError(f"the bus to {self._where} is closed", **self._fields)

    async def wait(self, subject: str, timeout_s: float) -> float:
        """What is left of timeout_s once there is a connection. Raises BusTimeout if there is none by then."""
        self.check_open()
        if self._event.is_set():
            return timeout_s
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            raise timed_out(subject, timeout_s, f"cut off from {self._where}; nothing was sent, no answer") from None
        return max(0.001, timeout_s - (time.monotonic() - began))

"""Messages that nobody waits for: published in the background, one after the other, so that whoever has something to
tell need not be a coroutine."""

from __future__ import annotations

import asyncio
import logging

from distserve.bus.base import Bus
from distserve.errors import BusError
from distserve.messages import Message, encode

log = logging.getLogger(__name__)


class Letters:
    """A letter that the bus does not take is lost: whatever it would have ended ends by its time."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._waiting: list[tuple[str, Message]] = []
        self._sending: asyncio.Task[None] | None = None

    def post(self, subject: str, message: Message) -> None:
        self._waiting.append((subject, message))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send(), name="letters")

    async def sent(self, timeout_s: float = 2.0) -> None:
        """Returns when all are gone, or after timeout_s."""
        if self._sending is not None:
            await asyncio.wait({self._sending}, timeout=timeout_s)

    async def _send(self) -> None:
        try:
            while self._waiting:
                subject, message = self._waiting.pop(0)
                try:
                    await self._bus.publish(subject, encode(message))
                except BusError as e:
                    log.info("%s not sent to %s: %s", type(message).__name__, subject, e)
        finally:
            self._sending = None

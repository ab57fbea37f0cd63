"""Word to the workers that needs no answer: acknowledgements and cancellations, one message a worker at a time."""

import asyncio
import logging

from distserve.bus import subjects
from distserve.bus.base import Bus
from distserve.errors import BusError
from distserve.messages import CancelRequest, FinishedAck, SequenceKey, encode

log = logging.getLogger(__name__)

MAX_KEYS = 256  # a message stays well below 64 KiB
RETRY_S = 0.25
MAX_TRIES = 20


class Outbox:
    """put() from anywhere on the event loop; run() sends. What the bus does not take is tried again for some time."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._acks: dict[tuple[str, str], list[SequenceKey]] = {}
        self._cancels: dict[tuple[str, str, str], list[SequenceKey]] = {}
        self._wake = asyncio.Event()

    def acknowledge(self, role: str, worker: str, key: SequenceKey) -> None:
        self._acks.setdefault((role, worker), []).append(key)
        self._wake.set()

    def cancel(self, role: str, worker: str, key: SequenceKey, reason: str) -> None:
        self._cancels.setdefault((role, worker, reason), []).append(key)
        self._wake.set()

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self.flush()

    async def flush(self) -> None:
        """Send what is there now."""
        acks, self._acks = self._acks, {}
        cancels, self._cancels = self._cancels, {}
        for (role, worker), keys in acks.items():
            for part in _parts(keys):
                await self._send(role, worker, encode(FinishedAck(keys=part)))
        for (role, worker, reason), keys in cancels.items():
            for part in _parts(keys):
                await self._send(role, worker, encode(CancelRequest(keys=part, reason=reason)))

    async def _send(self, role: str, worker: str, data: bytes) -> None:
        for _ in range(MAX_TRIES):
            try:
                await self._bus.publish(subjects.worker(role, worker), data)
                return
            except BusError as e:
                problem = e
                await asyncio.sleep(RETRY_S)
        log.warning("could not tell %s worker %s of ended sequences: %s", role, worker, problem)


def _parts(keys: list[SequenceKey]) -> list[list[SequenceKey]]:
    return [keys[i : i + MAX_KEYS] for i in range(0, len(keys), MAX_KEYS)]

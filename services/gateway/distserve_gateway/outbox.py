"""Word to the workers: acknowledgements, which may get lost, and cancellations, which must not.

NATS delivers at most once, and a worker that is cut off for a moment misses what is sent meanwhile. So it says that it
has a cancellation, and is told again until it does: else it would compute for nobody.
"""

import asyncio
import logging
from collections.abc import Iterator

from distserve.bus import subjects
from distserve.bus.base import Bus
from distserve.errors import BusError, BusTimeout
from distserve.messages import CancelRequest, FinishedAck, SequenceKey, encode

log = logging.getLogger(__name__)

MAX_KEYS = 256  # a message stays well below 64 KiB
ANSWER_S = 0.5
RETRY_S = 0.25
MAX_TRIES = 20


class Outbox:
    """Call it from anywhere on the event loop; run() sends, one message a worker at a time."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._acks: dict[tuple[str, str], list[SequenceKey]] = {}
        self._cancels: dict[tuple[str, str, str], list[SequenceKey]] = {}
        self._cancelling: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._closing = False

    def acknowledge(self, role: str, worker: str, key: SequenceKey) -> None:
        self._acks.setdefault((role, worker), []).append(key)
        self._wake.set()

    def cancel(self, role: str, worker: str, key: SequenceKey, reason: str) -> None:
        self._cancels.setdefault((role, worker, reason), []).append(key)
        self._wake.set()

    async def run(self) -> None:
        """Send until cancelled; cancellations on their way go on."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._send()

    async def close(self) -> None:
        """Send what is there, and try again no more; cancelled, it gives up what is on its way."""
        self._closing = True
        await self._send()
        await asyncio.gather(*self._cancelling)

    async def _send(self) -> None:
        acks, self._acks = self._acks, {}
        cancels, self._cancels = self._cancels, {}
        for (role, worker, reason), keys in cancels.items():
            for part in _parts(keys):  # a worker that does not answer holds up no other
                task = asyncio.create_task(self._cancel(role, worker, CancelRequest(keys=part, reason=reason)))
                self._cancelling.add(task)
                task.add_done_callback(self._cancelling.discard)
        for (role, worker), keys in acks.items():
            for part in _parts(keys):
                await self._acknowledge(role, worker, FinishedAck(keys=part))

    async def _acknowledge(self, role: str, worker: str, message: FinishedAck) -> None:
        try:
            await self._bus.publish(subjects.worker(role, worker), encode(message))
        except BusError as e:
            log.info("%s worker %s keeps what it could forget: %s", role, worker, e)

    async def _cancel(self, role: str, worker: str, message: CancelRequest) -> None:
        subject, data = subjects.worker(role, worker), encode(message)
        for _ in range(MAX_TRIES):
            try:
                await self._bus.request(subject, data, timeout_s=ANSWER_S)
                return
            except BusError as e:
                problem = e
            if self._closing:
                break
            if not isinstance(problem, BusTimeout):  # that came at once: the worker is not there, or we are cut off
                await asyncio.sleep(RETRY_S)
        log.warning("could not tell %s worker %s of %d ended sequences: %s", role, worker, len(message.keys), problem)


def _parts(keys: list[SequenceKey]) -> Iterator[list[SequenceKey]]:
    return (keys[i : i + MAX_KEYS] for i in range(0, len(keys), MAX_KEYS))

"""Moves one sequence's KV to a decode worker while it is being computed, and its state when it is.

Two threads meet here. The engine's thread reports layers as they are written (`layers_ready`); the event loop asks
for the lease, opens the transfer and commits. Whatever became ready before the lease came is written when it does;
all spans are remembered, so that a hand-over that fails can go to another decode worker from the same blocks.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from distserve.bus import subjects
from distserve.bus.base import Bus
from distserve.errors import BusError, DistServeError, KVError, NoWorker, TransportError, Unavailable, WorkerLost
from distserve.messages import LeaseGrant, LeaseRelease, LeaseRequest, decode_as, encode
from distserve.transport.base import Sender, Span, Transfer

log = logging.getLogger(__name__)

_ELSEWHERE = (TransportError, Unavailable, BusError, WorkerLost, KVError)  # failures after which another D may do


@dataclass(frozen=True, slots=True)
class Shipped:
    """What a finished hand-over was: for timings and metrics."""

    decode_worker: str
    kind: str
    num_bytes: int
    seconds: float  # from the call of commit() to the acknowledged adoption


class Handoff:
    def __init__(
        self,
        bus: Bus,
        ask: LeaseRequest,
        candidates: Callable[[set[str]], str | None],
        sender_for: Callable[[str], Sender],
        *,
        connect_timeout_s: float,
        commit_timeout_s: float,
    ) -> None:
        """`candidates(tried)`: the decode worker to ask next, None if there is none left.
        `sender_for(kind)`: the sender for a granted endpoint's kind."""
        self._bus = bus
        self._ask = ask
        self._candidates = candidates
        self._sender_for = sender_for
        self._connect_timeout_s = connect_timeout_s
        self._commit_timeout_s = commit_timeout_s
        self._lock = threading.Lock()
        self._spans: list[Span] = []  # all that is ready, in order
        self._transfer: Transfer | None = None
        self._tried: set[str] = set()
        self._opening: asyncio.Task[Transfer] | None = None
        self._asking: asyncio.Task[bytes] | None = None
        self._grant: LeaseGrant | None = None
        self.decode_worker: str | None = None

    def start(self) -> None:
        """Ask for the lease now, beside the forward pass. Failures surface in commit()."""
        self._opening = asyncio.create_task(self._open(), name=f"lease {self._ask.key}")
        self._opening.add_done_callback(_retrieved)

    def layers_ready(self, span: Span) -> None:
        """Engine's thread: these layers of these blocks are final."""
        with self._lock:
            self._spans.append(span)
            if self._transfer is not None:
                self._transfer.write((span,))

    async def commit(self, state: Callable[[], bytes]) -> Shipped:
        """Finish: every span written, then the state (made just before it is sent); returns when decode has adopted.

        Tries other decode workers where one fails. Afterwards, or when it raises, the blocks are read no more.
        """
        started = time.monotonic()
        while True:
            transfer: Transfer | None = None
            try:
                assert self._opening is not None
                transfer = await self._opening
                num_bytes = await transfer.commit(state(), timeout_s=self._commit_timeout_s)
            except _ELSEWHERE as e:
                log.warning("hand-over of %s to %s failed: %s", self._ask.key, self.decode_worker, e)
                with self._lock:
                    self._transfer = None
                if transfer is not None:
                    await transfer.abort(str(e))
                await self._release(str(e))
                if self._candidates(self._tried) is None:
                    raise
                self.start()
                continue
            assert self._grant is not None
            assert self.decode_worker is not None
            kind = self._grant.region.endpoint.kind
            return Shipped(self.decode_worker, kind, num_bytes, time.monotonic() - started)

    async def abort(self, reason: str) -> None:
        """Give up. Idempotent; afterwards the blocks are read no more. Never raises."""
        opening, self._opening = self._opening, None
        if opening is not None and not opening.done():
            opening.cancel()
            await asyncio.wait({opening})
        with self._lock:
            transfer, self._transfer = self._transfer, None
        if transfer is not None:
            await transfer.abort(reason)
        await self._release(reason)

    def peer_gone(self, worker_id: str) -> None:
        """The registry says that a decode worker is gone: stop waiting for its grant."""
        if worker_id == self.decode_worker and self._asking is not None:
            self._asking.cancel()

    async def _open(self) -> Transfer:
        """A lease and a transfer on it, from the first candidate that gives both."""
        last: DistServeError | None = None
        while (worker := self._candidates(self._tried)) is not None:
            self.decode_worker = worker
            self._tried.add(worker)
            self._grant = None
            try:
                self._grant = await self._ask_for_lease(worker)
                region = self._grant.region
                sender = self._sender_for(region.endpoint.kind)
                transfer = await sender.open(region, timeout_s=self._connect_timeout_s)
            except asyncio.CancelledError:
                await self._release("cancelled")
                raise
            except _ELSEWHERE as e:
                log.warning("no lease for %s from %s: %s", self._ask.key, worker, e)
                await self._release(str(e))
                last = e
                continue
            with self._lock:
                self._transfer = transfer
                if self._spans:
                    transfer.write(tuple(self._spans))
            return transfer
        raise last or NoWorker("no decode worker can take the sequence", role="decode", retry_after_s=1.0)

    async def _ask_for_lease(self, worker: str) -> LeaseGrant:
        """Raises WorkerLost if the worker leaves the registry meanwhile: its answer may never come."""
        subject = subjects.worker("decode", worker)
        request = self._bus.request(subject, encode(self._ask), timeout_s=self._ask.wait_s + 2.0)
        self._asking = asking = asyncio.ensure_future(request)
        try:
            await asyncio.wait({asking})
        finally:
            self._asking = None
            asking.cancel()
        if asking.cancelled():
            raise WorkerLost(f"decode worker {worker} left before it gave a lease", worker=worker, role="decode")
        return decode_as(LeaseGrant, asking.result())

    async def _release(self, reason: str) -> None:
        """Tell the decode worker that nothing more comes under the grant (an aborted transfer says so too)."""
        grant, self._grant = self._grant, None
        if grant is None or self.decode_worker is None:
            return
        release = LeaseRelease(lease_id=grant.region.lease_id, epoch=grant.region.epoch, reason=reason)
        try:
            await self._bus.publish(subjects.worker("decode", self.decode_worker), encode(release))
        except BusError as e:
            log.warning("release of a lease not sent, it will expire: %s", e)


def _retrieved(task: asyncio.Task[Transfer]) -> None:
    if not task.cancelled():
        task.exception()

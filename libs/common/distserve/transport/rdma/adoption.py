"""What becomes of a lease that is whole: verified, adopted or lost, and the sender's hearing of it, by this link or a
later one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from distserve.errors import DistServeError, LeaseRevoked
from distserve.transport import framing
from distserve.transport.base import Commit, OnLost
from distserve.transport.inbound import InboundLease, InboundLeases
from distserve.transport.meter import Flow, Meter
from distserve.transport.rdma import connect
from distserve.transport.rdma.exposure import Exposure
from distserve.transport.rdma.frames import Kind
from distserve.transport.rdma.reactor import Reactor
from distserve.transport.rdma.receiver_link import ReceiverLink
from distserve.transport.rdma.remembered import remember
from distserve.transport.rdma.verifying import Verifier

log = logging.getLogger(__name__)

KIND = "rdma"


class Adoption:
    """answer() and whole() are for the reactor's thread, the rest for the loop, on which the owner is called."""

    def __init__(
        self,
        verifier: Verifier,
        leases: InboundLeases,
        reactor: Reactor,
        meter: Meter,
        on_commit: Callable[[Commit], None],
        on_lost: OnLost,
    ) -> None:
        self._verifier = verifier
        self._leases = leases
        self._reactor = reactor
        self._meter = meter
        self._on_commit, self._on_lost = on_commit, on_lost
        self._is_stopping = False
        self._waiting: set[asyncio.Task[None]] = set()
        # The reactor's.
        self._adopting: dict[tuple[int, int], ReceiverLink] = {}  # who waits for the outcome of a commit
        # Of commits, for senders whose link broke before they heard.
        self._outcomes: OrderedDict[tuple[int, int], framing.Ack] = OrderedDict()

    # -- on the reactor's thread

    def answer(self, link: ReceiverLink, lease_id: int, epoch: int) -> bool:
        """As LeaseEvents.answer."""
        key = (lease_id, epoch)
        if key in self._adopting:
            self._adopting[key] = link
            return True
        if (ack := self._outcomes.get(key)) is not None:
            link.send(Kind.ACK, ack)
            return True
        return False

    def whole(self, link: ReceiverLink, exposure: Exposure) -> None:
        """As LeaseEvents.whole."""
        lease = exposure.lease
        if lease.fence.closed:
            return  # revoked meanwhile
        lease.fence.close()  # from here on no link gets at it
        self._adopting[lease.lease_id, lease.epoch] = link
        self._verifier.verify(exposure, lambda error: self._verified(link, exposure, error))

    # -- on the loop

    async def shut(self, lease: InboundLease) -> None:
        """For a revoked lease that its link has let go of: returns when nothing writes into its blocks any more."""
        await self._verifier.shut(lease)

    async def stop(self) -> None:
        """The owner is told nothing any more."""
        self._is_stopping = True
        await self._verifier.stop()
        for task in self._waiting:
            task.cancel()

    def stop_telling(self) -> None:
        self._is_stopping = True

    def _verified(self, link: ReceiverLink, exposure: Exposure, error: DistServeError | None) -> None:
        lease = exposure.lease
        if error is None:
            self._adopt(link, exposure)
        elif self._verifier.is_storing(lease):
            self._acknowledge(lease, error)
            task = asyncio.create_task(self._lose_later(lease, error))
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)
        else:
            self.report_lost(lease, error)
            self._acknowledge(lease, error)

    async def _lose_later(self, lease: InboundLease, error: DistServeError) -> None:
        await self._verifier.shut(lease)
        self.report_lost(lease, error)

    def _adopt(self, link: ReceiverLink, exposure: Exposure) -> None:
        lease, commit = exposure.lease, exposure.commit
        assert commit is not None
        if not self._leases.remove(lease):  # revoked after the last byte was verified
            self._acknowledge(lease, LeaseRevoked(f"lease {lease.lease_id} was revoked", lease_id=lease.lease_id))
            return
        seconds = time.monotonic() - lease.granted_at
        failure: Exception | None = None
        try:
            self._on_commit(Commit(lease.lease_id, lease.epoch, commit.head.state, lease.num_bytes, seconds))
        except Exception as e:
            log.exception("lease %d came whole but was not adopted", lease.lease_id)
            failure = e
            self._tell_owner(lease, e)
        else:
            self._meter.add(Flow("received", KIND, exposure.traffic_class, link.peer), 0, seconds)
            for traffic_class, num_bytes in connect.bytes_by_class(commit.lanes).items():
                self._meter.add_bytes(Flow("received", KIND, traffic_class, link.peer), num_bytes)
        self._acknowledge(lease, failure)

    def _acknowledge(self, lease: InboundLease, error: Exception | None) -> None:
        wire = None if error is None else framing.wire_error(error)
        ack = framing.Ack(lease.lease_id, lease.epoch, "commit", lease.num_bytes, wire)
        self._reactor.call(lambda: self._send_ack(ack))

    def _send_ack(self, ack: framing.Ack) -> None:
        """On the reactor's thread."""
        key = (ack.lease_id, ack.epoch)
        remember(self._outcomes, key, ack)
        self._adopting.pop(key).send(Kind.ACK, ack)

    def report_lost(self, lease: InboundLease, error: Exception) -> None:
        """Its blocks are written no more."""
        if self._leases.remove(lease):
            self._tell_owner(lease, error)

    def _tell_owner(self, lease: InboundLease, error: Exception) -> None:
        if self._is_stopping:
            return
        try:
            self._on_lost(lease.lease_id, lease.epoch, error)
        except Exception:
            log.exception("on_lost of lease %d raised", lease.lease_id)

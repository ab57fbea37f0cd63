"""The decode side of rdma: takes set-up requests from the bus, grants leases, verifies and adopts what has come.

Two threads of its own: the reactor's, which owns devices and links, and one that sums what arrived, since that reads
every byte. The event loop keeps the owner's promises: `on_commit` and `on_lost` are called there.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from distserve.bus.base import Bus, Delivery, Subscription
from distserve.errors import DistServeError, LeaseRevoked, PeerLost, TransportError
from distserve.kv.layout import require_same
from distserve.messages import Endpoint, LinkRequest, RemoteRegion, decode_as, encode
from distserve.transport import framing
from distserve.transport.base import Commit, Lease, OnLost, PoolMemory, Receiver
from distserve.transport.fence import post
from distserve.transport.inbound import InboundLease, InboundLeases
from distserve.transport.meter import Flow, Meter
from distserve.transport.rdma import connect
from distserve.transport.rdma.exposure import Exposure
from distserve.transport.rdma.frames import Kind
from distserve.transport.rdma.halves import Devices, OpenNics, open_configured
from distserve.transport.rdma.lanes import Counts, Lane
from distserve.transport.rdma.link import dispatch
from distserve.transport.rdma.links import Links
from distserve.transport.rdma.memory import HostMemory
from distserve.transport.rdma.options import RdmaOptions
from distserve.transport.rdma.reactor import Reactor, Timer
from distserve.transport.rdma.receiver_link import ReceiverLink
from distserve.transport.rdma.remembered import remember
from distserve.transport.rows import PoolRows
from distserve.transport.select import host_key

log = logging.getLogger(__name__)

KIND = "rdma"
BYE_S = 0.2  # for a peer to acknowledge that we stop


class RdmaReceiver(Receiver):
    """All public methods are for the loop that start() ran on. stop() ends every open lease without telling the
    owner, who is the one that stops."""

    kind = KIND

    def __init__(
        self,
        memory: PoolMemory,
        bus: Bus,
        *,
        name: str = "",
        options: RdmaOptions,
        meter: Meter | None = None,
        open_nics: OpenNics = open_configured,
    ) -> None:
        """name: the address that peers connect to, one subject token; made up if empty."""
        self._memory = memory
        self._bus = bus
        self._name = name or secrets.token_hex(8)
        self._options = options
        self._meter = meter or Meter()
        self._rows = PoolRows(memory.blocks, memory.layout)
        local = HostMemory(memory)
        self._pool_address = local.address_of(0, 0)
        self._leases = InboundLeases(self._rows)
        self._devices = Devices()
        self._lanes: dict[int, Lane] = {}
        # From here on the reactor's.
        self._expiries: dict[tuple[int, int], Timer] = {}  # of leases whose link has failed
        self._adopting: dict[tuple[int, int], ReceiverLink] = {}  # who waits for the outcome of a commit
        # Of commits, for senders whose link broke before they heard.
        self._outcomes: OrderedDict[tuple[int, int], framing.Ack] = OrderedDict()
        self._reactor = Reactor(
            "kv-receive-rdma",
            lambda: self._devices.open(local, options, open_nics, receives=True),
            lambda _, completion: dispatch(self._lanes, completion),
            on_crash=lambda e: self._links.close(PeerLost(f"a device of this host cannot be used any more: {e}")),
            poll_cpu=options.poll_cpu,
        )
        self._links = Links(
            self._reactor, self._devices, self._lanes, options, memory.layout, self._leases, self, self._pool_address
        )
        self._summing = ThreadPoolExecutor(1, "kv-verify-rdma")
        self._subscription: Subscription | None = None
        self._started = False
        self._stopping: asyncio.Task[None] | None = None
        self._fencing: dict[int, tuple[int, asyncio.Task[None]]] = {}  # revoked leases and their epochs, until fenced

    # -- Receiver

    async def start(self, on_commit: Callable[[Commit], None], on_lost: OnLost) -> None:
        """Raises TransportUnavailable or ConfigError if no device can be used."""
        if self._started:
            raise TransportError("this rdma receiver was started before")
        self._started = True
        self._on_commit, self._on_lost = on_commit, on_lost
        self._loop = asyncio.get_running_loop()
        await asyncio.wrap_future(self._reactor.start())
        try:
            self._subscription = await self._bus.serve(connect.subject(self._name), self._set_up)
        except BaseException:
            await self._reactor.stop()
            raise

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(kind="rdma", host=host_key(), address=self._name)

    @property
    def counts(self) -> Counts:
        """What has been asked of the devices so far."""
        return self._devices.counts

    def grant(self, lease: Lease) -> RemoteRegion:
        """Opens the lease for writing by whoever names its id and epoch first. Raises KVError."""
        self._leases.add(lease)
        return RemoteRegion(
            lease_id=lease.lease_id,
            epoch=lease.epoch,
            endpoint=self.endpoint,
            block_ids=list(lease.block_ids),
            layout=self._memory.layout,
        )

    async def revoke(self, lease_id: int, epoch: int | None = None) -> None:
        if self._stopping is not None:
            await asyncio.shield(self._stopping)
            return
        lease = self._leases.get(lease_id)
        if lease is not None and epoch in (None, lease.epoch) and self._leases.remove(lease):
            lease.fence.close()
            task = asyncio.create_task(self._fence(lease), name=f"fence of lease {lease_id}")
            self._fencing[lease_id] = (lease.epoch, task)
            task.add_done_callback(lambda done: self._fenced(lease_id, done))
        of, task_or_none = self._fencing.get(lease_id, (0, None))
        if task_or_none is not None and epoch in (None, of):
            await asyncio.shield(task_or_none)  # whoever asks, and asks again, waits for one and the same fence

    def idle_s(self, lease_id: int) -> float | None:
        """Writes arrive unseen: counted from the last progress that the writer reported."""
        lease = self._leases.get(lease_id)
        return None if lease is None else time.monotonic() - lease.active_at

    async def stop(self) -> None:
        if not self._started:
            return
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(), name="stop of the rdma receiver")
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        if self._subscription is not None:
            await self._subscription.close()
        for lease in self._leases.drain():
            lease.fence.close()
        goodbye = asyncio.Event()
        if self._reactor.call(lambda: self._links.say_bye(lambda: post(self._loop, goodbye.set))):
            try:
                async with asyncio.timeout(BYE_S):
                    await goodbye.wait()
            except TimeoutError:
                pass  # the peers will find out
            self._reactor.call(lambda: self._links.close(PeerLost("this receiver stops")))
        await self._reactor.stop()
        self._summing.shutdown(cancel_futures=True)

    # -- set-up: on the loop, then on the reactor's thread

    async def _set_up(self, delivery: Delivery) -> bytes:
        request = decode_as(LinkRequest, delivery.data)
        require_same(self._memory.layout, request.layout)
        connect.check_request(request)
        return encode(await self._reactor.run(lambda: self._links.accept(request)))

    # -- LeaseEvents: on the reactor's thread

    def answer(self, link: ReceiverLink, lease_id: int, epoch: int) -> bool:
        key = (lease_id, epoch)
        if key in self._adopting:
            self._adopting[key] = link
            return True
        if (ack := self._outcomes.get(key)) is not None:
            link.send(Kind.ACK, ack)
            return True
        return False

    def whole(self, link: ReceiverLink, exposure: Exposure) -> None:
        lease = exposure.lease
        if lease.fence.closed:
            return  # revoked meanwhile
        lease.fence.close()  # from here on no link gets at it
        self._adopting[lease.lease_id, lease.epoch] = link
        try:
            self._summing.submit(self._verify, link, exposure)
        except RuntimeError:
            pass  # stopping

    def given_up(self, link: ReceiverLink, lease: InboundLease, error: DistServeError) -> None:
        lease.fence.close()
        post(self._loop, self._report_lost, lease, error)

    def attached(self, lease: InboundLease) -> None:
        if (timer := self._expiries.pop((lease.lease_id, lease.epoch), None)) is not None:
            timer.cancel()

    def detached(self, link: ReceiverLink, lease: InboundLease) -> None:
        why = link.error or PeerLost(f"{link.peer} is gone")
        key = (lease.lease_id, lease.epoch)

        def expire() -> None:
            self._expiries.pop(key, None)
            if lease.connection is None and not lease.fence.closed:
                self.given_up(link, lease, PeerLost(why.message, peer=link.peer))

        if link.has_left:
            expire()
            return
        self._expiries[key] = self._reactor.later(self._options.common.peer_timeout_s, expire)

    # -- a lease that is whole

    def _verify(self, link: ReceiverLink, exposure: Exposure) -> None:
        """On the summing thread. The sender has seen to it that each layer of each block was written once."""
        lease, commit = exposure.lease, exposure.commit
        assert commit is not None
        error: DistServeError | None = None
        try:
            lease.sums = self._rows.sums_of(lease.block_ids, 0, self._rows.num_layers)
            lease.placed[:] = True
            lease.num_placed = lease.placed.size
            lease.verify(commit.head)
        except DistServeError as e:
            error = e
        except Exception as e:  # nobody else would tell the sender
            log.exception("lease %d could not be verified", lease.lease_id)
            error = TransportError(f"lease {lease.lease_id} could not be verified: {type(e).__name__}: {e}")
        post(self._loop, self._adopt, link, exposure, error)

    def _adopt(self, link: ReceiverLink, exposure: Exposure, error: DistServeError | None) -> None:
        """On the loop."""
        lease, commit = exposure.lease, exposure.commit
        assert commit is not None
        if error is not None:
            self._report_lost(lease, error)
            self._acknowledge(lease, error)
            return
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
        key = (ack.lease_id, ack.epoch)
        remember(self._outcomes, key, ack)
        self._adopting.pop(key).send(Kind.ACK, ack)

    def _report_lost(self, lease: InboundLease, error: Exception) -> None:
        """On the loop."""
        if self._leases.remove(lease):
            self._tell_owner(lease, error)

    def _tell_owner(self, lease: InboundLease, error: Exception) -> None:
        if self._stopping is not None:
            return
        try:
            self._on_lost(lease.lease_id, lease.epoch, error)
        except Exception:
            log.exception("on_lost of lease %d raised", lease.lease_id)

    def _fenced(self, lease_id: int, done: asyncio.Task[None]) -> None:
        if self._fencing.get(lease_id, (0, None))[1] is done:
            del self._fencing[lease_id]

    async def _fence(self, lease: InboundLease) -> None:
        error = LeaseRevoked(f"lease {lease.lease_id} was revoked", lease_id=lease.lease_id, epoch=lease.epoch)
        fenced: asyncio.Future[None] = self._loop.create_future()

        def done() -> None:
            post(self._loop, _resolve, fenced)

        def fence() -> None:
            link = lease.connection
            if isinstance(link, ReceiverLink):
                link.fence(lease, error, done)
            else:
                done()

        if self._reactor.call(fence):
            await fenced


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

"""The decode side of rdma: takes set-up requests from the bus, grants leases, verifies and adopts what has come.

The reactor's thread owns devices and links; another sums what arrived, or a GPU does (verifying.py). The event loop
keeps the owner's promises: `on_commit` and `on_lost` are called there (adoption.py).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence

from distserve.bus.base import Bus, Delivery, Subscription
from distserve.errors import DistServeError, LeaseRevoked, PeerLost, TransportError
from distserve.kv.layout import require_same
from distserve.messages import Endpoint, LinkRequest, RemoteRegion, decode_as, encode
from distserve.transport.base import Commit, Lease, OnLost, PoolMemory, Receiver
from distserve.transport.fence import post
from distserve.transport.inbound import InboundLease, InboundLeases
from distserve.transport.meter import Meter
from distserve.transport.rdma import connect
from distserve.transport.rdma.adoption import KIND, Adoption
from distserve.transport.rdma.device import Nic
from distserve.transport.rdma.exposure import Exposure
from distserve.transport.rdma.halves import Devices, OpenNics, open_configured
from distserve.transport.rdma.lanes import Counts, Lane
from distserve.transport.rdma.link import dispatch
from distserve.transport.rdma.links import Links
from distserve.transport.rdma.options import RdmaOptions
from distserve.transport.rdma.pool_access import PoolAccess
from distserve.transport.rdma.reactor import Reactor, Timer
from distserve.transport.rdma.receiver_link import ReceiverLink
from distserve.transport.rdma.room import LandingRoom, PoolRoom, Room
from distserve.transport.rdma.verifying import LandingVerifier, PoolVerifier, Verifier
from distserve.transport.rows import PoolShape
from distserve.transport.select import host_key

log = logging.getLogger(__name__)

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
        self._leases = InboundLeases(PoolShape(memory.num_blocks, memory.layout))
        self._open_nics = open_nics
        self._devices = Devices()
        self._lanes: dict[int, Lane] = {}
        # From here on the reactor's.
        self._expiries: dict[tuple[int, int], Timer] = {}  # of leases whose link has failed
        self._reactor = Reactor(
            "kv-receive-rdma",
            self._open,
            lambda _, completion: dispatch(self._lanes, completion),
            on_crash=lambda e: self._links.close(PeerLost(f"a device of this host cannot be used any more: {e}")),
            poll_cpu=options.poll_cpu,
        )
        self._subscription: Subscription | None = None
        self._adoption: Adoption | None = None  # from start() on
        self._started = False
        self._stopping: asyncio.Task[None] | None = None
        self._fencing: dict[int, tuple[int, asyncio.Task[None]]] = {}  # revoked leases and their epochs, until fenced

    # -- Receiver

    async def start(self, on_commit: Callable[[Commit], None], on_lost: OnLost) -> None:
        """Raises TransportUnavailable or ConfigError if no device can be used."""
        if self._started:
            raise TransportError("this rdma receiver was started before")
        self._started = True
        self._loop = asyncio.get_running_loop()
        await asyncio.wrap_future(self._reactor.start())
        self._meter.packets.use_ports(nic.name for nic in self._devices.nics)
        try:
            verifier = self._make_verifier(self._devices.access)
            self._adoption = Adoption(verifier, self._leases, self._reactor, self._meter, on_commit, on_lost)
            self._subscription = await self._bus.serve(connect.subject(self._name), self._set_up)
        except BaseException:
            await self._reactor.stop()
            await asyncio.to_thread(self._devices.close_access)
            raise

    def _open(self) -> Sequence[Nic]:
        """On the reactor's thread."""
        nics = self._devices.open(self._memory, self._options, self._open_nics, receives=True)
        landing = self._devices.access.landing
        room: Room = PoolRoom() if landing is None else LandingRoom(landing, self._reactor)
        layout = self._memory.layout
        self._links = Links(self._reactor, self._devices, self._lanes, self._options, layout, self._leases, self, room)
        return nics

    def _make_verifier(self, access: PoolAccess) -> Verifier:
        if access.landing is None:
            return PoolVerifier(access, self._loop)
        return LandingVerifier(access.landing, self._loop, self._options.store_timeout_s)

    @property
    def pool_access(self) -> str:
        return str(self._devices.access)

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
        if self._adoption is not None:
            self._adoption.stop_telling()
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
        if self._adoption is not None:
            await self._adoption.stop()
        await asyncio.to_thread(self._devices.close_access)

    # -- set-up: on the loop, then on the reactor's thread

    async def _set_up(self, delivery: Delivery) -> bytes:
        request = decode_as(LinkRequest, delivery.data)
        require_same(self._memory.layout, request.layout)
        connect.check_request(request)
        return encode(await self._reactor.run(lambda: self._links.accept(request)))

    # -- LeaseEvents: on the reactor's thread

    def answer(self, link: ReceiverLink, lease_id: int, epoch: int) -> bool:
        assert self._adoption is not None
        return self._adoption.answer(link, lease_id, epoch)

    def whole(self, link: ReceiverLink, exposure: Exposure) -> None:
        assert self._adoption is not None
        self._adoption.whole(link, exposure)

    def given_up(self, link: ReceiverLink, lease: InboundLease, error: DistServeError) -> None:
        assert self._adoption is not None
        lease.fence.close()
        post(self._loop, self._adoption.report_lost, lease, error)

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

    # -- revoked leases: on the loop

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
        if self._adoption is not None:
            await self._adoption.shut(lease)  # it was whole: what landed may be on its way into the pool


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

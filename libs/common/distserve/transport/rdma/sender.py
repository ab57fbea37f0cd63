"""The prefill side of rdma: a link to each receiver, made on first use, and again, with all that was open on it, after
it has failed."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from distserve.bus.base import Bus
from distserve.errors import (
    BusError,
    DistServeError,
    LayoutMismatch,
    NoResponders,
    PeerLost,
    TransportError,
    TransportUnavailable,
)
from distserve.kv.layout import require_same
from distserve.messages import RemoteRegion, TrafficClass
from distserve.transport.base import PoolMemory, Sender, Transfer, TransferFacts
from distserve.transport.facts import Course
from distserve.transport.fence import post
from distserve.transport.meter import Flow, Meter
from distserve.transport.outbound import fresh, from_our_side
from distserve.transport.rdma import frames
from distserve.transport.rdma.dialer import Dialer
from distserve.transport.rdma.frames import Kind
from distserve.transport.rdma.halves import Devices, OpenNics, open_configured
from distserve.transport.rdma.lanes import Counts, Lane
from distserve.transport.rdma.link import dispatch
from distserve.transport.rdma.options import RdmaOptions
from distserve.transport.rdma.reactor import Reactor
from distserve.transport.rdma.sender_link import SenderLink
from distserve.transport.rdma.sources import PooledSource, Source
from distserve.transport.rdma.staged_source import StagedSource
from distserve.transport.rdma.transfer import RdmaTransfer
from distserve.transport.rows import PoolShape

log = logging.getLogger(__name__)

KIND = "rdma"
SHORT_LIFE_S = 1.0  # a link that breaks within this is built again only after a pause
BYE_S = 0.2  # for a peer to acknowledge that we stop


@dataclass(slots=True, eq=False)
class _Peer:
    """One receiver. `attempt`: the set-up under way; its result is None or why it failed."""

    address: str
    link: SenderLink | None = None
    attempt: asyncio.Task[DistServeError | None] | None = None
    epoch: int = 0
    delay_s: float = 0.0  # before the next attempt
    not_before: float = 0.0  # loop time, as all here
    linked_at: float = 0.0
    transfers: set[RdmaTransfer] = field(default_factory=set)
    rebuilding: asyncio.Task[None] | None = None


class RdmaSender(Sender):
    """For one loop. Devices are opened and the pool is registered when it is made.

    A link that fails is built anew under a higher epoch; its transfers go on by the new one and none fails, unless no
    link can be had for peer_timeout_s or the receiver is known to be gone. After a failed attempt the next waits a
    little, longer each time up to a bound; no peer is ever given up for good.
    """

    kind = KIND

    def __init__(
        self,
        memory: PoolMemory,
        bus: Bus,
        *,
        sender_id: str,
        options: RdmaOptions,
        meter: Meter | None = None,
        open_nics: OpenNics = open_configured,
    ) -> None:
        """Raises TransportUnavailable or ConfigError if no device can be used."""
        self._memory = memory
        self._options = options
        self._meter = meter or Meter()
        self._shape = PoolShape(memory.num_blocks, memory.layout)
        self._devices = Devices()
        self._lanes: dict[int, Lane] = {}
        self._peers: dict[str, _Peer] = {}
        self._stopping: asyncio.Task[None] | None = None
        self._summing = ThreadPoolExecutor(1, "kv-sum-rdma")
        self._reactor = Reactor(
            "kv-send-rdma",
            lambda: self._devices.open(memory, options, open_nics, receives=False),
            lambda _, completion: dispatch(self._lanes, completion),
            on_crash=self._on_crash,
            poll_cpu=options.poll_cpu,
        )
        self._dialer = Dialer(bus, self._reactor, self._devices, self._lanes, options, memory.layout, sender_id)
        self._reactor.start().result()
        self._access = self._devices.access
        self._meter.packets.use_ports(nic.name for nic in self._devices.nics)

    @property
    def pool_access(self) -> str:
        return str(self._access)

    @property
    def counts(self) -> Counts:
        """What has been asked of the devices so far."""
        return self._devices.counts

    # -- Sender

    async def open(
        self, region: RemoteRegion, *, timeout_s: float, traffic_class: TrafficClass = "prefill", peer: str = ""
    ) -> Transfer:
        asked_at = time.monotonic()
        address = region.endpoint.address
        if region.endpoint.kind != KIND:
            raise TransportUnavailable(
                f"a rdma sender cannot reach a {region.endpoint.kind} endpoint",
                kind=region.endpoint.kind,
                expected=KIND,
            )
        require_same(self._memory.layout, region.layout)
        known = self._peers.setdefault(address, _Peer(address))
        _require_not_open(known, region)
        try:
            async with asyncio.timeout(timeout_s):
                await self._connected(known)
        except TimeoutError:
            raise TransportUnavailable(
                f"no connection to the rdma receiver at {address} within {timeout_s} s",
                address=address,
                timeout_s=timeout_s,
            ) from None
        _require_not_open(known, region)  # others may have come meanwhile
        label = peer or address

        def moved(num_bytes: dict[TrafficClass, int], seconds: float) -> None:
            self._meter.add(Flow("sent", KIND, traffic_class, label), 0, seconds)
            for marked, count in num_bytes.items():
                self._meter.add_bytes(Flow("sent", KIND, marked, label), count)

        dscp = self._options.classes[traffic_class].dscp
        facts = TransferFacts(KIND, traffic_class, dscp, len(region.block_ids))
        transfer = RdmaTransfer(
            region,
            self._shape,
            traffic_class,
            self._reactor,
            source=self._source,
            abort_timeout_s=self._options.common.abort_timeout_s,
            on_end=known.transfers.discard,
            on_moved=moved,
            course=Course(facts, asked_at),
        )
        known.transfers.add(transfer)
        self._attach(known, transfer)
        return transfer

    def _source(self, transfer: RdmaTransfer) -> Source:
        if self._access.ring is not None:
            return StagedSource(transfer, self._access, self._reactor, asyncio.get_running_loop())
        waits = self._access.plan.path == "dmabuf"
        return PooledSource(transfer, self._access, self._shape, self._reactor, self._summing, waits=waits)

    async def stop(self) -> None:
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(), name="stop of the rdma sender")
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        tasks = [t for p in self._peers.values() for t in (p.rebuilding, p.attempt) if t is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        stopped = PeerLost("this rdma sender has stopped")
        links = [peer.link for peer in self._peers.values() if peer.link is not None]
        await asyncio.gather(*(self._say_bye(link) for link in links))
        for link in links:
            self._reactor.call(partial(link.fail, stopped))
        for peer in self._peers.values():
            for transfer in peer.transfers:
                self._reactor.call(partial(transfer.withdraw, stopped, "stopped"))
        with suppress(TransportUnavailable):  # it has ended by itself
            await self._reactor.run(lambda: None)  # no transfer is summed from here on
        await asyncio.to_thread(self._summing.shutdown)
        await self._reactor.stop()
        await asyncio.to_thread(self._access.close)
        for peer in self._peers.values():
            for transfer in list(peer.transfers):
                transfer.settle(stopped)

    async def _say_bye(self, link: SenderLink) -> None:
        loop, said = asyncio.get_running_loop(), asyncio.Event()
        frame = frames.frame(Kind.BYE)
        self._reactor.call(lambda: link.send_frame(frame, lambda: post(loop, said.set)))
        try:
            async with asyncio.timeout(BYE_S):
                await said.wait()
        except TimeoutError:
            pass  # the peer will find out

    # -- links: on the loop

    async def _connected(self, peer: _Peer) -> None:
        """Returns when the peer has a live link. Raises what the attempt ended in."""
        loop = asyncio.get_running_loop()
        while True:
            if self._stopping is not None:
                raise TransportUnavailable("this rdma sender has stopped")
            if peer.link is not None and peer.link.error is None:
                return
            if peer.attempt is None:
                if (wait_s := peer.not_before - loop.time()) > 0:
                    await asyncio.sleep(wait_s)
                    continue
                peer.attempt = asyncio.create_task(self._attempt(peer), name=f"rdma link to {peer.address}")
            # Shielded: the attempt goes on for others when this caller runs out of time.
            attempt, task = peer.attempt, asyncio.current_task()
            try:
                error = await asyncio.shield(attempt)
            except asyncio.CancelledError:
                if attempt.cancelled() and task is not None and not task.cancelling():
                    raise TransportUnavailable("this rdma sender has stopped") from None
                raise
            if error is not None:
                raise fresh(error)

    async def _attempt(self, peer: _Peer) -> DistServeError | None:
        loop = asyncio.get_running_loop()
        error: DistServeError | None = None
        try:
            async with asyncio.timeout(self._options.common.connect_timeout_s):
                peer.epoch += 1
                peer.link = await self._dialer.dial(peer.address, peer.epoch, partial(self._on_link_end, peer))
        except TimeoutError:
            error = TransportUnavailable(
                f"the rdma receiver at {peer.address} did not answer in {self._options.common.connect_timeout_s} s",
                address=peer.address,
            )
        except NoResponders as e:
            error = TransportUnavailable(
                f"cannot reach the rdma receiver at {peer.address}: nobody takes its set-up requests ({e.message})",
                address=peer.address,
                is_gone=True,
            )
        except LayoutMismatch as e:
            error = from_our_side(e, f"the rdma receiver at {peer.address}")
        except (DistServeError, OSError) as e:
            error = TransportUnavailable(f"cannot reach the rdma receiver at {peer.address}: {e}", address=peer.address)
        finally:
            peer.attempt = None
        if error is None:
            peer.linked_at = loop.time()
        else:
            self._back_off(peer)
        return error

    def _back_off(self, peer: _Peer) -> None:
        common = self._options.common
        peer.delay_s = min(peer.delay_s * 2, common.max_backoff_s) if peer.delay_s else common.backoff_s
        peer.not_before = asyncio.get_running_loop().time() + peer.delay_s

    # -- transfers and their links: on the loop

    def _attach(self, peer: _Peer, transfer: RdmaTransfer) -> None:
        if (link := peer.link) is not None:
            self._reactor.call(partial(transfer.attach, link))

    def _on_link_end(self, peer: _Peer, link: SenderLink, error: DistServeError) -> None:
        if peer.link is link:
            peer.link = None
        if self._stopping is not None:
            return
        log.warning("the rdma link to %s ended: %s", peer.address, error)
        if asyncio.get_running_loop().time() - peer.linked_at < SHORT_LIFE_S:
            self._back_off(peer)  # it greets and breaks: not at once again
        else:
            peer.delay_s = 0.0
        if peer.transfers and peer.rebuilding is None:
            peer.rebuilding = asyncio.create_task(self._rebuild(peer, error), name=f"rdma rebuild {peer.address}")

    async def _rebuild(self, peer: _Peer, why: DistServeError) -> None:
        """A new link for the transfers that the last one left behind; without one in peer_timeout_s, or if the
        receiver is gone, they fail."""
        error = why
        try:
            async with asyncio.timeout(self._options.common.peer_timeout_s):
                while peer.transfers:
                    try:
                        await self._connected(peer)
                        log.info("the rdma link to %s is up again (epoch %d)", peer.address, peer.epoch)
                        for transfer in peer.transfers:
                            self._attach(peer, transfer)
                        return
                    except LayoutMismatch as e:
                        error = e
                        break
                    except (TransportError, BusError) as e:
                        error = e
                        if e.fields.get("is_gone"):
                            break
        except TimeoutError:
            pass
        finally:
            peer.rebuilding = None
        lost = PeerLost(f"the rdma receiver at {peer.address} is gone: {why.message}", peer=peer.address)
        if error is not why:
            lost = PeerLost(f"{lost.message}; {error.message}", peer=peer.address)
        for transfer in list(peer.transfers):
            transfer.give_up(lost)

    def _on_crash(self, error: Exception) -> None:
        """On the reactor's thread, its last act."""
        for peer in list(self._peers.values()):
            if peer.link is not None:
                peer.link.fail(PeerLost(f"a device of this host cannot be used any more: {error}"))


def _require_not_open(peer: _Peer, region: RemoteRegion) -> None:
    if any((t.lease_id, t.epoch) == (region.lease_id, region.epoch) for t in peer.transfers):
        raise TransportError(f"lease {region.lease_id} is open already", lease_id=region.lease_id)

"""Copies of hot and pinned segments on further nodes: offered to them as a worker would, in the background class."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from distserve.bus import subjects
from distserve.bus.base import Bus
from distserve.errors import DistServeError
from distserve.kv.placement import owners
from distserve.messages import (
    ChainRun,
    OfferedState,
    OfferGrant,
    OfferReleased,
    OfferRequest,
    Priority,
    decode_as,
    encode,
)
from distserve.transport.base import Sender, Span
from distserve.transport.select import host_key
from distserve_kvstore.columns import Entries
from distserve_kvstore.holdings import Holdings
from distserve_kvstore.offers import Owner
from distserve_kvstore.promotion import Promotion

log = logging.getLogger(__name__)

MOST_WAITING = 256  # segments; the oldest are dropped
COPY_S = 30.0  # for one segment to one node


@dataclass(frozen=True, slots=True)
class _Wanted:
    key: bytes  # of the segment
    hashes: bytes  # packed
    owner: Owner


class Replication:
    """Belongs to the event loop. One segment at a time; it is held while it is copied."""

    def __init__(
        self,
        bus: Bus,
        node_id: str,
        holdings: Holdings,
        promotion: Promotion,
        senders: Mapping[str, Sender],
        *,
        peers: Callable[[], Sequence[str]],
        replicas: int,
        request_timeout_s: float,
    ) -> None:
        """peers(): ids of the live nodes of this layout, this one too."""
        self._bus = bus
        self._node_id = node_id
        self._holdings = holdings
        self._promotion = promotion
        self._senders = senders
        self._peers = peers
        self._replicas = replicas
        self._request_timeout_s = request_timeout_s
        self._waiting: OrderedDict[bytes, _Wanted] = OrderedDict()  # by key
        self._copying: tuple[_Wanted, asyncio.Task[None]] | None = None
        self._wake = asyncio.Event()
        self.num_copied = 0  # blocks

    def want(self, key: bytes, entries: Entries, priority: Priority = "normal", conversation: str = "") -> None:
        """Copy these blocks of the segment `key` to the other nodes that should have it, as this conversation's, or one
        that runs through them. Returns at once."""
        if self._replicas < 2 or not self._targets(key):
            return
        index = self._holdings.index
        tip = int(entries[-1])
        self._waiting[key] = _Wanted(
            key,
            index.hashes_of(entries),
            Owner(index.tenant_of(tip), conversation or index.conversations.through(tip), priority),
        )
        while len(self._waiting) > MOST_WAITING:
            self._waiting.popitem(last=False)
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            if not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            _, wanted = self._waiting.popitem(last=False)
            task = asyncio.create_task(self._copy_to_all(wanted), name="copy a segment")
            self._copying = (wanted, task)
            try:
                await asyncio.wait({task})
            finally:
                self._copying = None
                task.cancel()
                await asyncio.wait({task}, timeout=self._request_timeout_s)
            if not task.cancelled():
                task.result()

    def cancel(self, tenant: str, conversation: str) -> None:
        """Deleted, all of the tenant's without a conversation: no copy of it is begun or finished any more."""
        for key, wanted in list(self._waiting.items()):
            if wanted.owner.is_of(tenant, conversation):
                del self._waiting[key]
        if self._copying is not None and self._copying[0].owner.is_of(tenant, conversation):
            self._copying[1].cancel()

    async def _copy_to_all(self, wanted: _Wanted) -> None:
        for node in self._targets(wanted.key):
            try:
                async with asyncio.timeout(COPY_S):
                    await self._copy(node, wanted)
            except (DistServeError, TimeoutError) as e:
                log.info("a segment was not copied to %s: %s", node, str(e) or "no answer in time")

    def _targets(self, key: bytes) -> list[str]:
        return [n for n in owners(key, self._peers(), self._replicas) if n != self._node_id]

    async def _copy(self, node: str, wanted: _Wanted) -> None:
        holdings = self._holdings
        entries = holdings.prefix(wanted.hashes)
        if not len(entries):
            return
        holdings.pins.hold(entries)
        try:
            await self._offer(node, entries, wanted.owner)
        finally:
            holdings.pins.unhold(entries)

    async def _offer(self, node: str, entries: Entries, owner: Owner) -> None:
        index = self._holdings.index
        head = int(entries[0])
        run = ChainRun(start=int(index.depth[head]), hashes=index.hashes_of(entries), parent=index.parent_hash_of(head))
        request = OfferRequest(
            worker=self._node_id,
            layout=self._holdings.arena.layout,
            runs=[run],
            transports=list(self._senders),
            host_key=host_key(),
            tenant=owner.tenant,
            conversation=owner.conversation,  # so that deleting it there finds them too
            priority=owner.priority,
        )
        subject = subjects.worker("kvstore", node)
        answer = await self._bus.request(subject, encode(request), timeout_s=self._request_timeout_s)
        grant = decode_as(OfferGrant, answer)
        if grant.region is None:
            return
        wanted = entries[grant.wanted]
        try:
            coming = self._promotion.bring(wanted.tolist())
            await asyncio.wait(coming)  # awaiting one would cancel it for others when we are cancelled
            if not all(c.result() for c in coming):
                raise DistServeError("a block of it could not be read")
            await self._write(node, grant, index.dram[wanted].tolist())
        except BaseException as e:
            region = grant.region
            released = OfferReleased(
                worker=self._node_id, lease_id=region.lease_id, epoch=region.epoch, reason=str(e) or type(e).__name__
            )
            await self._bus.publish(subject, encode(released))
            raise
        self.num_copied += len(wanted)

    async def _write(self, node: str, grant: OfferGrant, rows: list[int]) -> None:
        assert grant.region is not None
        sender = self._senders[grant.region.endpoint.kind]
        transfer = await sender.open(
            grant.region, timeout_s=self._request_timeout_s, traffic_class="background", peer=node
        )
        try:
            num_layers = self._holdings.arena.layout.num_layers
            transfer.write((Span(0, num_layers, tuple(rows), tuple(range(len(rows)))),))
            await transfer.commit(encode(OfferedState(worker=self._node_id)), timeout_s=COPY_S)
        finally:
            await transfer.abort("not finished")  # nothing, if it was committed

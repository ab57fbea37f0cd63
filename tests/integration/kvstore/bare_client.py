"""A worker reduced to what a store node sees of it: a pool, senders and receivers, a bus, an entry in the registry."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from distserve.bus import subjects
from distserve.bus.base import Bus
from distserve.bus.nats import NatsBus
from distserve.kv.hashing import Chain, pack
from distserve.kv.layout import fingerprint
from distserve.kv.lease import LeaseTable, first_epoch
from distserve.messages import (
    BlocksReleased,
    ChainRun,
    FetchReply,
    FetchRequest,
    KVLayout,
    Message,
    OfferedState,
    OfferGrant,
    OfferReleased,
    OfferRequest,
    PrefixReply,
    PrefixRequest,
    Priority,
    StoreStats,
    StoreStatsRequest,
    WorkerInfo,
    decode_as,
    encode,
)
from distserve.transport.base import Commit, PoolMemory, Receiver, Sender, Span, Transfer
from distserve.transport.factory import make_receiver, make_sender
from distserve.transport.select import host_key
from distserve.worker.membership import Membership
from tests.contracts.transport.pools import SMALL, pool

MODEL = "tiny"
ASK_S = 20.0


def chain_of(num_blocks: int, seed: int = 0, layout: KVLayout = SMALL, salt: str = "") -> Chain:
    """Of a random prompt."""
    tokens = np.random.default_rng(seed).integers(0, 50_000, num_blocks * layout.block_size).tolist()
    chain = Chain(layout.block_size, fingerprint(layout), salt)
    chain.extend(tokens)
    return chain


def run_of(chain: Chain, start: int = 0, stop: int | None = None) -> ChainRun:
    stop = len(chain) if stop is None else stop
    return ChainRun(start=start, hashes=pack(chain.hashes[start:stop]), parent=chain.parent_of(start))


@dataclass(slots=True, eq=False)
class BareClient:
    """Blocks [0, half) of its pool are sources, filled with random bytes, the others take what is fetched."""

    worker_id: str
    bus: Bus
    memory: PoolMemory
    kind: str
    sender: Sender
    receiver: Receiver
    leases: LeaseTable
    ask_s: float = ASK_S
    committed: dict[tuple[int, int], Commit] = field(default_factory=dict)

    @property
    def half(self) -> int:
        return self.memory.num_blocks // 2

    async def ask(self, node: str, message: Message, timeout_s: float = 0.0) -> bytes:
        subject = subjects.worker("kvstore", node)
        return await self.bus.request(subject, encode(message), timeout_s=timeout_s or self.ask_s)

    async def grant(
        self,
        node: str,
        runs: Sequence[ChainRun],
        *,
        tenant: str = "",
        conversation: str = "",
        priority: Priority = "normal",
        layout: KVLayout | None = None,
    ) -> OfferGrant:
        request = OfferRequest(
            worker=self.worker_id,
            layout=layout or self.memory.layout,
            runs=list(runs),
            transports=[self.kind],
            host_key=host_key(),
            tenant=tenant,
            conversation=conversation,
            priority=priority,
        )
        return decode_as(OfferGrant, await self.ask(node, request))

    async def open(self, node: str, grant: OfferGrant) -> Transfer:
        assert grant.region is not None
        return await self.sender.open(grant.region, timeout_s=5, traffic_class="background", peer=node)

    def write(self, transfer: Transfer, sources: Sequence[int]) -> None:
        num_layers = self.memory.layout.num_layers
        transfer.write((Span(0, num_layers, tuple(sources), tuple(range(len(sources)))),))

    async def offer(
        self,
        node: str,
        runs: Sequence[ChainRun],
        sources: Sequence[int],
        *,
        tenant: str = "",
        conversation: str = "",
        priority: Priority = "normal",
    ) -> int:
        """Blocks `sources` of the pool are those of the runs together; how many the node wanted."""
        grant = await self.grant(node, runs, tenant=tenant, conversation=conversation, priority=priority)
        if grant.region is None:
            return 0
        transfer = await self.open(node, grant)
        try:
            self.write(transfer, [sources[i] for i in grant.wanted])
            await transfer.commit(encode(OfferedState(worker=self.worker_id)), timeout_s=ASK_S)
        finally:
            await transfer.abort("not finished")
        return len(grant.wanted)

    async def give_up(self, node: str, grant: OfferGrant) -> None:
        """A lease that was not written to."""
        assert grant.region is not None
        released = OfferReleased(worker=self.worker_id, lease_id=grant.region.lease_id, epoch=grant.region.epoch)
        await self.bus.publish(subjects.worker("kvstore", node), encode(released))

    async def lookup(self, node: str, runs: Sequence[ChainRun], *, pin_s: float = 10.0) -> PrefixReply:
        request = PrefixRequest(
            asker=self.worker_id, layout=fingerprint(self.memory.layout), runs=list(runs), pin_s=pin_s
        )
        return decode_as(PrefixReply, await self.ask(node, request))

    async def fetch(
        self,
        node: str,
        runs: Sequence[ChainRun],
        targets: Sequence[int],
        *,
        pin_id: int = 0,
        timeout_s: float = 10.0,
    ) -> FetchReply:
        """Into blocks `targets` of the pool. Whatever happens, nobody writes to them any more when it returns."""
        lease = self.leases.grant("store", list(targets), 30.0, 0.0)
        region = self.receiver.grant(lease)
        request = FetchRequest(asker=self.worker_id, region=region, runs=list(runs), pin_id=pin_id, timeout_s=timeout_s)
        try:
            return decode_as(FetchReply, await self.ask(node, request, timeout_s + 5))
        finally:
            await self.receiver.revoke(lease.lease_id, lease.epoch)
            self.leases.revoke(lease.lease_id, lease.epoch)

    async def release(self, node: str, pin_id: int) -> None:
        message = BlocksReleased(asker=self.worker_id, pin_id=pin_id)
        await self.bus.publish(subjects.worker("kvstore", node), encode(message))

    async def stats(self, node: str) -> StoreStats:
        return decode_as(StoreStats, await self.ask(node, StoreStatsRequest()))

    def bytes_of(self, blocks: Sequence[int]) -> bytes:
        return bytes(self.memory.blocks[list(blocks)].tobytes())

    def on_commit(self, commit: Commit) -> None:
        self.committed[commit.lease_id, commit.epoch] = commit


@asynccontextmanager
async def bare_client(
    url: str,
    *,
    kind: str = "shm",
    worker_id: str = "decode-bare",
    num_blocks: int = 256,
    layout: KVLayout = SMALL,
    seed: int = 1,
) -> AsyncIterator[BareClient]:
    """Registered as a decode worker of MODEL while inside."""
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(await NatsBus.connect(url, name=worker_id, registry_ttl_s=1.0))
        memory = stack.enter_context(pool(num_blocks, layout, seed=seed))
        memory.blocks[num_blocks // 2 :] = 0
        sender = make_sender(kind, memory, sender_id=worker_id)
        stack.push_async_callback(sender.stop)
        receiver = make_receiver(kind, memory)
        client = BareClient(worker_id, bus, memory, kind, sender, receiver, LeaseTable(first_epoch()))
        await receiver.start(client.on_commit, lambda lease_id, epoch, error: None)
        stack.push_async_callback(receiver.stop)
        info = WorkerInfo(worker_id=worker_id, role="decode", model=MODEL, status="ok", layout=layout)
        await stack.enter_async_context(Membership(bus.registry(), lambda: info, beat_s=0.2))
        yield client

"""Workers and store nodes in one process: real pools in memfds, real shm and tcp between them, the bus in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from distserve.bus import subjects
from distserve.bus.base import Bus, Delivery, Watch
from distserve.bus.memory import MemoryBus, MemoryHub
from distserve.config import Config, KVStoreConfig, TransportConfig
from distserve.kv.block_pool import BlockPool
from distserve.kv.hashing import Chain, unpack
from distserve.kv.layout import fingerprint
from distserve.kv.lease import LeaseTable
from distserve.messages import (
    BlocksReleased,
    FetchRequest,
    KVLayout,
    Message,
    OfferedState,
    OfferGrant,
    OfferReleased,
    OfferRequest,
    PrefixReply,
    PrefixRequest,
    Role,
    WorkerInfo,
    decode,
    decode_as,
    encode,
)
from distserve.telemetry import entered, receive
from distserve.transport.base import Commit, Lease, PoolMemory, Receiver, Sender
from distserve.transport.factory import make_receiver, make_sender
from distserve.transport.select import choose, host_key
from distserve.worker.data_plane import DataPlane
from distserve.worker.store import Arrivals, Store, open_store
from tests.contracts.transport.pools import SMALL, pool

TTL_S = 60.0  # of the registry: nobody beats here


def config(**store: object) -> Config:
    settings = {"lookup_timeout_s": 0.5, "min_fetch_blocks": 1, "offer_blocks": 1024, **store}
    return Config(kvstore=KVStoreConfig(**settings), transport=TransportConfig(connect_timeout_s=2.0))  # type: ignore[arg-type]


def chain(num_blocks: int, *, salt: str = "", layout: KVLayout = SMALL) -> Chain:
    """Always the same one, by salt."""
    made = Chain(layout.block_size, fingerprint(layout), salt)
    made.extend([i % 50_000 for i in range(num_blocks * layout.block_size)])
    return made


class Keeper:
    """A store node as offers see one: grants leases on what it lacks, keeps what is committed."""

    peer: Peer

    def __init__(self) -> None:
        self.committed: list[OfferedState] = []
        self.failed: list[Exception] = []
        self._open: dict[int, tuple[Lease, Receiver, list[bytes]]] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    def grant(self, request: OfferRequest) -> OfferGrant:
        peer = self.peer
        names = [n for run in request.runs for n in unpack(run.hashes)]
        wanted = [i for i, n in enumerate(names) if not peer.pool.find([n])]
        if not wanted:
            return OfferGrant(reason="all of it is here")
        choice = choose([r.endpoint for r in peer.receivers.values()], request.transports, request.host_key)
        receiver = peer.receivers[choice.endpoint.kind]
        lease = peer.leases.grant(request.worker, peer.pool.allocate(len(wanted)), 10.0, time.monotonic())
        self._open[lease.lease_id] = lease, receiver, [names[i] for i in wanted]
        return OfferGrant(wanted=wanted, region=receiver.grant(lease), ttl_s=10.0, reason=choice.reason)

    def commit(self, commit: Commit) -> None:
        self.committed.append(decode_as(OfferedState, commit.state))
        lease, _, names = self._open.pop(commit.lease_id)
        self.peer.leases.commit(commit.lease_id, commit.epoch)
        self.peer.pool.name(lease.block_ids, names)
        self.peer.pool.free(lease.block_ids)

    def lost(self, lease_id: int, epoch: int, error: Exception) -> None:
        self.failed.append(error)
        lease, _, _ = self._open.pop(lease_id)
        self.peer.leases.revoke(lease_id, epoch)
        self.peer.pool.free(lease.block_ids)

    async def release(self, released: OfferReleased) -> None:
        if (found := self._open.pop(released.lease_id, None)) is not None:
            lease, receiver, _ = found
            await receiver.revoke(lease.lease_id, lease.epoch)
            self.peer.leases.revoke(lease.lease_id, lease.epoch)
            self.peer.pool.free(lease.block_ids)


class NodePins:
    """A store node's: what a lookup has found stays until it is given back, or close()."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._pins: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def pin(self, request: PrefixRequest, reply: PrefixReply) -> PrefixReply:
        runs = zip(request.runs, reply.num_found, strict=True)
        ids = [i for run, num in runs for i in self._pool.find(unpack(run.hashes)[:num])]
        if request.pin_s <= 0 or not ids:
            return reply
        self._pool.acquire(ids)
        pin_id = 1 + max(self._pins, default=0)
        self._pins[pin_id] = ids
        return msgspec.structs.replace(reply, pin_id=pin_id)

    def release(self, pin_id: int) -> None:
        self._pool.free(self._pins.pop(pin_id, []))

    def close(self) -> None:
        for pin_id in list(self._pins):
            self.release(pin_id)


@dataclass(eq=False)
class Peer:
    """A worker, or a pool that takes the part of a store node."""

    worker_id: str
    role: Role
    bus: Bus
    memory: PoolMemory
    pool: BlockPool
    leases: LeaseTable
    arrivals: Arrivals
    receivers: dict[str, Receiver]
    senders: dict[str, Sender]
    store: Store
    watch: Watch
    keeper: Keeper
    pins: NodePins
    plane: DataPlane
    heard: list[Message] = field(default_factory=list)
    on_message: Callable[[Message], object] | None = None  # before it is answered; awaited if it can be
    num_freed: int = 0

    def holds(self, of: Chain, first: int = 0, stop: int | None = None) -> list[int]:
        """Blocks of a chain, named, cached, with bytes of their own."""
        stop = len(of) if stop is None else stop
        ids = self.pool.allocate(stop - first)
        self.pool.name(ids, of.hashes[first:stop])
        self.pool.free(ids)
        return ids

    def bytes_of(self, ids: Sequence[int]) -> bytes:
        return self.memory.blocks[list(ids)].tobytes()

    def heard_of(self, kind: type[Message]) -> list[Message]:
        return [m for m in self.heard if isinstance(m, kind)]

    @property
    def at_rest(self) -> bool:
        """No lease, no pin, no reference is left."""
        self.pool.check()
        self.leases.check()
        held = len(self.leases) or len(self.arrivals) or len(self.pins) or self.pool.num_used
        return self.store.idle and not held

    async def answer(self, delivery: Delivery) -> bytes:
        message = decode(delivery.data)
        self.heard.append(message)
        if self.on_message is not None:
            waiting = self.on_message(message)
            if asyncio.iscoroutine(waiting):
                await waiting
        match message:
            case OfferRequest():
                return encode(self.keeper.grant(message))
            case OfferReleased():
                await self.keeper.release(message)
                return b""
            case FetchRequest() | BlocksReleased():
                self.pins.release(message.pin_id)
        with entered(receive(delivery.headers)):
            answer = await self.store.answer(message)
        if self.role == "kvstore" and isinstance(message, PrefixRequest):
            assert isinstance(answer, PrefixReply)
            answer = self.pins.pin(message, answer)
        return b"" if answer is None else encode(answer)

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            worker_id=self.worker_id,
            role=self.role,
            model="m",
            status="ok",
            host_key=host_key(),
            layout=self.memory.layout,
            transports=list(self.senders),
        )

    async def leave(self) -> None:
        """As the registry tells it of one that died."""
        await self.bus.registry().delete(self.info())


@dataclass(eq=False)
class Net:
    """`async with net() as n`: peers on one bus."""

    connect: Callable[[str], Awaitable[Bus]]  # by a name
    stack: AsyncExitStack

    async def peer(
        self,
        worker_id: str,
        role: Role = "decode",
        *,
        num_blocks: int = 600,
        kinds: Sequence[str] = ("shm", "tcp"),
        layout: KVLayout = SMALL,
        seed: int | None = None,
        advertised: KVLayout | None = None,
        setup: Config | None = None,
    ) -> Peer:
        """advertised: the layout that it says it has."""
        stack = self.stack
        memory = stack.enter_context(pool(num_blocks, layout, seed=seed))
        bus = await stack.enter_async_context(await self.connect(worker_id))
        watch = await stack.enter_async_context(bus.registry().watch())
        plane = DataPlane(list(kinds), "auto", may_fall_back=False)
        plane.in_use.follow(watch)
        senders = {k: make_sender(k, memory, sender_id=worker_id, meter=plane.meter) for k in kinds}
        for sender in senders.values():
            stack.push_async_callback(sender.stop)
        keeper = Keeper()
        arrivals, leases = Arrivals(keeper.commit, keeper.lost), LeaseTable(epoch=time.time_ns())
        receivers = {k: make_receiver(k, memory, meter=plane.meter) for k in kinds}
        for receiver in receivers.values():
            await receiver.start(arrivals.on_commit, arrivals.on_lost)
            stack.push_async_callback(receiver.stop)
        blocks = BlockPool(num_blocks)

        def freed() -> None:
            made.num_freed += 1

        store = await stack.enter_async_context(
            open_store(
                setup or config(),
                worker_id,
                bus,
                watch,
                plane,
                pool=blocks,
                layout=layout,
                leases=leases,
                arrivals=arrivals,
                receivers=receivers,
                senders=senders,
                on_freed=freed,
            )
        )
        made = Peer(
            worker_id,
            role,
            bus,
            memory,
            blocks,
            leases,
            arrivals,
            receivers,
            senders,
            store,
            watch,
            keeper,
            NodePins(blocks),
            plane,
        )
        keeper.peer = made
        await stack.enter_async_context(await bus.serve(subjects.worker(role, worker_id), made.answer))
        info = made.info()
        if advertised is not None:
            info = msgspec.structs.replace(info, layout=advertised)
        await bus.registry().put(info)
        return made


@asynccontextmanager
async def net(connect: Callable[[str], Awaitable[Bus]] | None = None) -> AsyncIterator[Net]:
    """connect: to another bus than one in memory."""
    hub = MemoryHub()

    async def in_memory(name: str) -> Bus:
        return MemoryBus(hub, name=name, registry_ttl_s=TTL_S)

    async with AsyncExitStack() as stack:
        yield Net(connect or in_memory, stack)

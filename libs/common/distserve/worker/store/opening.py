"""A worker's part in the store, composed in one place."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from distserve.bus.base import Bus, RegistryEvent, Watch
from distserve.config import Config
from distserve.errors import MalformedMessage
from distserve.kv.block_pool import BlockPool
from distserve.kv.layout import fingerprint
from distserve.kv.lease import LeaseTable
from distserve.messages import BlocksReleased, FetchRequest, KVLayout, KVSnapshotRequest, Message, PrefixRequest
from distserve.transport.base import Receiver, Sender
from distserve.transport.select import choose, host_key
from distserve.worker.data_plane import DataPlane
from distserve.worker.store.arrivals import Arrivals
from distserve.worker.store.client import StoreClient
from distserve.worker.store.counts import StoreCounts
from distserve.worker.store.detours import Detours
from distserve.worker.store.events import EventPublisher
from distserve.worker.store.failing import FailingTiers
from distserve.worker.store.fetches import Fetches
from distserve.worker.store.giving import Giving
from distserve.worker.store.letters import Letters
from distserve.worker.store.lookups import Lookups
from distserve.worker.store.nodes import Nodes
from distserve.worker.store.offers import Route
from distserve.worker.store.pool_source import PoolSource
from distserve.worker.tasks import background

PIN_MARGIN_S = 5.0  # a pin outlives lookup and fetch by so much: room for the blocks must be found in between


@dataclass(frozen=True, slots=True)
class Store:
    """Made by open_store()."""

    client: StoreClient
    source: PoolSource
    events: EventPublisher
    counts: StoreCounts
    ANSWERS = (PrefixRequest, FetchRequest, BlocksReleased, KVSnapshotRequest)

    @property
    def idle(self) -> bool:
        """No block of the pool is on offer or being read: what is used belongs to the worker."""
        return not (self.client.num_held_blocks or len(self.source))

    async def answer(self, message: Message) -> Message | None:
        """To one of ANSWERS; None if it wants none. Raises MalformedMessage for another, and as PoolSource.fetch()."""
        match message:
            case PrefixRequest():
                return self.source.lookup(message)
            case FetchRequest():
                return await self.source.fetch(message)
            case BlocksReleased():
                return None  # there are no pins here
            case KVSnapshotRequest():
                return self.events.snapshot(message)
        raise MalformedMessage(f"a pool has no answer to {type(message).__name__}", kind=type(message).__name__)

    async def drain(self, grace_s: float) -> None:
        """Nothing new is offered, nothing is found here; returns when what is under way has ended, or after grace_s."""
        await asyncio.gather(self.client.drain(grace_s), self.source.drain(grace_s))


@asynccontextmanager
async def open_store(
    config: Config,
    worker_id: str,
    bus: Bus,
    watch: Watch,
    plane: DataPlane,
    *,
    pool: BlockPool,
    layout: KVLayout,
    leases: LeaseTable,
    arrivals: Arrivals,
    receivers: Mapping[str, Receiver],
    senders: Mapping[str, Sender],
    on_freed: Callable[[], None],
) -> AsyncIterator[Store]:
    """`leases` and `arrivals`: of all that is granted at these receivers. on_freed: blocks came back to the pool that
    were on offer or being read. Stands between the transports and the door: opened after those, closed
    before them; when it is closed nothing of the pool is read, and no lease is open, on the store's account."""
    store_config = config.kvstore
    counts, letters = StoreCounts(), Letters(bus)
    nodes = Nodes(watch, layout, worker_id, in_time_s=store_config.lookup_timeout_s)
    failing = FailingTiers(nodes.present, fetch_s=store_config.fetch_timeout_s)
    detours = Detours(nodes.present)

    lookups = Lookups(
        bus,
        nodes,
        failing,
        letters,
        counts,
        asker=worker_id,
        fingerprint=fingerprint(layout),
        timeout_s=store_config.lookup_timeout_s,
        pin_s=store_config.lookup_timeout_s + store_config.fetch_timeout_s + PIN_MARGIN_S,
        replicas=store_config.replicas,
    )
    fetches = Fetches(
        bus,
        nodes,
        failing,
        leases,
        receivers,
        arrivals,
        counts,
        detours,
        layout,
        choose=functools.partial(
            choose,
            forced=plane.forced,
            zero_copy_threshold_bytes=config.transport.zero_copy_threshold_bytes,
            may_fall_back=plane.may_fall_back,
        ),
        note_in_use=plane.in_use.note,
        give_back=lookups.give_back,
        asker=worker_id,
    )
    route = Route(
        bus=bus,
        nodes=nodes,
        letters=letters,
        senders=senders,
        kinds=plane.kinds,
        detours=detours,
        note_in_use=plane.in_use.note,
        counts=counts,
        layout=layout,
        worker_id=worker_id,
        host_key=host_key(),
        ask_timeout_s=config.bus.request_timeout_s,
        connect_timeout_s=config.transport.connect_timeout_s,
        commit_timeout_s=config.transport.commit_timeout_s,
    )
    giving = Giving(route, pool, max_blocks=store_config.offer_blocks, on_freed=on_freed)
    client = StoreClient(
        nodes, lookups, fetches, giving, counts, use=store_config.use, min_fetch_blocks=store_config.min_fetch_blocks
    )
    source = PoolSource(pool, layout, senders, plane.in_use.note, counts, worker_id=worker_id, on_freed=on_freed)
    events = EventPublisher(bus, pool, counts, worker_id=worker_id)

    def on_registry(event: RegistryEvent) -> None:
        fetches.on_registry(event)
        giving.on_registry(event)
        if event.kind == "gone":
            detours.forget(event.worker_id)
            failing.forget(event.worker_id)

    watch.on_event(on_registry)
    async with background(events.run()):
        try:
            yield Store(client, source, events, counts)
        finally:
            await source.stop()
            await client.stop()
            await letters.sent()
            events.close()

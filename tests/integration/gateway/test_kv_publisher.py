"""The workers' own event publisher over a block pool that is in use, and two gateways that follow it."""

import asyncio
import random
from contextlib import AsyncExitStack

from distserve.bus import subjects
from distserve.kv.block_pool import BlockPool
from distserve.kv.hashing import block_hashes
from distserve.kv.layout import fingerprint
from distserve.messages import EVENT_HASH_BYTES, KVSnapshotRequest, Message
from distserve.worker.store.counts import StoreCounts
from distserve.worker.store.events import EventPublisher
from distserve_gateway.held_blocks import words
from distserve_gateway.kv_follower import KVFollower
from distserve_gateway.kv_index import KVIndex
from tests.integration.gateway.real_cluster import serving_http
from tests.unit.gateway.scripted import LAYOUT, MODEL, ScriptedWorker, says
from tests.waiting import until

PAGE_HASHES = 50


class PooledWorker(ScriptedWorker):
    """Its blocks are a pool's: sequences come, share beginnings and go, and the longest unused blocks are evicted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pool = BlockPool(400)
        self.publisher = EventPublisher(self.bus, self.pool, StoreCounts(), worker_id=self.worker_id)
        self.publisher._max_bytes = PAGE_HASHES * EVENT_HASH_BYTES
        self.num_pages = 0
        self.blocks.answer = self._answer  # type: ignore[method-assign]

    async def _answer(self, message: Message) -> Message:
        assert isinstance(message, KVSnapshotRequest)
        self.num_pages += 1
        await asyncio.sleep(0.002)  # others' messages pass between two pages
        return self.publisher.snapshot(message)

    def serve(self, token_ids: list[int]) -> None:
        hashes = block_hashes(token_ids, LAYOUT.block_size, fingerprint(LAYOUT))
        hits = self.pool.find(hashes)
        self.pool.acquire(hits)
        fresh = self.pool.allocate(len(hashes) - len(hits))
        self.pool.name(fresh, hashes[len(hits) :])
        self.pool.free([*hits, *fresh])

    @property
    def numbers(self) -> dict[int, None]:
        return dict.fromkeys(words(b"".join(name[:EVENT_HASH_BYTES] for name in self.pool.names)))


async def test_two_gateways_end_up_with_what_the_pool_holds_though_messages_get_lost(nats_url: str) -> None:
    draw = random.Random(5)
    async with serving_http(nats_url, says("x")) as (cluster, _), AsyncExitStack() as stack:
        bus = await stack.enter_async_context(await cluster._connect("d1"))
        worker = PooledWorker(bus, "decode", "d1", says("x"))
        publish = bus.publish

        async def lossy(subject: str, data: bytes, **options: object) -> None:
            if subject != subjects.kv_events() or draw.random() > 0.2:
                await publish(subject, data, **options)  # type: ignore[arg-type]

        bus.publish = lossy  # type: ignore[method-assign, assignment]
        for start in range(0, 300, 20):
            worker.serve(list(range(start, start + 320)))
        await stack.enter_async_context(worker)
        telling = asyncio.create_task(worker.publisher.run())
        stack.callback(telling.cancel)
        other_bus = await stack.enter_async_context(await cluster._connect("other"))
        watch = await stack.enter_async_context(other_bus.registry().watch())
        other = await stack.enter_async_context(KVFollower(other_bus, watch, MODEL, KVIndex()))
        for _ in range(150):
            head, tail = draw.randrange(5) * 1000, draw.randrange(10_000)
            worker.serve([*range(head, head + 16 * draw.randrange(1, 10)), *range(tail, tail + draw.randrange(300))])
            await asyncio.sleep(0.004)
        bus.publish = publish  # type: ignore[method-assign]
        worker.serve(list(range(77_000, 77_032)))  # what is lost shows with the next message
        for index in (cluster.gateway.kv.index, other.index):
            await until(
                lambda index=index: index.lacks("d1") is None and index.holders.get("d1") == worker.numbers,  # type: ignore[misc]
                what="the index holds what the pool holds",
            )
            index.check()
        assert len(worker.numbers) > 300
        assert worker.num_pages > 2 * len(worker.numbers) / PAGE_HASHES
        worker.pool.check()

"""The same over a real NATS server, for what the bus itself has a part in."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from distserve.bus import subjects
from distserve.bus.base import Bus
from distserve.bus.nats import NatsBus
from distserve.lifecycle import new_id
from distserve.messages import FetchRequest, KVEvents, decode_as
from tests.unit.worker.store.peers import TTL_S, Net, chain, config, net
from tests.waiting import until


@asynccontextmanager
async def over(url: str) -> AsyncIterator[Net]:
    bucket = new_id("registry")

    async def connect(name: str) -> Bus:
        return await NatsBus.connect(url, name=name, registry_ttl_s=TTL_S, registry_bucket=bucket)

    async with net(connect) as n:
        yield n


async def test_lookup_fetch_offer_and_events(nats_url: str):
    async with over(nats_url) as n:
        holder, node = await n.peer("store-h", seed=1), await n.peer("store-n", "kvstore", seed=2)
        worker = await n.peer("store-w")
        heard: list[KVEvents] = []

        async def listen(delivery) -> None:
            heard.append(decode_as(KVEvents, delivery.data))

        await worker.bus.subscribe(subjects.kv_events(), listen, inline=True)
        c = chain(100)
        theirs = holder.holds(c, 0, 64) + node.holds(c, 64, 100)
        await until(lambda: worker.store.client.may_find("store-h") and bool(worker.store.client.nodes))
        found = await worker.store.client.lookup(c, 0, holder="store-h")
        ours = worker.pool.allocate(100)
        assert await worker.store.client.fetch(found, ours, timeout_s=10) == 100
        assert worker.bytes_of(ours[:64]) == holder.bytes_of(theirs[:64])
        assert worker.bytes_of(ours[64:]) == node.bytes_of(theirs[64:])
        worker.pool.name(ours, c.hashes)
        worker.store.client.offer(c, 0, ours)
        worker.pool.free(ours)
        await until(lambda: worker.store.counts.num_offered_blocks == 64)  # the other 36 it had
        assert worker.bytes_of(ours) == node.bytes_of(node.pool.find(c.hashes))
        await until(lambda: all(peer.at_rest for peer in (holder, node, worker)))
        await until(lambda: sum(len(e.stored) // 8 for e in heard if e.worker == "store-w") == 100)


async def test_a_node_that_nobody_answers_for_costs_no_time(nats_url: str):
    async with over(nats_url) as n:
        node = await n.peer("store-n", "kvstore")
        worker = await n.peer("store-w", setup=config(lookup_timeout_s=10.0))
        await node.bus.registry().put(msgspec.structs.replace(node.info(), worker_id="store-ghost"))
        await until(lambda: len(worker.store.client.nodes) == 2)
        c = chain(64)
        node.holds(c)
        began = time.monotonic()
        found = await worker.store.client.lookup(c, 0)
        assert time.monotonic() - began < 5
        assert len(found) == 64
        worker.store.client.release(found)
        await until(lambda: node.at_rest)


async def test_a_cancelled_fetch_leaves_nothing(nats_url: str):
    async with over(nats_url) as n:
        node, worker = await n.peer("store-n", "kvstore", seed=1), await n.peer("store-w")
        c = chain(64)
        node.holds(c)
        await until(worker.store.client.may_find)
        reached, go_on = asyncio.Event(), asyncio.Event()

        async def hold(message) -> None:
            if isinstance(message, FetchRequest):
                reached.set()
                await go_on.wait()

        node.on_message = hold
        found = await worker.store.client.lookup(c, 0)
        ours = worker.pool.allocate(64)
        fetch = asyncio.create_task(worker.store.client.fetch(found, ours, timeout_s=60))
        await asyncio.wait_for(reached.wait(), 5)
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        worker.pool.free(ours)
        assert worker.at_rest
        go_on.set()
        await until(lambda: node.at_rest and sum(node.store.counts.num_failed_serves.values()) == 1)
        assert not worker.memory.blocks.any()

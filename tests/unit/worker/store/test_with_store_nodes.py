"""The client against real store nodes, in one process: memory, disk, restart."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np

from distserve.bus import subjects
from distserve.config import Config, KVStoreConfig
from distserve.messages import WorkerInfo
from distserve.transport.base import Span
from distserve.transport.select import host_key
from distserve.worker.store import Label
from distserve_kvstore.assembly import open_node
from distserve_kvstore.node import Node
from distserve_kvstore.service import Door
from tests.contracts.transport.pools import SMALL
from tests.unit.worker.store.peers import Net, Peer, chain, config, net
from tests.waiting import until

BLOCK_BYTES = 8 * 1024


def of_node(folder: Path, *, dram_blocks: int = 512) -> Config:
    store = KVStoreConfig(
        dram_bytes=dram_blocks * BLOCK_BYTES, folder=str(folder), disk_bytes=64 << 20, segment_bytes=1 << 20
    )
    return msgspec.structs.replace(Config(), kvstore=store)


@asynccontextmanager
async def store_node(n: Net, name: str, folder: Path) -> AsyncIterator[Node]:
    async with await n.connect(name) as bus:
        async with bus.registry().watch() as watch:

            def peers() -> list[str]:
                return [w.worker_id for w in watch.snapshot.values() if w.role == "kvstore"]

            async with open_node(of_node(folder), SMALL, name, bus, peers=peers) as node:
                door = Door()
                door.node = node
                async with await bus.serve(subjects.worker("kvstore", name), door):
                    info = WorkerInfo(
                        worker_id=name,
                        role="kvstore",
                        model="m",
                        status="ok",
                        host_key=host_key(),
                        layout=SMALL,
                        transports=["shm", "tcp"],
                    )
                    await bus.registry().put(info)
                    yield node
                    await node.drain(5)
                    await bus.registry().delete(info)


async def fetched(worker: Peer, c, num: int) -> tuple[list[int], dict[str, int]]:
    found = await worker.store.client.lookup(c, 0)
    assert len(found) == num
    ids = worker.pool.allocate(num)
    assert await worker.store.client.fetch(found, ids, timeout_s=20) == num
    worker.pool.name(ids, c.hashes[:num])
    return ids, dict(found.tiers)


async def test_what_one_worker_offers_another_fetches_also_from_disk_after_a_restart(tmp_path: Path):
    async with net() as n:
        giver, taker, later = [await n.peer(name, seed=i) for i, name in enumerate(("giver", "taker", "later"))]
        c = chain(100)
        theirs = giver.holds(c)
        async with store_node(n, "node", tmp_path):
            await until(giver.store.client.may_find)
            giver.store.client.offer(c, 0, theirs, Label("t", "c"))
            await until(lambda: giver.store.counts.num_offered_blocks == 100)
            await until(taker.store.client.may_find)
            ours, tiers = await fetched(taker, c, 100)
            assert tiers == {"dram": 100}
            assert np.array_equal(giver.memory.blocks[theirs], taker.memory.blocks[ours])
            giver.store.client.offer(c, 0, theirs)
            await until(lambda: giver.store.counts.num_unwanted_blocks == 100)
        assert not later.store.client.may_find()
        async with store_node(n, "node-again", tmp_path):
            await until(later.store.client.may_find)
            ours, tiers = await fetched(later, c, 100)
            assert tiers == {"disk": 100}
            assert np.array_equal(giver.memory.blocks[theirs], later.memory.blocks[ours])


async def test_layers_that_stream_in_are_found_when_the_prompt_is_finished(tmp_path: Path):
    async with net() as n:
        prefill, other = await n.peer("prefill", seed=1), await n.peer("other")
        c = chain(70)
        table = prefill.pool.allocate(71)
        async with store_node(n, "node", tmp_path) as node:
            await until(prefill.store.client.may_find)
            sink = prefill.store.client.streaming_offer(c, 0, table[:70])
            for layer in range(SMALL.num_layers):
                sink.layers_ready(Span(layer, layer + 1, tuple(table), tuple(range(71))))
            await until(lambda: len(node.grants) == 2)
            assert not await other.store.client.lookup(c, 0)
            sink.finished()
            await until(lambda: prefill.store.counts.num_offered_blocks == 70)
            ours, _ = await fetched(other, c, 70)
            assert np.array_equal(prefill.memory.blocks[table[:70]], other.memory.blocks[ours])
            await until(lambda: len(node.grants) == 0)


async def test_when_one_of_two_nodes_leaves_its_segments_are_misses_until_they_are_offered_again(tmp_path: Path):
    async with net() as n:
        giver = await n.peer("giver", seed=1)
        taker = await n.peer("taker", setup=config(replicas=1))
        c = chain(64 * 8)
        theirs = giver.pool.allocate(len(c))
        giver.pool.name(theirs, c.hashes)
        async with store_node(n, "node-a", tmp_path / "a") as a:
            async with store_node(n, "node-b", tmp_path / "b") as b:
                await until(lambda: len(giver.store.client.nodes) == 2)
                for first in range(0, len(c), 64):  # by turns: an offer holds a quarter of the pool at most
                    giver.store.client.offer(c, first, theirs[first : first + 64])
                    await until(lambda: not giver.store.client.num_offers)
                held = [len(node.holdings.index.entries()) for node in (a, b)]
                assert sum(held) == len(c)
                assert min(held) > 0
                _, _ = await fetched(taker, c, len(c))
            await until(lambda: giver.store.client.nodes == ["node-a"])
            lost = await taker.store.client.lookup(c, 0)
            assert len(lost) < len(c)
            taker.store.client.release(lost)
            for first in range(0, len(c), 64):
                giver.store.client.offer(c, first, theirs[first : first + 64])
                await until(lambda: not giver.store.client.num_offers)
            assert len(a.holdings.index.entries()) == len(c)

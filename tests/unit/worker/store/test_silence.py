"""Who does not answer a lookup in time, and who is asked instead."""

import asyncio
import time

import msgspec
import pytest

from distserve.kv.placement import owners
from distserve.messages import BlocksReleased, PrefixRequest
from distserve.worker.store import pauses
from tests.unit.worker.store.peers import Peer, chain, config, net
from tests.unit.worker.store.test_fetching import settled
from tests.waiting import until


async def test_a_silent_node_is_a_miss_at_the_deadline_and_then_left_out_though_it_beats():
    async with net() as n:
        node = await n.peer("node", "kvstore")
        worker = await n.peer("worker", setup=config(lookup_timeout_s=0.2))
        c = chain(64)
        node.holds(c)
        frozen = asyncio.Event()
        node.on_message = lambda m: frozen.wait()
        began = time.monotonic()
        assert not await worker.store.client.lookup(c, 0)
        assert 0.15 < time.monotonic() - began < 1.0
        assert worker.store.counts.num_silent == 1
        await beat(node, worker)
        assert not worker.store.client.may_find()
        assert not await worker.store.client.lookup(c, 0)
        assert len(node.heard) == 1
        frozen.set()
        await until(lambda: len(node.heard_of(BlocksReleased)) == 1, what="the late answer's pin given back")
        assert node.at_rest
        assert not worker.store.client.may_find(), "late is no better than never"
        node.on_message = None
        await until(worker.store.client.may_find, what="the end of the pause")
        found = await worker.store.client.lookup(c, 0)
        assert len(found) == 64
        worker.store.client.release(found)
        await settled(node)
        assert worker.store.client.may_find()


async def beat(node: Peer, seen_by: Peer) -> None:
    seen: list[object] = []
    seen_by.watch.on_event(seen.append)
    await node.bus.registry().put(node.info())
    await until(lambda: bool(seen), what="a beat")


async def test_a_node_that_answers_late_costs_one_lookup_its_deadline_each_time_it_is_tried(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(pauses, "FIRST_S", 0.1)
    async with net() as n:
        node = await n.peer("node", "kvstore")
        worker = await n.peer("worker", setup=config(lookup_timeout_s=0.2))
        c = chain(64)
        node.holds(c)
        frozen = asyncio.Event()
        node.on_message = lambda m: frozen.wait() if isinstance(m, PrefixRequest) else None
        await worker.store.client.lookup(c, 0)
        for tries in (2, 3):
            await until(worker.store.client.may_find, what="the end of the pause")
            await asyncio.gather(*(worker.store.client.lookup(c, 0) for _ in range(10)))
            assert len(node.heard_of(PrefixRequest)) == tries
            await beat(node, worker)
        frozen.set()
        await settled(node)


async def test_the_next_in_rank_stands_in_for_a_silent_owner():
    async with net() as n:
        c = chain(64)
        nodes = {p.worker_id: p for p in [await n.peer(f"node-{i}", "kvstore") for i in range(3)]}
        worker = await n.peer("worker", setup=config(lookup_timeout_s=0.2, replicas=2))
        first, second = (nodes[name] for name in owners(c.hashes[0], nodes, 2))
        second.holds(c)
        frozen = asyncio.Event()
        first.on_message = lambda m: frozen.wait()
        found = await worker.store.client.lookup(c, 0)
        assert [p.pin.source.worker_id for p in found.pieces] == [second.worker_id]
        worker.store.client.release(found)
        frozen.set()
        await settled(first, second)


async def test_a_node_that_is_gone_from_the_bus_costs_no_time():
    async with net() as n:
        node = await n.peer("node", "kvstore")
        worker = await n.peer("worker", setup=config(lookup_timeout_s=10.0))
        ghost = msgspec.structs.replace(node.info(), worker_id="ghost")
        await node.bus.registry().put(ghost)
        c = chain(64 * 6)
        node.holds(c, 0, 64)
        began = time.monotonic()
        async with asyncio.timeout(5):
            found = await worker.store.client.lookup(c, 0)
        assert time.monotonic() - began < 5
        assert len(found) == 64
        worker.store.client.release(found)

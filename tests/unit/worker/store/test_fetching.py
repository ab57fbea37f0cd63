"""Lookup and fetch between a worker and others' pools: real pools, real shm and tcp."""

import asyncio
import time

import msgspec
import numpy as np
import pytest

from distserve.errors import KVError
from distserve.kv.hashing import pack
from distserve.kv.placement import owners
from distserve.messages import BlocksReleased, FetchRequest, Message, PrefixRequest
from distserve.worker.store.found import Found, Piece, Pin, Source
from tests.contracts.transport.pools import SMALL
from tests.unit.worker.store.peers import Peer, chain, config, net
from tests.waiting import until

OTHER = msgspec.structs.replace(SMALL, rope='{"theta": 1}')


async def settled(*peers: Peer) -> None:
    """Every pin, lease and reference is given back."""
    for peer in peers:
        await until(lambda peer=peer: peer.at_rest, what=f"{peer.worker_id} at rest")


@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_what_a_node_holds_comes_byte_for_byte(kind: str):
    async with net() as n:
        node = await n.peer("node", "kvstore", kinds=[kind], seed=1)
        worker = await n.peer("worker", kinds=[kind])
        c = chain(100)
        theirs = node.holds(c)
        found = await worker.store.client.lookup(c, 0)
        assert (found.first, len(found), found.tiers) == (0, 100, {"pool": 100})
        ours = worker.pool.allocate(100)
        assert await worker.store.client.fetch(found, ours, timeout_s=10) == 100
        assert worker.bytes_of(ours) == node.bytes_of(theirs)
        worker.pool.free(ours)
        await settled(node, worker)
        counts = worker.store.counts
        assert (counts.num_lookups, counts.num_sought_blocks, counts.num_hit_blocks) == (1, 100, {"pool": 100})
        assert (counts.num_fetches, counts.num_fetched_blocks) == (1, 100)
        assert counts.num_fetched_bytes == node.store.counts.num_served_bytes == 100 * 8192 * 2 // 2
        assert node.store.counts.num_served_blocks == 100


async def test_a_long_chain_comes_from_all_of_its_owners_under_a_lease_each():
    async with net() as n:
        c = chain(640)
        nodes = [await n.peer(f"node-{i}", "kvstore", num_blocks=700, seed=i) for i in range(3)]
        worker = await n.peer("worker", num_blocks=700, setup=config(replicas=1))
        where: dict[bytes, tuple[Peer, int]] = {}
        for start in range(0, 640, 64):
            owner = owners(c.hashes[start], [p.worker_id for p in nodes])[0]
            node = next(p for p in nodes if p.worker_id == owner)
            ids = node.holds(c, start, start + 64)
            where.update((name, (node, i)) for name, i in zip(c.hashes[start : start + 64], ids, strict=True))
        assert all(node.pool.num_cached for node in nodes)
        found = await worker.store.client.lookup(c, 10, stop=600)
        assert len(found) == 590
        ours = worker.pool.allocate(590)
        assert await worker.store.client.fetch(found, ours, timeout_s=10) == 590
        for name, ours_id in zip(c.hashes[10:600], ours, strict=True):
            node, theirs_id = where[name]
            assert worker.bytes_of([ours_id]) == node.bytes_of([theirs_id])
        assert [len(node.heard_of(FetchRequest)) for node in nodes] == [1, 1, 1]
        worker.pool.free(ours)
        await settled(worker, *nodes)


async def test_the_result_ends_at_the_first_gap_and_the_rest_is_given_back():
    async with net() as n:
        c = chain(192)
        node = await n.peer("node", "kvstore")
        worker = await n.peer("worker")
        node.holds(c, 0, 100)
        node.holds(c, 128, 192)
        found = await worker.store.client.lookup(c, 0)
        assert len(found) == 100
        worker.store.client.release(found)
        worker.store.client.release(found)  # again: nothing
        await settled(node)
        assert len(node.heard_of(BlocksReleased)) == 1


async def test_an_answer_that_is_not_taken_is_told_so_at_once():
    async with net() as n:
        c = chain(64)
        nodes = [await n.peer(f"node-{i}", "kvstore") for i in range(2)]
        worker = await n.peer("worker")
        nodes[0].holds(c, 0, 10)
        nodes[1].holds(c, 0, 20)
        found = await worker.store.client.lookup(c, 0)
        assert len(found) == 20
        await settled(nodes[0])
        assert len(nodes[1].pins) == 1
        worker.store.client.release(found)
        await settled(nodes[1])


async def test_a_holder_and_a_node_complete_each_other_and_the_faster_tier_is_taken():
    async with net() as n:
        c = chain(128)
        node = await n.peer("node", "kvstore", seed=1)
        holder = await n.peer("holder", seed=2)
        worker = await n.peer("worker")
        holder.holds(c, 0, 70)
        node.holds(c, 0, 120)
        assert len(await worker.store.client.lookup(c, 0, holder="nobody")) == 120
        found = await worker.store.client.lookup(c, 0, holder="holder")
        # Block 64 … belong to the node, which has more of that segment.
        assert [(p.start, len(p)) for p in found.pieces] == [(0, 64), (64, 56)]
        assert found.pieces[1].pin.source.worker_id == "node"
        ours = worker.pool.allocate(120)
        assert await worker.store.client.fetch(found, ours, timeout_s=10) == 120


async def test_fewer_blocks_than_are_worth_it_are_not_found():
    async with net() as n:
        c = chain(10)
        node = await n.peer("node", "kvstore")
        worker = await n.peer("worker", setup=config(min_fetch_blocks=4))
        node.holds(c, 0, 3)
        assert not await worker.store.client.lookup(c, 0)
        await settled(node)
        assert not await worker.store.client.lookup(c, 7)  # there are no four to be had: nobody is asked
        assert len(node.heard_of(PrefixRequest)) == 1


async def test_without_nodes_or_holder_nobody_is_asked():
    async with net() as n:
        worker, off = await n.peer("worker"), await n.peer("off", setup=config(use=False))
        await n.peer("node", "kvstore", advertised=OTHER)  # of another model
        c = chain(4)
        for client in (worker.store.client, off.store.client):
            assert not client.may_find("worker-that-left")
            assert not await client.lookup(c, 0, holder="worker-that-left")
        assert not worker.store.client.may_find("worker")  # itself
        assert worker.store.client.may_find("off")
        assert not off.store.client.may_find("worker")
        assert worker.store.counts.num_lookups == 0


# ---------------------------------------------------------------- what others do wrong


class Stopper:
    """Holds a fetch up at its source, when its bytes are about to leave."""

    def __init__(self, peer: Peer) -> None:
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()
        peer.on_message = self._hold

    async def _hold(self, message: Message) -> None:
        if isinstance(message, FetchRequest):
            self.reached.set()
            await self.go_on.wait()


async def test_a_node_that_dies_in_mid_fetch_fails_it_at_once_and_nothing_stays():
    async with net() as n:
        node = await n.peer("node", "kvstore", seed=1)
        worker = await n.peer("worker")
        c = chain(64)
        node.holds(c)
        stopper = Stopper(node)
        found = await worker.store.client.lookup(c, 0)
        ours = worker.pool.allocate(64)
        fetch = asyncio.create_task(worker.store.client.fetch(found, ours, timeout_s=60))
        await asyncio.wait_for(stopper.reached.wait(), 5)
        await node.leave()
        assert await asyncio.wait_for(fetch, 5) == 0
        assert worker.store.counts.num_failed_fetches == {"worker_lost": 1}
        before = worker.bytes_of(ours)
        worker.pool.free(ours)
        assert worker.at_rest
        stopper.go_on.set()  # it was frozen: now it writes, and is refused
        await until(lambda: node.store.counts.num_failed_serves["lease_revoked"] == 1)
        assert worker.bytes_of(ours) == before
        await settled(node)


async def test_a_connection_that_breaks_fails_the_fetch():
    async with net() as n:
        node = await n.peer("node", "kvstore", kinds=["tcp"], seed=1)
        worker = await n.peer("worker", kinds=["tcp"])
        c = chain(64)
        node.holds(c)
        found = await worker.store.client.lookup(c, 0)
        ours = worker.pool.allocate(64)
        node.on_message = lambda m: node.senders["tcp"].stop() if isinstance(m, FetchRequest) else None
        assert await worker.store.client.fetch(found, ours, timeout_s=10) == 0
        worker.pool.free(ours)
        await settled(node, worker)


async def test_blocks_evicted_between_lookup_and_fetch_are_missing_and_nothing_comes():
    async with net() as n:
        node = await n.peer("node", "kvstore", num_blocks=140)
        worker = await n.peer("worker")
        c = chain(64)
        node.holds(c)
        found = await worker.store.client.lookup(c, 0)
        node.pins.close()  # as when they run out
        node.pool.free(node.pool.allocate(139))
        ours = worker.pool.allocate(64)
        assert await worker.store.client.fetch(found, ours, timeout_s=10) == 0
        assert worker.store.counts.num_failed_fetches == {"blocks_missing": 1}
        worker.pool.free(ours)
        await settled(node, worker)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_another_layout_is_refused_at_every_step(kind: str):
    async with net() as n:
        node = await n.peer("node", "kvstore", kinds=[kind], layout=OTHER, advertised=SMALL)
        worker = await n.peer("worker", kinds=[kind])
        c = chain(64)
        node.holds(c)  # the very names that are asked for
        assert not await worker.store.client.lookup(c, 0)  # the question names the layout
        pin = Pin(Source("kvstore", "node"), 0)
        found = Found(0, (Piece(0, pack(c.hashes), bytes(64), pin),), (pin,))  # as if it had been found
        ours = worker.pool.allocate(64)
        assert await worker.store.client.fetch(found, ours, timeout_s=10) == 0
        assert worker.store.counts.num_failed_fetches == {"layout_mismatch": 1}
        assert not worker.memory.blocks.any()
        worker.pool.free(ours)
        await settled(node, worker)


async def test_a_source_that_fails_leaves_what_came_before_its_blocks():
    async with net() as n:
        c = chain(192)
        holder = await n.peer("holder", seed=1)
        node = await n.peer("node", "kvstore", num_blocks=300, seed=2)
        worker = await n.peer("worker", num_blocks=300)
        holder.holds(c, 0, 64)
        node.holds(c, 64, 192)
        found = await worker.store.client.lookup(c, 0, holder="holder")
        assert len(found) == 192
        node.pins.close()
        node.pool.drop_cached()
        ours = worker.pool.allocate(192)
        assert await worker.store.client.fetch(found, ours, timeout_s=10) == 64
        worker.pool.free(ours)
        await settled(holder, node, worker)


async def test_what_would_come_after_a_gap_is_not_waited_for():
    async with net() as n:
        c = chain(128)
        node = await n.peer("node", "kvstore")
        holder = await n.peer("holder")
        worker = await n.peer("worker")
        node.holds(c, 0, 64)
        holder.holds(c, 64, 128)
        found = await worker.store.client.lookup(c, 0, holder="holder")
        assert len(found) == 128
        stopper = Stopper(holder)
        node.pins.close()
        node.pool.drop_cached()
        ours = worker.pool.allocate(128)
        assert await asyncio.wait_for(worker.store.client.fetch(found, ours, timeout_s=60), 5) == 0
        worker.pool.free(ours)
        assert worker.at_rest
        stopper.go_on.set()
        await settled(node, holder)


# ---------------------------------------------------------------- cancelled


async def test_a_lookup_that_one_answer_settles_does_not_wait_for_the_others():
    async with net() as n:
        c = chain(128)
        nodes = [await n.peer(f"node-{i}", "kvstore") for i in range(2)]
        worker = await n.peer("worker", setup=config(lookup_timeout_s=5.0))
        for node in nodes:
            node.holds(c)
        slow = asyncio.Event()
        nodes[0].on_message = lambda m: slow.wait()
        found = await asyncio.wait_for(worker.store.client.lookup(c, 0), 2)
        assert len(found) == 128
        assert worker.store.counts.num_silent == 0
        slow.set()
        worker.store.client.release(found)
        await settled(*nodes)  # the late answer's pin, too


async def test_a_cancelled_lookup_leaves_no_pin_neither_of_answers_that_came_nor_of_those_to_come():
    async with net() as n:
        c = chain(128)
        nodes = [await n.peer(f"node-{i}", "kvstore") for i in range(2)]
        worker = await n.peer("worker", setup=config(lookup_timeout_s=5.0))
        nodes[0].holds(c)
        nodes[1].holds(c, 0, 100)  # so that the other one is waited for
        slow = asyncio.Event()
        nodes[0].on_message = lambda m: slow.wait() if isinstance(m, PrefixRequest) else None
        lookup = asyncio.create_task(worker.store.client.lookup(c, 0))
        await until(lambda: len(nodes[1].pins) == 1 and len(nodes[0].heard) == 1)
        await asyncio.sleep(0)
        lookup.cancel()
        with pytest.raises(asyncio.CancelledError):
            await lookup
        await settled(nodes[1])
        slow.set()
        await until(lambda: len(nodes[0].heard_of(BlocksReleased)) == 1)
        await settled(nodes[0])


async def test_a_cancelled_fetch_leaves_no_reference_no_lease_and_no_pin_and_nobody_writes():
    async with net() as n:
        node = await n.peer("node", "kvstore", seed=1)
        worker = await n.peer("worker")
        c = chain(64)
        node.holds(c)
        stopper = Stopper(node)
        found = await worker.store.client.lookup(c, 0)
        ours = worker.pool.allocate(64)
        fetch = asyncio.create_task(worker.store.client.fetch(found, ours, timeout_s=60))
        await asyncio.wait_for(stopper.reached.wait(), 5)
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        worker.pool.free(ours)
        assert worker.at_rest
        stopper.go_on.set()
        await until(lambda: sum(node.store.counts.num_failed_serves.values()) == 1)
        assert not worker.memory.blocks.any()
        await settled(node)


async def test_a_fetch_that_takes_too_long_is_over_in_time():
    async with net() as n:
        node = await n.peer("node", "kvstore")
        worker = await n.peer("worker")
        c = chain(64)
        node.holds(c)
        stopper = Stopper(node)
        found = await worker.store.client.lookup(c, 0)
        ours = worker.pool.allocate(64)
        began = time.monotonic()
        assert await worker.store.client.fetch(found, ours, timeout_s=0.3) == 0
        assert 0.25 < time.monotonic() - began < 2
        assert worker.store.counts.num_failed_fetches == {"deadline_exceeded": 1}
        worker.pool.free(ours)
        assert worker.at_rest
        stopper.go_on.set()
        await settled(node)


async def test_a_part_of_what_was_found_can_be_fetched_and_more_cannot():
    async with net() as n:
        node = await n.peer("node", "kvstore", seed=1)
        holder = await n.peer("holder", seed=2)
        worker = await n.peer("worker")
        c = chain(128)
        theirs = node.holds(c, 0, 64)
        holder.holds(c, 64, 128)
        found = await worker.store.client.lookup(c, 0, holder="holder")
        ours = worker.pool.allocate(129)
        with pytest.raises(KVError, match="129 blocks to fetch to, 128 were found"):
            await worker.store.client.fetch(found, ours, timeout_s=10)
        assert await worker.store.client.fetch(found, ours[:20], timeout_s=10) == 20
        assert worker.bytes_of(ours[:20]) == node.bytes_of(theirs[:20])
        assert not holder.heard_of(FetchRequest)
        worker.pool.free(ours)
        await settled(node, holder, worker)


async def test_a_transport_that_does_not_reach_us_is_left_out_for_a_while():
    async with net() as n:
        node = await n.peer("node", "kvstore", seed=1)
        worker = await n.peer("worker")
        c = chain(32)
        theirs = node.holds(c)
        await worker.receivers["shm"].stop()  # it is offered, and nobody listens
        for _ in range(2):
            found = await worker.store.client.lookup(c, 0)
            ours = worker.pool.allocate(32)
            assert await worker.store.client.fetch(found, ours, timeout_s=10) == 32
            assert worker.bytes_of(ours) == node.bytes_of(theirs)
            worker.pool.free(ours)
        assert [m.region.endpoint.kind for m in node.heard_of(FetchRequest)] == ["shm", "tcp", "tcp"]  # type: ignore[attr-defined]
        await settled(node, worker)


async def test_many_fetches_at_once_come_right():
    async with net() as n:
        node = await n.peer("node", "kvstore", num_blocks=600, seed=1)
        worker = await n.peer("worker")
        chains = [chain(24, salt=str(i)) for i in range(12)]
        theirs = [node.holds(c) for c in chains]

        async def one(i: int) -> list[int]:
            found = await worker.store.client.lookup(chains[i], 0)
            ours = worker.pool.allocate(24)
            assert await worker.store.client.fetch(found, ours, timeout_s=20) == 24
            return ours

        ours = await asyncio.gather(*(one(i) for i in range(12)))
        for mine, its in zip(ours, theirs, strict=True):
            assert np.array_equal(worker.memory.blocks[mine], node.memory.blocks[its])
            worker.pool.free(mine)
        await settled(node, worker)

"""Offers: a worker's full blocks on their way to the nodes that are to keep them, over real shm and tcp."""

import asyncio
import threading

import msgspec
import numpy as np
import pytest

from distserve.errors import KVError
from distserve.kv.hashing import unpack
from distserve.kv.placement import owners
from distserve.messages import Message, OfferReleased, OfferRequest
from distserve.transport.base import Span
from distserve.worker.store.offers import SPANS_AT_ONCE, Label
from tests.contracts.transport.pools import SMALL
from tests.unit.worker.store.peers import Peer, chain, config, net
from tests.waiting import until

LAYERS = SMALL.num_layers


async def given(worker: Peer) -> None:
    await until(lambda: not worker.store.client.num_offers, what="offers at their end")
    assert worker.store.client.num_held_blocks == 0
    worker.pool.check()


def same_bytes(worker: Peer, ours: list[int], node: Peer, names: list[bytes]) -> bool:
    return worker.bytes_of(ours) == node.bytes_of(node.pool.find(names))


@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_offered_blocks_are_kept_byte_for_byte_and_the_pool_has_them_back(kind: str):
    async with net() as n:
        node = await n.peer("node", "kvstore", kinds=[kind])
        worker = await n.peer("worker", kinds=[kind], seed=1)
        c = chain(100)
        ours = worker.holds(c)
        worker.store.client.offer(c, 0, ours, Label("t", "c", "vip"))
        assert worker.pool.num_used == 100
        await given(worker)
        assert worker.pool.num_used == 0
        assert same_bytes(worker, ours, node, c.hashes)
        asked = node.heard_of(OfferRequest)
        assert [(r.tenant, r.conversation, r.priority) for r in asked] == [("t", "c", "vip")] * 2
        assert sorted((r.runs[0].start, r.runs[0].parent) for r in asked) == [(0, c.root), (64, c.hashes[63])]
        counts = worker.store.counts
        assert (counts.num_offered_blocks, counts.num_offered_bytes) == (100, 100 * 8192 * 2 // 2)
        assert worker.num_freed == 1
        assert node.at_rest


async def test_each_segment_goes_to_its_owner_and_a_lookup_finds_all_of_them():
    async with net() as n:
        nodes = [await n.peer(f"node-{i}", "kvstore", num_blocks=900) for i in range(3)]
        worker = await n.peer("worker", num_blocks=2600, seed=1)
        other = await n.peer("other", num_blocks=700, setup=config(replicas=1))
        c = chain(600)
        ours = worker.holds(c)
        worker.store.client.offer(c, 0, ours)
        await given(worker)
        assert sum(node.pool.num_cached for node in nodes) == 600
        assert all(node.pool.num_cached for node in nodes)
        found = await other.store.client.lookup(c, 0)
        theirs = other.pool.allocate(600)
        assert await other.store.client.fetch(found, theirs, timeout_s=20) == 600
        assert np.array_equal(worker.memory.blocks[ours], other.memory.blocks[theirs])


async def test_only_what_a_node_lacks_is_sent():
    async with net() as n:
        node = await n.peer("node", "kvstore", seed=2)
        worker = await n.peer("worker", seed=1)
        c = chain(64)
        node.holds(c, 10, 20)
        theirs = node.bytes_of(node.pool.find(c.hashes[10:20]))
        ours = worker.holds(c)
        worker.store.client.offer(c, 0, ours)
        await given(worker)
        assert same_bytes(worker, ours[:10] + ours[20:], node, c.hashes[:10] + c.hashes[20:]) is True
        assert node.bytes_of(node.pool.find(c.hashes[10:20])) == theirs
        assert (worker.store.counts.num_offered_blocks, worker.store.counts.num_unwanted_blocks) == (54, 10)
        worker.store.client.offer(c, 0, ours)
        await given(worker)
        assert len(node.keeper.committed) == 1
        assert worker.store.counts.num_unwanted_blocks == 74


async def test_offers_hold_a_bounded_number_of_blocks_and_the_excess_is_dropped_from_the_end():
    async with net() as n:
        node = await n.peer("node", "kvstore")
        worker = await n.peer("worker", setup=config(offer_blocks=30))
        c, d = chain(40), chain(10, salt="d")
        gate = asyncio.Event()
        node.on_message = lambda m: gate.wait()
        worker.store.client.offer(c, 0, worker.holds(c))
        worker.store.client.offer(d, 0, worker.holds(d))
        assert worker.pool.num_used == 30
        assert worker.store.counts.num_dropped_blocks == {"full": 20}
        gate.set()
        await given(worker)
        assert len(node.pool.find(c.hashes)) == 30
        assert worker.pool.num_used == 0


async def test_a_quarter_of_the_pool_is_the_most_that_is_held():
    async with net() as n:
        await n.peer("node", "kvstore")
        worker = await n.peer("worker", num_blocks=41)
        c = chain(20)
        worker.store.client.offer(c, 0, worker.holds(c))
        assert worker.pool.num_used == 10
        await given(worker)


async def test_without_a_node_nothing_is_held_and_nothing_counted():
    async with net() as n:
        worker, off = await n.peer("worker"), await n.peer("off", setup=config(use=False))
        c = chain(4)
        worker.store.client.offer(c, 0, worker.holds(c))
        await n.peer("node", "kvstore")
        off.store.client.offer(c, 0, off.holds(c))
        off.store.client.streaming_offer(c, 0, off.pool.find(c.hashes)).finished()
        assert worker.pool.num_used == off.pool.num_used == 0
        assert not worker.store.counts.num_dropped_blocks


async def test_more_than_the_chain_has_cannot_be_offered():
    async with net() as n:
        await n.peer("node", "kvstore")
        worker = await n.peer("worker")
        with pytest.raises(KVError, match=r"blocks \[3, 5\) are offered of a chain of 4"):
            worker.store.client.offer(chain(4), 3, [1, 2])


async def test_what_a_node_refuses_is_dropped_and_counted():
    async with net() as n:
        other = msgspec.structs.replace(SMALL, rope="other")
        node = await n.peer("node", "kvstore", layout=other, advertised=SMALL)
        worker = await n.peer("worker")
        c = chain(8)
        worker.store.client.offer(c, 0, worker.holds(c))  # the transport refuses
        await given(worker)
        assert worker.store.counts.num_dropped_blocks == {"layout_mismatch": 8}
        await until(lambda: len(node.heard_of(OfferReleased)) == 1 and node.at_rest)
        assert worker.pool.num_used == 0


async def test_a_silent_node_costs_one_question_and_the_next_in_rank_gets_the_rest():
    async with net() as n:
        nodes = [await n.peer(f"node-{i}", "kvstore") for i in range(2)]
        base = config()
        setup = msgspec.structs.replace(base, bus=msgspec.structs.replace(base.bus, request_timeout_s=0.2))
        worker = await n.peer("worker", setup=setup)
        c = chain(8)
        first = owners(c.hashes[0], ["node-0", "node-1"])[0]
        frozen, other = sorted(nodes, key=lambda p: p.worker_id != first)
        frozen.on_message = lambda m: asyncio.Event().wait()
        worker.store.client.offer(c, 0, worker.holds(c))
        await given(worker)
        assert worker.store.counts.num_dropped_blocks == {"bus_timeout": 8}
        worker.store.client.offer(c, 0, worker.pool.find(c.hashes))
        await given(worker)
        assert other.pool.find(c.hashes)
        frozen.on_message = None


async def test_a_transport_that_does_not_reach_the_node_is_left_out():
    async with net() as n:
        node = await n.peer("node", "kvstore")
        worker = await n.peer("worker", seed=1)
        c = chain(8)
        await node.receivers["shm"].stop()
        ours = worker.holds(c)
        worker.store.client.offer(c, 0, ours)
        await given(worker)
        assert same_bytes(worker, ours, node, c.hashes)
        await until(lambda: node.keeper.num_open == 0 and node.at_rest, what="the first grant given back")


async def test_a_node_that_leaves_in_mid_transfer_ends_the_offer():
    async with net() as n:
        node = await n.peer("node", "kvstore", kinds=["tcp"])
        worker = await n.peer("worker", kinds=["tcp"])
        c = chain(8)
        sink = worker.store.client.streaming_offer(c, 0, worker.holds(c))
        await until(lambda: worker.plane.in_use.kinds == ["tcp"], what="the transfer's beginning")
        await node.leave()
        await until(lambda: len(node.keeper.failed) == 1, what="word that nothing more comes")
        sink.finished()
        await given(worker)
        assert worker.store.counts.num_dropped_blocks == {"lease_revoked": 8}
        await until(lambda: node.at_rest)


async def test_stop_gives_up_what_is_under_way_and_reads_no_block_afterwards():
    async with net() as n:
        node = await n.peer("node", "kvstore")
        worker = await n.peer("worker")
        c, d = chain(8), chain(8, salt="d")
        sink = worker.store.client.streaming_offer(c, 0, worker.holds(c))
        # Not only granted: a grant that is still on its way is the node's to end.
        await until(lambda: bool(worker.plane.in_use.kinds), what="the transfer's beginning")
        node.on_message = lambda m: asyncio.Event().wait() if isinstance(m, OfferRequest) else None
        worker.store.client.offer(d, 0, worker.holds(d))
        await worker.store.client.stop()
        assert worker.pool.num_used == 0
        sink.finished()  # too late, and no harm
        worker.store.client.offer(c, 0, worker.pool.find(c.hashes))
        assert worker.pool.num_used == 0
        await until(lambda: node.keeper.num_open == 0)
        node.on_message = None


async def test_drain_waits_for_what_is_under_way():
    async with net() as n:
        node = await n.peer("node", "kvstore")
        worker = await n.peer("worker")
        c = chain(8)
        gate = asyncio.Event()
        node.on_message = lambda m: gate.wait()
        worker.store.client.offer(c, 0, worker.holds(c))
        await worker.store.drain(0.05)
        assert worker.store.client.num_offers == 1
        asyncio.get_running_loop().call_later(0.05, gate.set)
        await worker.store.drain(10)
        assert node.pool.find(c.hashes)


async def test_the_beginning_of_a_chain_outlives_its_offered_end_in_the_pool():
    """Blocks that were on offer come back later than their ancestors: those must not be evicted before them."""
    async with net() as n:
        await n.peer("node", "kvstore")
        worker = await n.peer("worker", num_blocks=41)
        c = chain(10)
        table = worker.pool.allocate(10)
        worker.pool.name(table, c.hashes)
        worker.store.client.offer(c, 6, table[6:])
        worker.pool.free(table)
        await given(worker)
        worker.pool.allocate(30 + 6)
        assert worker.pool.find(c.hashes) == table[:4]


# ---------------------------------------------------------------- while it is computed


def report(sink: object, layers: range, ids: list[int], first: int) -> None:
    for layer in layers:
        span = Span(layer, layer + 1, tuple(ids), tuple(range(first, first + len(ids))))
        sink.layers_ready(span, awaited=False)  # type: ignore[attr-defined]


async def test_layers_leave_while_they_are_computed_and_are_found_only_when_all_are_there():
    async with net() as n:
        node = await n.peer("node", "kvstore")
        worker = await n.peer("worker", seed=1)
        c = chain(70)
        table = worker.pool.allocate(71)  # the last one partial
        sink = worker.store.client.streaming_offer(c, 4, table[4:70])
        computed = threading.Event()

        def engine() -> None:
            """Two chunks, each layer by layer; what is before the offer is reported too, as is the partial block."""
            report(sink, range(LAYERS), table[:40], 0)
            computed.wait(10)
            report(sink, range(LAYERS), table[40:], 40)

        thread = threading.Thread(target=engine)
        thread.start()
        await until(lambda: node.keeper.num_open == 2)
        landed = worker.memory.blocks[table[4:40]]
        await until(lambda: bool((node.memory.blocks[1:200].reshape(199, -1)[:, :64].any(axis=1)).sum() >= len(landed)))
        assert not node.pool.find(c.hashes[4:])
        computed.set()
        await asyncio.to_thread(thread.join)
        assert not node.pool.find(c.hashes[4:])
        sink.finished()
        await given(worker)
        assert same_bytes(worker, table[4:70], node, c.hashes[4:])
        assert len(node.pool.find(c.hashes[4:])) == 66
        worker.pool.free(table)
        assert worker.pool.num_used == 0


async def test_what_was_computed_before_the_grant_is_sent_when_it_comes():
    async with net() as n:
        node = await n.peer("node", "kvstore")
        worker = await n.peer("worker", seed=1)
        c = chain(8)
        gate = asyncio.Event()
        node.on_message = lambda m: gate.wait()
        ours = worker.holds(c)
        sink = worker.store.client.streaming_offer(c, 0, ours)
        report(sink, range(LAYERS), ours, 0)
        sink.finished()
        gate.set()
        await given(worker)
        assert same_bytes(worker, ours, node, c.hashes)


async def test_what_has_waited_for_the_grant_goes_in_parts_and_the_loop_turns_between_them():
    async with net() as n:
        node = await n.peer("node", "kvstore")
        worker = await n.peer("worker", seed=1)
        c = chain(48)
        gate, written, turns = asyncio.Event(), list[tuple[int, int]](), 0
        node.on_message = lambda m: gate.wait()
        opens = worker.senders["shm"].open

        async def open_noting(*args, **more):
            transfer = await opens(*args, **more)
            write = transfer.write

            def note(spans, **how):
                written.append((len(spans), turns))
                write(spans, **how)

            transfer.write = note
            return transfer

        worker.senders["shm"].open = open_noting  # type: ignore[method-assign]
        ours = worker.holds(c)
        sink = worker.store.client.streaming_offer(c, 0, ours)
        for depth in range(48):
            report(sink, range(LAYERS), ours[depth : depth + 1], depth)
        sink.finished()
        gate.set()
        while worker.store.client.num_offers:
            turns += 1
            await asyncio.sleep(0)
        num_spans = 48 * LAYERS
        assert [num for num, _ in written] == [SPANS_AT_ONCE] * (num_spans // SPANS_AT_ONCE)
        assert len({turn for _, turn in written}) == len(written)
        assert same_bytes(worker, ours, node, c.hashes)


@pytest.mark.parametrize("wanted", [[1, 0, 2], [0, 0, 1], [0, 1, 8], [0, 1]])
async def test_a_grant_that_makes_no_sense_is_refused_and_given_back(wanted: list[int]):
    async with net() as n:
        node = await n.peer("node", "kvstore")
        worker = await n.peer("worker")
        c = chain(8)
        node.holds(c, 3, 8)  # it wants the first three
        grants = node.keeper.grant
        node.keeper.grant = lambda request: msgspec.structs.replace(grants(request), wanted=wanted)  # type: ignore[method-assign]
        worker.store.client.offer(c, 0, worker.holds(c))
        await given(worker)
        assert worker.store.counts.num_dropped_blocks == {"malformed_message": 8}
        await until(lambda: node.keeper.num_open == 0 and node.at_rest, what="its grant given back")
        assert not node.pool.find(c.hashes)


async def test_an_abandoned_offer_leaves_nothing_anywhere():
    async with net() as n:
        node = await n.peer("node", "kvstore")
        worker = await n.peer("worker", seed=1)
        c = chain(8)
        ours = worker.holds(c)
        sink = worker.store.client.streaming_offer(c, 0, ours)
        report(sink, range(2), ours, 0)
        await until(lambda: node.keeper.num_open == 1)
        sink.abandoned()
        await given(worker)
        await until(lambda: node.at_rest)
        assert not node.pool.find(c.hashes)
        assert worker.store.counts.num_dropped_blocks == {"cancelled": 8}
        assert worker.pool.num_used == 0


async def test_an_offer_that_lacks_a_layer_is_refused_whole():
    async with net() as n:
        node = await n.peer("node", "kvstore")
        worker = await n.peer("worker", seed=1)
        c = chain(8)
        ours = worker.holds(c)
        sink = worker.store.client.streaming_offer(c, 0, ours)
        report(sink, range(LAYERS - 1), ours, 0)
        sink.finished()
        await given(worker)
        assert not node.pool.find(c.hashes)
        assert worker.store.counts.num_dropped_blocks == {"transport_error": 8}
        await until(lambda: node.at_rest)


async def test_the_hashes_of_a_request_are_those_of_its_segment():
    async with net() as n:
        node = await n.peer("node", "kvstore")
        worker = await n.peer("worker")
        c = chain(130)
        heard: list[Message] = []
        node.on_message = heard.append
        worker.store.client.offer(c, 60, worker.holds(c)[60:])
        await given(worker)
        runs = sorted((r.runs[0] for r in node.heard_of(OfferRequest)), key=lambda run: run.start)
        assert [(run.start, unpack(run.hashes)) for run in runs] == [
            (60, c.hashes[60:64]),
            (64, c.hashes[64:128]),
            (128, c.hashes[128:130]),
        ]

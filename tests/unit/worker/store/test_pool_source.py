"""A worker's pool as others ask it, by the bus."""

import asyncio
from typing import TypeVar

import msgspec
import pytest

from distserve.bus import subjects
from distserve.errors import BlocksMissing, Draining, MalformedMessage, PoolExhausted
from distserve.kv.hashing import pack
from distserve.kv.layout import fingerprint
from distserve.messages import (
    BlocksReleased,
    ChainRun,
    Endpoint,
    FetchReply,
    FetchRequest,
    Message,
    PrefixReply,
    PrefixRequest,
    RemoteRegion,
    TouchRequest,
    decode_as,
    encode,
)
from tests.contracts.transport.pools import SMALL
from tests.unit.worker.store.peers import Peer, chain, net
from tests.waiting import until

M = TypeVar("M", bound=Message)


def runs(c, *parts: range) -> list[ChainRun]:
    return [ChainRun(start=p.start, hashes=pack(c.hashes[p.start : p.stop])) for p in parts]


def question(c, *parts: range, pin_s: float = 0.0) -> PrefixRequest:
    return PrefixRequest(asker="asker", layout=fingerprint(SMALL), runs=runs(c, *parts), pin_s=pin_s)


async def ask(asker: Peer, kind: type[M], message: Message, of: str = "worker") -> M:
    return decode_as(kind, await asker.bus.request(subjects.worker("decode", of), encode(message), timeout_s=5))


async def test_each_run_is_found_from_its_first_block_on():
    async with net() as n:
        worker, asker = await n.peer("worker"), await n.peer("asker")
        c = chain(100)
        worker.holds(c, 0, 20)
        worker.holds(c, 30, 50)
        reply = await ask(asker, PrefixReply, question(c, range(64), range(32, 60), range(60, 64)))
        assert reply.num_found == [20, 18, 0]
        assert [len(t) for t in reply.tiers] == [20, 18, 0]
        assert reply.pin_id == 0
        assert worker.at_rest


async def test_an_existence_check_renews_nothing_and_a_pin_does():
    async with net() as n:
        worker, asker = await n.peer("worker", num_blocks=21), await n.peer("asker")
        c, d = chain(4), chain(4, salt="d")
        worker.holds(c)
        worker.holds(d)
        await ask(asker, PrefixReply, question(c, range(4)))
        worker.pool.free(worker.pool.allocate(16))
        assert len(worker.pool.find(d.hashes)) == 4  # c went first
        worker.pool.drop_cached()
        worker.holds(c)
        worker.holds(d)
        reply = await ask(asker, PrefixReply, question(c, range(4), pin_s=30))
        await asker.bus.publish(
            subjects.worker("decode", "worker"), encode(BlocksReleased(asker="asker", pin_id=reply.pin_id))
        )
        await until(lambda: worker.at_rest)
        worker.pool.free(worker.pool.allocate(16))
        assert len(worker.pool.find(c.hashes)) == 4


async def test_a_pinned_block_is_not_evicted_and_a_pin_ends_by_itself():
    async with net() as n:
        worker, asker = await n.peer("worker", num_blocks=71), await n.peer("asker")
        c = chain(30)
        worker.holds(c)
        reply = await ask(asker, PrefixReply, question(c, range(30), pin_s=0.3))
        assert reply.num_found == [30]
        taken = worker.pool.allocate(40)
        with pytest.raises(PoolExhausted):
            worker.pool.allocate(1)
        freed = worker.num_freed
        await until(lambda: worker.num_freed > freed, what="the pin's end, and word of it")
        worker.pool.free([*taken, *worker.pool.allocate(30)])
        assert worker.at_rest


async def test_pins_leave_half_of_the_pool_to_the_worker():
    async with net() as n:
        worker, asker = await n.peer("worker", num_blocks=41), await n.peer("asker")
        c, d = chain(15), chain(15, salt="d")
        worker.holds(c)
        worker.holds(d)
        assert (await ask(asker, PrefixReply, question(c, range(15), pin_s=30))).num_found == [15]
        assert (await ask(asker, PrefixReply, question(c, range(15), pin_s=30))).num_found == [15]  # the same blocks
        assert (await ask(asker, PrefixReply, question(d, range(8), range(8, 15), pin_s=30))).num_found == [5, 0]
        assert (await ask(asker, PrefixReply, question(d, range(15)))).num_found == [15]
        assert worker.store.source.pins.num_blocks == 20


async def test_pins_of_an_asker_that_is_gone_end():
    async with net() as n:
        worker, asker, other = [await n.peer(name) for name in ("worker", "asker", "other")]
        c = chain(8)
        worker.holds(c)
        await ask(asker, PrefixReply, question(c, range(8), pin_s=30))
        await other.leave()
        await asker.leave()
        await until(lambda: worker.at_rest)


async def test_only_who_holds_a_pin_can_release_it():
    async with net() as n:
        worker, asker = await n.peer("worker"), await n.peer("asker")
        c = chain(8)
        worker.holds(c)
        reply = await ask(asker, PrefixReply, question(c, range(8), pin_s=30))
        worker.store.source.release(BlocksReleased(asker="thief", pin_id=reply.pin_id))
        worker.store.source.release(BlocksReleased(asker="asker", pin_id=reply.pin_id + 1))
        assert len(worker.store.source.pins) == 1
        worker.store.source.release(BlocksReleased(asker="asker", pin_id=reply.pin_id))
        worker.store.source.release(BlocksReleased(asker="asker", pin_id=reply.pin_id))
        assert worker.at_rest


def fetch_of(c, blocks: range, *, pin_id: int = 0, num_targets: int | None = None) -> FetchRequest:
    region = RemoteRegion(
        lease_id=1,
        epoch=1,
        endpoint=Endpoint(kind="shm", host="nowhere", address="@nobody"),
        block_ids=list(range(1, 1 + (len(blocks) if num_targets is None else num_targets))),
        layout=SMALL,
    )
    return FetchRequest(asker="asker", region=region, runs=runs(c, blocks), pin_id=pin_id, timeout_s=5)


async def test_a_fetch_gives_its_pin_back_whatever_becomes_of_it():
    async with net() as n:
        worker, asker = await n.peer("worker"), await n.peer("asker")
        c = chain(8)
        worker.holds(c, 0, 6)
        for request, error in (
            (fetch_of(c, range(8)), BlocksMissing),
            (fetch_of(c, range(6), num_targets=5), MalformedMessage),
            (fetch_of(c, range(0)), MalformedMessage),
        ):
            reply = await ask(asker, PrefixReply, question(c, range(8), pin_s=30))
            with pytest.raises(error) as caught:
                await ask(asker, FetchReply, _with_pin(request, reply.pin_id))
            if error is BlocksMissing:
                assert caught.value.fields == {"num_present": 6, "tier": "pool"}
            assert worker.at_rest
        assert worker.store.counts.num_failed_serves == {"blocks_missing": 1}


def _with_pin(request: FetchRequest, pin_id: int) -> FetchRequest:
    return msgspec.structs.replace(request, pin_id=pin_id)


async def test_a_worker_that_drains_finds_nothing_and_writes_nothing():
    async with net() as n:
        worker, asker = await n.peer("worker"), await n.peer("asker")
        c = chain(8)
        worker.holds(c)
        await worker.store.drain(0.1)
        assert (await ask(asker, PrefixReply, question(c, range(8), pin_s=30))).num_found == [0]
        with pytest.raises(Draining):
            await ask(asker, FetchReply, fetch_of(c, range(8)))
        assert worker.at_rest


async def test_stop_ends_fetches_under_way_and_pins():
    async with net() as n:
        worker, asker = await n.peer("worker", kinds=["tcp"]), await n.peer("asker", kinds=["tcp"])
        c = chain(8)
        worker.holds(c)
        await ask(asker, PrefixReply, question(c, range(8), pin_s=30))
        # A receiver that takes the connection and never says a word.
        callers: list[asyncio.StreamWriter] = []
        server = await asyncio.start_server(lambda r, w: callers.append(w), "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        region = RemoteRegion(
            lease_id=1,
            epoch=1,
            endpoint=Endpoint(kind="tcp", host=host, address=f"{host}:{port}"),
            block_ids=list(range(1, 9)),
            layout=SMALL,
        )
        request = FetchRequest(asker="asker", region=region, runs=runs(c, range(8)), timeout_s=60)
        asking = asyncio.create_task(ask(asker, FetchReply, request))
        await until(lambda: len(worker.store.source) == 1)
        assert worker.pool.num_used == 8
        async with asyncio.timeout(2):
            await worker.store.source.stop()
        assert worker.at_rest
        with pytest.raises(Draining):
            await asking
        server.close()
        for caller in callers:
            caller.close()


async def test_other_messages_have_no_answer_here():
    async with net() as n:
        await n.peer("worker")
        asker = await n.peer("asker")
        with pytest.raises(MalformedMessage, match="TouchRequest"):
            await ask(asker, PrefixReply, TouchRequest(asker="asker", runs=[]))

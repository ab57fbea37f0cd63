"""A worker's pool as others ask it, by the bus."""

import asyncio
from typing import TypeVar

import pytest

from distserve.bus import subjects
from distserve.errors import BlocksMissing, Draining, MalformedMessage
from distserve.kv.hashing import pack
from distserve.kv.layout import fingerprint
from distserve.messages import (
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


async def test_an_existence_check_renews_nothing_and_a_lookup_that_pins_does():
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
        await ask(asker, PrefixReply, question(c, range(4), pin_s=30))
        worker.pool.free(worker.pool.allocate(16))
        assert len(worker.pool.find(c.hashes)) == 4


async def test_what_a_lookup_pins_is_the_last_to_go_and_keeps_no_room_from_the_worker():
    async with net() as n:
        worker, asker = await n.peer("worker", num_blocks=71), await n.peer("asker")
        c, d = chain(30), chain(20, salt="d")
        worker.holds(c)
        worker.holds(d)
        reply = await ask(asker, PrefixReply, question(c, range(20), range(20, 30), pin_s=30))
        assert (reply.num_found, reply.pin_id) == ([20, 10], 0)
        assert worker.at_rest
        taken = worker.pool.allocate(20 + 20 + 5)  # what is free, and 25 of the 50
        assert (len(worker.pool.find(d.hashes)), len(worker.pool.find(c.hashes))) == (0, 25), "from the end"
        taken += worker.pool.allocate(25)
        with pytest.raises(BlocksMissing):
            await ask(asker, FetchReply, fetch_of(c, range(30)))
        worker.pool.free(taken)
        assert worker.at_rest


def fetch_of(c, blocks: range, *, num_targets: int | None = None) -> FetchRequest:
    region = RemoteRegion(
        lease_id=1,
        epoch=1,
        endpoint=Endpoint(kind="shm", host="nowhere", address="@nobody"),
        block_ids=list(range(1, 1 + (len(blocks) if num_targets is None else num_targets))),
        layout=SMALL,
    )
    return FetchRequest(asker="asker", region=region, runs=runs(c, blocks), timeout_s=5)


async def test_a_fetch_that_cannot_be_served_says_why_and_keeps_nothing():
    async with net() as n:
        worker, asker = await n.peer("worker"), await n.peer("asker")
        c = chain(8)
        worker.holds(c, 0, 6)
        for request, error in (
            (fetch_of(c, range(8)), BlocksMissing),
            (fetch_of(c, range(6), num_targets=5), MalformedMessage),
            (fetch_of(c, range(0)), MalformedMessage),
        ):
            with pytest.raises(error) as caught:
                await ask(asker, FetchReply, request)
            if error is BlocksMissing:
                assert caught.value.fields == {"num_present": 6, "tier": "pool"}
            assert worker.at_rest
        assert worker.store.counts.num_failed_serves == {"blocks_missing": 1}


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


async def test_stop_ends_fetches_under_way():
    async with net() as n:
        worker, asker = await n.peer("worker", kinds=["tcp"]), await n.peer("asker", kinds=["tcp"])
        c = chain(8)
        worker.holds(c)
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

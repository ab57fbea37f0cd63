"""A store node with memory alone, a real server and a bare client."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from distserve.bus import subjects
from distserve.bus.embedded import EmbeddedNats
from distserve.bus.nats import NatsBus
from distserve.errors import (
    BlocksMissing,
    DistServeError,
    Draining,
    LayoutMismatch,
    MalformedMessage,
    Overloaded,
    Unavailable,
)
from distserve.kv.layout import fingerprint
from distserve.lifecycle import Shutdown
from distserve.messages import (
    ClockReply,
    ClockRequest,
    DeleteRequest,
    OfferedState,
    PinRequest,
    PrefixReply,
    PrefixRequest,
    StatusRequest,
    StoreDone,
    StoreList,
    StoreListRequest,
    TouchRequest,
    UnpinRequest,
    decode_as,
    encode,
)
from distserve_kvstore.main import serve
from tests.contracts.transport.pools import SMALL
from tests.integration.kvstore.bare_client import bare_client, chain_of, run_of
from tests.integration.kvstore.nodes import config_of, running
from tests.waiting import until


@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_what_was_offered_is_found_and_fetched_byte_for_byte(
    nats_server: EmbeddedNats, tmp_path: Path, kind: str
) -> None:
    config = config_of(nats_server.url, tmp_path, disk_bytes=0)
    async with bare_client(nats_server.url, kind=kind) as client, running(config) as node:
        runs = [run_of(chain_of(40))]
        assert await client.offer(node.node_id, runs, range(40)) == 40
        found = await client.lookup(node.node_id, runs)
        assert found.num_found == [40]
        assert found.pin_id
        assert found.tiers == [b"\x01" * 40]
        targets = range(client.half, client.half + 40)
        reply = await client.fetch(node.node_id, runs, targets, pin_id=found.pin_id)
        assert reply.tiers == {"dram": 40}
        assert client.bytes_of(targets) == client.bytes_of(range(40))
        assert len(node.holdings.pins) == 0


async def test_a_known_block_is_not_written_twice_nor_while_another_writes_it(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    config = config_of(nats_server.url, tmp_path, disk_bytes=0)
    async with bare_client(nats_server.url) as client, running(config) as node:
        chain = chain_of(10)
        assert await client.offer(node.node_id, [run_of(chain, 0, 4)], range(4)) == 4
        first = await client.grant(node.node_id, [run_of(chain, 0, 6)])
        assert first.wanted == [4, 5]
        second = await client.grant(node.node_id, [run_of(chain)])
        assert second.wanted == [6, 7, 8, 9]
        for grant, sources in ((second, range(6, 10)), (first, range(4, 6))):
            transfer = await client.open(node.node_id, grant)
            client.write(transfer, sources)
            await transfer.commit(encode(OfferedState(worker=client.worker_id)), timeout_s=5)
            node.check()
        assert (await client.lookup(node.node_id, [run_of(chain)], pin_s=0)).num_found == [10]
        assert await client.offer(node.node_id, [run_of(chain)], range(10)) == 0


async def test_only_an_unbroken_beginning_is_found(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    config = config_of(nats_server.url, tmp_path, disk_bytes=0)
    async with bare_client(nats_server.url) as client, running(config) as node:
        chain = chain_of(10)
        await client.offer(node.node_id, [run_of(chain, 0, 3), run_of(chain, 5, 8)], range(6))
        whole, later, other = [run_of(chain)], [run_of(chain, 5)], [run_of(chain_of(4, seed=9))]
        assert (await client.lookup(node.node_id, [*whole, *later, *other])).num_found == [3, 3, 0]
        with pytest.raises(BlocksMissing) as missing:
            await client.fetch(node.node_id, whole, range(client.half, client.half + 10))
        assert missing.value.num_present == 3
        assert not any(client.bytes_of(range(client.half, client.half + 10)))


async def test_another_layout_finds_nothing_and_may_store_nothing(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    config = config_of(nats_server.url, tmp_path, disk_bytes=0)
    other = msgspec.structs.replace(SMALL, rope='{"theta": 5}')
    async with bare_client(nats_server.url) as client, running(config) as node:
        chain = chain_of(4)
        await client.offer(node.node_id, [run_of(chain)], range(4))
        ask = PrefixRequest(asker="x", layout=fingerprint(other), runs=[run_of(chain)], pin_s=5)
        assert decode_as(PrefixReply, await client.ask(node.node_id, ask)).num_found == [0]
        with pytest.raises(LayoutMismatch, match="rope"):
            await client.grant(node.node_id, [run_of(chain_of(4, layout=other))], layout=other)


async def test_an_existence_check_renews_nothing(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    config = config_of(nats_server.url, tmp_path, dram_blocks=9, disk_bytes=0, eviction="lru", high_watermark=1)
    async with bare_client(nats_server.url) as client, running(config) as node:
        old, newer, third, fourth = (run_of(chain_of(4, seed)) for seed in range(4))
        await client.offer(node.node_id, [old], range(4))
        await client.offer(node.node_id, [newer], range(4, 8))
        for _ in range(20):
            assert (await client.lookup(node.node_id, [old], pin_s=0)).num_found == [4]
        assert (await client.stats(node.node_id)).num_hit_blocks == 0
        await client.offer(node.node_id, [third], range(4))
        found = await client.lookup(node.node_id, [old, newer, third], pin_s=0)
        assert found.num_found[0] < 4
        assert found.num_found[1:] == [4, 4]
        used = await client.lookup(node.node_id, [newer])  # counts as a use
        await client.release(node.node_id, used.pin_id)
        await until(lambda: not len(node.holdings.pins))
        await client.offer(node.node_id, [fourth], range(4))
        found = await client.lookup(node.node_id, [newer, third], pin_s=0)
        assert found.num_found[0] == 4
        assert found.num_found[1] < 4


async def test_what_is_pinned_stays_until_its_pin_ends(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    config = config_of(nats_server.url, tmp_path, dram_blocks=4, disk_bytes=0, high_watermark=1)
    async with bare_client(nats_server.url) as client, running(config) as node:
        runs, other = [run_of(chain_of(4))], [run_of(chain_of(4, seed=1))]

        async def refused() -> bool:
            try:
                return await client.offer(node.node_id, other, range(4, 8)) < 4
            except Overloaded:
                return True

        await client.offer(node.node_id, runs, range(4))
        released = await client.lookup(node.node_id, runs)
        short = await client.lookup(node.node_id, runs, pin_s=0.3)
        assert released.pin_id != short.pin_id
        assert await refused()
        await client.release(node.node_id, released.pin_id)
        assert await refused()  # the other one still holds them
        await until(lambda: len(node.holdings.pins) == 0, what="the end of the pin")
        assert not await refused()


async def test_an_asker_that_is_gone_holds_nothing(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    config = config_of(nats_server.url, tmp_path, disk_bytes=0, lease_ttl_s=60)
    async with bare_client(nats_server.url) as client, running(config) as node:
        runs = [run_of(chain_of(8))]
        await client.offer(node.node_id, runs, range(8))
        async with bare_client(nats_server.url, worker_id="decode-dies") as dying:
            await dying.lookup(node.node_id, runs, pin_s=60)
            await dying.grant(node.node_id, [run_of(chain_of(8, seed=1))])
            assert (len(node.holdings.pins), len(node.grants)) == (1, 1)
        await until(lambda: (len(node.holdings.pins), len(node.grants)) == (0, 0), what="the end of what it held")
        await until(lambda: node.holdings.arena.num_used == 8, what="the return of its lease's blocks")


async def test_blocks_of_offers_that_broke_are_kept_for_the_retry_and_bounded(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    config = config_of(nats_server.url, tmp_path, disk_bytes=0, max_stale_slots=6, lease_ttl_s=1.5)
    async with bare_client(nats_server.url) as client, running(config) as node:
        chains = [chain_of(4, seed) for seed in range(5)]
        rows = []
        for chain in chains:
            grant = await client.grant(node.node_id, [run_of(chain)])
            transfer = await client.open(node.node_id, grant)
            client.write(transfer, range(4))
            await transfer.abort("the writer thought better of it")
            await until(lambda: not len(node.grants), what="the end of the lease")
            assert node.grants.num_stale <= 6
            assert grant.region is not None
            rows.append(grant.region.block_ids)
        node.check()
        assert node.holdings.arena.num_used == 6
        assert (await client.lookup(node.node_id, [run_of(c) for c in chains])).num_found == [0] * 5
        again = await client.grant(node.node_id, [run_of(chains[-1])])
        assert again.region is not None
        assert again.region.block_ids == rows[-1]
        await until(lambda: node.holdings.arena.num_used == 0, what="the collection of all that was left")


async def test_an_offer_without_room_is_refused_at_once(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    config = config_of(nats_server.url, tmp_path, dram_blocks=8, disk_bytes=0, max_leases=2, max_stale_slots=0)
    async with bare_client(nats_server.url) as client, running(config) as node:
        grant = await client.grant(node.node_id, [run_of(chain_of(20))])
        assert grant.wanted == list(range(8))  # as much as there is room for, from the beginning
        with pytest.raises(Overloaded, match="no room"):
            await client.grant(node.node_id, [run_of(chain_of(4, seed=1))])
        assert grant.region is not None
        await client.give_up(node.node_id, grant)
        await until(lambda: node.holdings.arena.num_free == 8)
        for seed in (2, 3):
            await client.grant(node.node_id, [run_of(chain_of(2, seed))])
        with pytest.raises(Overloaded, match="offers are under way"):
            await client.grant(node.node_id, [run_of(chain_of(2, seed=4))])


async def test_a_pinned_conversation_outlives_pressure_within_its_quota(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    config = config_of(nats_server.url, tmp_path, dram_blocks=40, disk_bytes=0, vip_quota=0.25)
    async with bare_client(nats_server.url) as client, running(config) as node:
        vip = [run_of(chain_of(6))]
        await client.offer(node.node_id, vip, range(6), conversation="board")
        done = decode_as(StoreDone, await client.ask(node.node_id, PinRequest(tenant="", conversation="board")))
        assert done.num_blocks == 6
        for seed in range(1, 12):
            await client.offer(node.node_id, [run_of(chain_of(10, seed))], range(10))
        assert (await client.lookup(node.node_id, vip, pin_s=0)).num_found == [6]
        await client.offer(node.node_id, [run_of(chain_of(10, 20))], range(10), conversation="long")
        with pytest.raises(Overloaded, match="quota"):
            decode_as(StoreDone, await client.ask(node.node_id, PinRequest(tenant="", conversation="long")))
        listed = decode_as(StoreList, await client.ask(node.node_id, StoreListRequest()))
        assert {c.conversation: c.pinned_s > 0 for c in listed.conversations}["board"]
        await client.ask(node.node_id, UnpinRequest(tenant="", conversation="board"))
        for seed in range(30, 60):
            await client.offer(node.node_id, [run_of(chain_of(10, seed))], range(10))
        assert (await client.lookup(node.node_id, vip, pin_s=0)).num_found != [6]


async def test_a_deleted_tenants_blocks_are_found_no_more_even_while_they_are_sent(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    config = config_of(nats_server.url, tmp_path, disk_bytes=0)
    async with bare_client(nats_server.url) as client, running(config) as node:
        mine, theirs = [run_of(chain_of(8, 0))], [run_of(chain_of(8, 1))]
        await client.offer(node.node_id, mine, range(8), tenant="a", conversation="c1")
        await client.offer(node.node_id, theirs, range(8, 16), tenant="b")
        found = await client.lookup(node.node_id, mine, pin_s=30)
        done = decode_as(StoreDone, await client.ask(node.node_id, DeleteRequest(tenant="a")))
        assert done.num_blocks == 8
        assert (await client.lookup(node.node_id, [*mine, *theirs], pin_s=0)).num_found == [0, 8]
        node.check()
        with pytest.raises(BlocksMissing):
            await client.fetch(node.node_id, mine, range(client.half, client.half + 8), pin_id=found.pin_id)
        await until(lambda: node.holdings.arena.num_used == 8, what="the end of the deleted blocks")
        assert len(node.holdings.index) == 8
        # Offered again they are as new.
        await client.offer(node.node_id, mine, range(8), tenant="a")
        assert (await client.lookup(node.node_id, mine, pin_s=0)).num_found == [8]


async def test_until_it_knows_a_layout_a_node_finds_nothing_and_takes_nothing(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    config = config_of(nats_server.url, tmp_path, disk_bytes=0)
    shutdown = Shutdown(1.0)
    node = asyncio.create_task(serve(config, "kvstore-w", shutdown))
    async with await NatsBus.connect(nats_server.url, name="asker", registry_ttl_s=1.0) as bus:
        async with bus.registry().watch() as watch:
            await watch.wait_for(lambda s: "kvstore-w" in s, 10)
            assert (watch.snapshot["kvstore-w"].status, watch.snapshot["kvstore-w"].layout) == ("warming", None)
            ask = PrefixRequest(asker="x", layout="?", runs=[run_of(chain_of(2))] * 2, pin_s=5)
            subject = subjects.worker("kvstore", "kvstore-w")
            reply = decode_as(PrefixReply, await bus.request(subject, encode(ask), timeout_s=5))
            assert reply.num_found == [0, 0]
            with pytest.raises(Unavailable, match="no model's layout"):
                decode_as(StoreDone, await bus.request(subject, encode(DeleteRequest(tenant="")), timeout_s=5))
            shutdown.request()
            await node
            await watch.wait_for(lambda s: "kvstore-w" not in s, 5)


async def test_a_node_that_leaves_takes_nothing_new_and_ends_what_is_under_way(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    config = config_of(nats_server.url, tmp_path, disk_bytes=0)
    async with bare_client(nats_server.url) as client:
        async with running(config) as node:
            grant = await client.grant(node.node_id, [run_of(chain_of(4))])
            draining = asyncio.create_task(node.drain(4.0))
            await until(lambda: node.draining)
            with pytest.raises(Draining):
                await client.grant(node.node_id, [run_of(chain_of(4, 1))])
            transfer = await client.open(node.node_id, grant)
            client.write(transfer, range(4))
            assert await transfer.commit(encode(OfferedState(worker=client.worker_id)), timeout_s=5)
            await draining
            assert (await client.lookup(node.node_id, [run_of(chain_of(4))])).num_found == [0]


async def test_a_touch_counts_as_a_use(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    config = config_of(nats_server.url, tmp_path, dram_blocks=8, disk_bytes=0, eviction="lru", high_watermark=1)
    async with bare_client(nats_server.url) as client, running(config) as node:
        old, newer = run_of(chain_of(4)), run_of(chain_of(4, 1))
        await client.offer(node.node_id, [old], range(4))
        await client.offer(node.node_id, [newer], range(4, 8))
        touch = TouchRequest(asker="x", runs=[old, run_of(chain_of(4, 9))])
        assert decode_as(StoreDone, await client.ask(node.node_id, touch)).num_blocks == 4
        await client.offer(node.node_id, [run_of(chain_of(4, 2))], range(4))
        assert (await client.lookup(node.node_id, [old, newer], pin_s=0)).num_found == [4, 0]


async def test_a_conversations_pin_ends_with_its_time(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    config = config_of(nats_server.url, tmp_path, disk_bytes=0)
    async with bare_client(nats_server.url) as client, running(config) as node:
        await client.offer(node.node_id, [run_of(chain_of(6))], range(6), conversation="c", priority="vip")
        assert node.holdings.index.conversations.num_vip_blocks == 6  # offered as such: pinned for an hour
        await client.ask(node.node_id, PinRequest(tenant="", conversation="c", ttl_s=0.3))
        await until(lambda: node.holdings.index.conversations.num_vip_blocks == 0, what="the end of the pin")


async def test_a_chain_that_contradicts_itself_is_refused_at_its_commit_and_leaves_nothing(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    config = config_of(nats_server.url, tmp_path, disk_bytes=0)
    async with bare_client(nats_server.url) as client, running(config) as node:
        chain = chain_of(6)
        await client.offer(node.node_id, [run_of(chain, 0, 3)], range(3))
        wrong = msgspec.structs.replace(run_of(chain, 3), start=40)
        grant = await client.grant(node.node_id, [wrong])
        transfer = await client.open(node.node_id, grant)
        client.write(transfer, range(3, 6))
        with pytest.raises(DistServeError, match="contradicts"):
            await transfer.commit(encode(OfferedState(worker=client.worker_id)), timeout_s=5)
        await until(lambda: node.holdings.arena.num_used == 3)
        node.check()
        assert (await client.lookup(node.node_id, [run_of(chain)], pin_s=0)).num_found == [3]


async def test_what_is_no_question_to_a_store_node_is_refused_by_name(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    config = config_of(nats_server.url, tmp_path, disk_bytes=0)
    async with bare_client(nats_server.url) as client, running(config) as node:
        with pytest.raises(MalformedMessage, match="StatusRequest"):
            decode_as(StoreDone, await client.ask(node.node_id, StatusRequest(gateway="g", sequences=[])))
        clock = decode_as(ClockReply, await client.ask(node.node_id, ClockRequest()))
        assert clock.sent_unix_ns >= clock.received_unix_ns

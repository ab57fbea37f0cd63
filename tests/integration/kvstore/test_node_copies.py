"""Several nodes: hot and pinned segments on further ones, and a model that comes back with another layout."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec

from distserve.bus.embedded import EmbeddedNats
from distserve.kv.layout import fingerprint
from distserve.kv.placement import owners
from distserve.messages import PinRequest, StoreDone, decode_as
from tests.contracts.transport.pools import SMALL
from tests.integration.kvstore.bare_client import bare_client, chain_of, run_of
from tests.integration.kvstore.nodes import config_of, process, ready, running
from tests.waiting import until

NODES = ["kvstore-x", "kvstore-y", "kvstore-z"]


async def test_a_hot_segment_is_copied_to_the_next_in_rank_and_a_cold_one_is_not(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    configs = [config_of(nats_server.url, tmp_path / name, hot_lookups_per_s=2, replicas=2) for name in NODES]
    hot, cold = chain_of(20), chain_of(20, seed=1)
    async with (
        bare_client(nats_server.url) as client,
        running(configs[0], NODES[0]) as x,
        running(configs[1], NODES[1]) as y,
        running(configs[2], NODES[2]) as z,
    ):
        nodes = dict(zip(NODES, (x, y, z), strict=True))
        first, second, third = owners(hot.hashes[0], NODES, 3)
        await client.offer(first, [run_of(hot), run_of(cold)], range(40))
        for _ in range(40):
            found = await client.lookup(first, [run_of(hot)])
            await client.release(first, found.pin_id)
        await until(lambda: nodes[second].holdings.num_blocks["dram"] == 20, what="the copy")
        found = await client.lookup(second, [run_of(hot), run_of(cold)])
        assert found.num_found == [20, 0]
        targets = range(client.half, client.half + 20)
        await client.fetch(second, [run_of(hot)], targets, pin_id=found.pin_id)
        assert client.bytes_of(targets) == client.bytes_of(range(20))
        assert nodes[third].holdings.num_blocks["dram"] == 0
        assert nodes[first].replication.num_copied == 20
        await until(lambda: not any(n.holdings.pins.num_held for n in nodes.values()))


async def test_a_pinned_conversation_is_on_two_nodes_and_outlives_one(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    configs = [config_of(nats_server.url, tmp_path / name) for name in NODES[:2]]
    chain = chain_of(100)  # a segment and a part of one
    async with (
        bare_client(nats_server.url) as client,
        running(configs[0], NODES[0]) as x,
        running(configs[1], NODES[1]) as y,
    ):
        await client.offer(x.node_id, [run_of(chain, 0, 100)], range(100), conversation="vip")
        done = decode_as(StoreDone, await client.ask(x.node_id, PinRequest(tenant="", conversation="vip")))
        assert done.num_blocks == 100
        await until(lambda: y.holdings.num_blocks["dram"] == 100, what="the copy of both segments")
        assert (await client.lookup(y.node_id, [run_of(chain)], pin_s=0)).num_found == [100]


async def test_a_model_that_comes_back_with_another_layout_is_served_with_that(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    config = config_of(nats_server.url, tmp_path)
    other = msgspec.structs.replace(SMALL, block_size=32)
    with process(config, "kvstore-a", tmp_path / "a.log"):
        async with bare_client(nats_server.url) as client, client.bus.registry().watch() as watch:
            await ready(watch, "kvstore-a")
            await client.offer("kvstore-a", [run_of(chain_of(4))], range(4))
            assert (await client.stats("kvstore-a")).layout == fingerprint(SMALL)
        async with bare_client(nats_server.url, worker_id="decode-new", layout=other) as client:
            deadline = time.monotonic() + 20
            async with client.bus.registry().watch() as watch:
                await watch.wait_for(lambda s: s["kvstore-a"].layout == other, 20)
            await asyncio.sleep(0)
            runs = [run_of(chain_of(4, layout=other))]
            grant = await client.grant("kvstore-a", runs, layout=other)
            assert grant.wanted == [0, 1, 2, 3]
            assert time.monotonic() < deadline

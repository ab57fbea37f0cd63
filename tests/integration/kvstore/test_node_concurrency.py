"""Hundreds of offers and fetches at once, many of which break: nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import pytest

from distserve.bus.embedded import EmbeddedNats
from distserve.errors import DistServeError
from distserve.messages import DeleteRequest, OfferedState, StoreDone, decode_as, encode
from tests.integration.kvstore.bare_client import BareClient, bare_client, chain_of, run_of
from tests.integration.kvstore.nodes import config_of, running
from tests.waiting import until

NUM_CHAINS = 24
BLOCKS = 6  # of a chain
KINDS = ("offer", "offer", "abort", "silent", "never", "fetch", "fetch", "fetch", "hasty", "pin", "delete")


async def one(client: BareClient, node: str, number: int, dice: random.Random) -> str:
    """One of the things that a worker may do, or fail to do. What became of it."""
    which = dice.randrange(NUM_CHAINS)
    runs = [run_of(chain_of(BLOCKS, which))]
    source = which * BLOCKS + 1
    sources = range(source, source + BLOCKS)
    kind = dice.choice(KINDS)
    await asyncio.sleep(dice.random() * 0.5)
    if kind == "offer":
        await client.offer(node, runs, sources, tenant=f"t{which % 3}", conversation=f"c{which}")
    elif kind in ("abort", "silent", "never"):
        grant = await client.grant(node, runs, tenant=f"t{which % 3}", conversation=f"c{which}")
        if grant.region is None or kind == "never":  # found by its silence
            return kind
        transfer = await client.open(node, grant)
        client.write(transfer, [sources[i] for i in grant.wanted])
        if kind == "silent":
            with contextlib.suppress(DistServeError):
                await transfer.commit(encode(OfferedState(worker=client.worker_id)), timeout_s=0.0)
        await transfer.abort("broken on purpose")
    elif kind == "pin":
        await client.lookup(node, runs, pin_s=0.2)
    elif kind == "delete" and not number % 5:
        decode_as(StoreDone, await client.ask(node, DeleteRequest(tenant=f"t{which % 3}")))
    elif kind == "delete":
        deletion = DeleteRequest(tenant=f"t{which % 3}", conversation=f"c{which}")
        decode_as(StoreDone, await client.ask(node, deletion))
    elif kind in ("fetch", "hasty"):
        found = await client.lookup(node, runs)
        num = found.num_found[0]
        if num:
            first = client.half + BLOCKS * number
            part = [run_of(chain_of(BLOCKS, which), 0, num)]
            timeout_s = 0.001 if kind == "hasty" else 10.0
            targets = range(first, first + num)
            await client.fetch(node, part, targets, pin_id=found.pin_id, timeout_s=timeout_s)
            assert client.bytes_of(targets) == client.bytes_of(sources[:num])
            return "fetched"
    return kind


@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_two_hundred_at_once_with_faults_leave_no_block_and_no_lease_behind(
    nats_server: EmbeddedNats, tmp_path: Path, kind: str
) -> None:
    config = config_of(nats_server.url, tmp_path, dram_blocks=80, lease_ttl_s=0.5, max_leases=300)
    half = NUM_CHAINS * BLOCKS + 1 + 200 * BLOCKS
    async with (
        bare_client(nats_server.url, kind=kind, num_blocks=2 * half) as client,
        running(config) as node,
    ):
        dice = random.Random(5)
        num_fetched = 0
        async with asyncio.timeout(60):
            # On a slow machine the first two hundred find little: their lookups come before the offers are committed,
            # and broken offers hold most of the memory until their leases end. Later ones find what is there by then.
            while num_fetched <= 10:
                tasks = [one(client, node.node_id, i, random.Random(dice.random())) for i in range(200)]
                outcomes = await asyncio.gather(*tasks, return_exceptions=True)
                bad = [o for o in outcomes if isinstance(o, BaseException) and not isinstance(o, DistServeError)]
                assert not bad
                num_fetched += sum(o == "fetched" for o in outcomes)
        await until(
            lambda: (
                not (
                    len(node.grants)
                    or len(node.fetches)
                    or len(node.holdings.pins)
                    or node.holdings.pins.num_held
                    or node.grants.num_stale
                    or node.promotion.num_blocks
                )
            ),
            what="idleness",
        )
        node.check()
        assert node.holdings.arena.num_used == node.holdings.num_blocks["dram"]

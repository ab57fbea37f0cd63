"""kill -9 in the middle of writes, again and again: whatever is found afterwards is right."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from distserve.bus.embedded import EmbeddedNats
from distserve.errors import DistServeError
from tests.integration.kvstore.bare_client import BareClient, bare_client, chain_of, run_of
from tests.integration.kvstore.nodes import config_of, process, ready

BLOCKS = 30
ROUNDS = 6


async def offer_all(client: BareClient, node: str, over: asyncio.Event) -> None:
    """Told, not cancelled, when it is over: a library below may swallow a cancel."""
    while not over.is_set():
        for seed in range(20):
            if over.is_set():
                break
            sources = range(1 + BLOCKS * seed, 1 + BLOCKS * (seed + 1))
            try:
                await client.offer(node, [run_of(chain_of(BLOCKS, seed))], sources, conversation=f"c{seed}")
            except DistServeError:
                await asyncio.sleep(0.01)


async def test_a_node_killed_while_it_writes_serves_only_what_is_right(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    config = config_of(nats_server.url, tmp_path / "blocks", dram_blocks=300, disk_bytes=4 << 20)
    dice = random.Random(3)
    num_found = []
    async with bare_client(nats_server.url, num_blocks=1400) as client, client.bus.registry().watch() as watch:
        client.ask_s = 3.0  # an offer that was under way when the node died waits for so long
        for i in range(ROUNDS):
            node = f"kvstore-{i}"
            with process(config, node, tmp_path / f"{i}.log") as one:
                await ready(watch, node)
                total = 0
                for seed in range(20):
                    runs = [run_of(chain_of(BLOCKS, seed))]
                    num = (await client.lookup(node, runs)).num_found[0]
                    if num:
                        part = [run_of(chain_of(BLOCKS, seed), 0, num)]
                        targets = range(client.half, client.half + num)
                        await client.fetch(node, part, targets)
                        first = 1 + BLOCKS * seed
                        assert client.bytes_of(targets) == client.bytes_of(range(first, first + num))
                    total += num
                num_found.append(total)
                over = asyncio.Event()
                writing = asyncio.create_task(offer_all(client, node, over))
                await asyncio.sleep(dice.uniform(0.05, 0.6))
                one.kill()
                over.set()
                await asyncio.wait_for(writing, 30)
    assert num_found[0] == 0
    assert min(num_found[1:]) > 0

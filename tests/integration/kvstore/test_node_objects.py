"""A store node with an object store below its disk."""

from __future__ import annotations

import os
from pathlib import Path

from distserve.bus.embedded import EmbeddedNats
from distserve.messages import DeleteRequest, StoreDone, decode_as
from tests.integration.kvstore.bare_client import bare_client, chain_of, run_of
from tests.integration.kvstore.nodes import config_of, running
from tests.integration.kvstore.test_node_disk import offered, size_of
from tests.waiting import until

OBJECT = b"\x03"


async def test_what_leaves_the_disk_is_fetched_from_objects_also_by_the_next_node(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/objects"
    config = config_of(
        nats_server.url, tmp_path / "disk", dram_blocks=64, disk_bytes=4 << 20, object_url=url, eviction="lru"
    )
    async with bare_client(nats_server.url) as client:
        async with running(config) as node:
            for seed in range(30):
                sources = range(seed % 6 * 20, seed % 6 * 20 + 20)
                await offered(client, node.node_id, [run_of(chain_of(20, seed))], sources)
            await until(lambda: node.write_back is not None and not len(node.write_back), 30)
            await until(lambda: node.holdings.num_blocks["object"] > 200, what="the coldest in objects")
            assert len(node.holdings.index) == 600  # nothing is lost
            oldest = [run_of(chain_of(20, 0))]
            found = await client.lookup(node.node_id, oldest)
            assert (found.num_found, found.tiers) == ([20], [OBJECT * 20])
            targets = range(client.half, client.half + 20)
            reply = await client.fetch(node.node_id, oldest, targets, pin_id=found.pin_id)
            assert reply.tiers == {"object": 20}
            assert client.bytes_of(targets) == client.bytes_of(range(20))
            num_objects = node.holdings.num_blocks["object"]
        fresh = config_of(nats_server.url, tmp_path / "other", dram_blocks=64, disk_bytes=0, object_url=url)
        async with running(fresh, "kvstore-u") as node:
            await until(lambda: node.holdings.num_blocks["object"] == num_objects, what="the list of objects")
            found = await client.lookup(node.node_id, oldest)
            await client.fetch(node.node_id, oldest, targets, pin_id=found.pin_id)
            assert client.bytes_of(targets) == client.bytes_of(range(20))


async def test_without_a_disk_memory_goes_to_objects_and_deletion_reaches_them(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    config = config_of(
        nats_server.url,
        tmp_path,
        dram_blocks=60,
        disk_bytes=0,
        object_url=f"file://{tmp_path}/objects",
        high_watermark=0.5,
        low_watermark=0.25,
    )
    async with bare_client(nats_server.url) as client, running(config) as node:
        mine, theirs = [run_of(chain_of(20, 0))], [run_of(chain_of(20, 1))]
        await client.offer(node.node_id, mine, range(20), tenant="a")
        await client.offer(node.node_id, theirs, range(20, 40), tenant="b")
        await until(lambda: node.holdings.num_blocks["dram"] == 15, what="the low watermark")
        assert len(node.holdings.index) == 40
        before = size_of(tmp_path / "objects")
        done = decode_as(StoreDone, await client.ask(node.node_id, DeleteRequest(tenant="a")))
        assert done.num_blocks == 20
        assert size_of(tmp_path / "objects") < before
        assert (await client.lookup(node.node_id, [*mine, *theirs], pin_s=0)).num_found == [0, 20]
        node.check()


async def test_an_object_store_that_is_down_is_a_reason_and_no_more(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    folder = tmp_path / "objects"
    config = config_of(
        nats_server.url, tmp_path / "disk", dram_blocks=64, disk_bytes=4 << 20, object_url=f"file://{folder}"
    )
    async with bare_client(nats_server.url) as client, running(config) as node:
        block(folder)
        for seed in range(30):
            await offered(client, node.node_id, [run_of(chain_of(20, seed))], range(20))
        await until(lambda: any("object" in reason for reason in node.reasons), 20, "the reason")
        found = await client.lookup(node.node_id, [run_of(chain_of(20, 29))])
        assert found.num_found == [20]
        targets = range(client.half, client.half + 20)
        await client.fetch(node.node_id, [run_of(chain_of(20, 29))], targets, pin_id=found.pin_id)
        assert client.bytes_of(targets) == client.bytes_of(range(20))
        await until(lambda: node.write_back is not None and not len(node.write_back), 30, "everything's being written")


def block(folder: Path) -> None:
    """Nothing can be put there any more: a file is where the folder was."""
    for root, folders, files in os.walk(folder, topdown=False):
        for name in files:
            os.unlink(os.path.join(root, name))
        for name in folders:
            os.rmdir(os.path.join(root, name))
    if folder.exists():
        folder.rmdir()
    folder.write_text("not a folder")

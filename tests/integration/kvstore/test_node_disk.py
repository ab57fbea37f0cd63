"""A store node with a disk: what outlives a crash, and what a disk that is full, slow, hung or wiped costs."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from distserve.bus.embedded import EmbeddedNats
from distserve.errors import BlocksMissing, DeadlineExceeded, DiskFull, Overloaded
from distserve.messages import (
    DeleteRequest,
    StoreDone,
    StorePruneRequest,
    StoreVerified,
    StoreVerifyRequest,
    decode_as,
)
from distserve_kvstore.disk import DiskTier, Record
from distserve_kvstore.node import Node
from tests.integration.kvstore.bare_client import BareClient, bare_client, chain_of, run_of
from tests.integration.kvstore.nodes import BLOCK, config_of, process, ready, running
from tests.waiting import until

DRAM, DISK = b"\x01", b"\x02"


class Gate:
    """A disk tier whose reads and appends wait for as long as it is shut."""

    def __init__(self, disk: DiskTier) -> None:
        self._disk = disk
        self.open = threading.Event()
        self.open.set()
        self.full = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    def append(self, records: Sequence[Record]) -> list[int]:
        if self.full:
            raise DiskFull("no room, says the test", folder="/", wanted_bytes=1, reason="file system")
        self.open.wait(60)
        return self._disk.append(records)

    def read(self, *args: Any) -> Any:
        self.open.wait(60)
        return self._disk.read(*args)


def gate(node: Node) -> Gate:
    assert node.disk is not None
    found = Gate(node.disk._disk)
    node.disk._disk = found  # type: ignore[assignment]
    return found


async def written(node: Node, num: int) -> None:
    await until(lambda: node.holdings.num_blocks["disk"] == num, what=f"{num} blocks' being on disk")


async def offered(client: BareClient, node_id: str, runs: Any, sources: Sequence[int]) -> None:
    """All of it, as soon as there is room."""
    deadline = time.monotonic() + 20
    num = 0
    while num < len(sources):
        assert time.monotonic() < deadline
        try:
            num += await client.offer(node_id, runs, sources)
        except Overloaded:
            await asyncio.sleep(0.01)


async def fetched(client: BareClient, node_id: str, runs: Any, num: int, pin_id: int = 0) -> bytes:
    targets = range(client.half, client.half + num)
    await client.fetch(node_id, runs, targets, pin_id=pin_id)
    return client.bytes_of(targets)


async def test_what_was_written_outlives_kill_9_and_a_wiped_folder_is_a_miss(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    folder = tmp_path / "blocks"
    config = config_of(nats_server.url, folder)
    runs = [run_of(chain_of(40), 0, 40)]
    async with bare_client(nats_server.url) as client, client.bus.registry().watch() as watch:
        with process(config, "kvstore-a", tmp_path / "a.log") as first:
            await ready(watch, "kvstore-a")
            assert await client.offer("kvstore-a", runs, range(40), conversation="c") == 40
            deadline = time.monotonic() + 20
            while (await client.stats("kvstore-a")).tiers["disk"].num_blocks < 40:
                assert time.monotonic() < deadline, first.log.read_text()
                await asyncio.sleep(0.05)
            first.kill()
        with process(config, "kvstore-b", tmp_path / "b.log") as second:
            await ready(watch, "kvstore-b")
            found = await client.lookup("kvstore-b", runs)
            assert (found.num_found, found.tiers) == ([40], [DISK * 40])
            assert await fetched(client, "kvstore-b", runs, 40, found.pin_id) == client.bytes_of(range(40))
            stats = await client.stats("kvstore-b")
            assert (stats.num_conversations, stats.tiers["disk"].num_hits) == (1, 40)
            assert (await client.lookup("kvstore-b", runs)).tiers == [DRAM * 40]  # promoted by its use
            assert second.stop() == 0, second.log.read_text()
        shutil.rmtree(folder)
        with process(config, "kvstore-c", tmp_path / "c.log"):
            await ready(watch, "kvstore-c")
            assert (await client.lookup("kvstore-c", runs)).num_found == [0]


async def test_a_node_knows_its_layout_from_its_folder_before_any_worker_is_there(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    config = config_of(nats_server.url, tmp_path)
    async with bare_client(nats_server.url) as client, running(config) as node:
        await client.offer(node.node_id, [run_of(chain_of(4))], range(4))
        await written(node, 4)
    async with running(config) as node:  # nobody else is registered
        assert node.holdings.num_blocks == {"dram": 0, "disk": 4, "object": 0}


async def test_lookups_offers_and_beats_go_on_while_the_disk_hangs(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    config = config_of(nats_server.url, tmp_path, dram_blocks=64, eviction="lru")
    async with bare_client(nats_server.url) as client, running(config) as node:
        disk = gate(node)
        old, new = [run_of(chain_of(30))], [run_of(chain_of(30, seed=1))]
        await client.offer(node.node_id, old, range(30))
        await written(node, 30)
        node.holdings.evict_memory(30, "by the test")
        node.states["disk"].stuck_s = 0.5
        disk.open.clear()
        began = time.monotonic()
        pinned = await client.lookup(node.node_id, old)
        hanging = asyncio.create_task(
            client.fetch(node.node_id, old, range(client.half, client.half + 30), pin_id=pinned.pin_id, timeout_s=1.5)
        )
        assert await client.offer(node.node_id, new, range(30, 60)) == 30  # its write-through hangs too
        assert (await client.lookup(node.node_id, new, pin_s=0)).num_found == [30]
        assert await client.fetch(node.node_id, new, range(client.half + 30, client.half + 60))
        async with client.bus.registry().watch() as watch:
            first = watch.snapshot[node.node_id].beat
            await watch.wait_for(lambda s: s[node.node_id].beat > first + 3, 5)
            await watch.wait_for(lambda s: s[node.node_id].status == "degraded", 5)
            assert "disk" in watch.snapshot[node.node_id].reasons[0]
            with pytest.raises(DeadlineExceeded):
                await hanging
            # What only the disk has is a miss by now, at once.
            assert (await client.lookup(node.node_id, [*old, *new], pin_s=0)).num_found == [0, 30]
            assert time.monotonic() - began < 8
            assert node.promotion.num_blocks  # the rows that the hanging read may still write to
            disk.open.set()
            await watch.wait_for(lambda s: s[node.node_id].status == "ok", 10)
        await written(node, 60)
        found = await client.lookup(node.node_id, old)
        assert await fetched(client, node.node_id, old, 30, found.pin_id) == client.bytes_of(range(30))
        await until(lambda: node.promotion.num_blocks == 0 and not node.holdings.pins.num_held)


async def test_a_hung_disk_does_not_keep_a_node_from_leaving(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    config = config_of(nats_server.url, tmp_path, drain_s=30)
    async with bare_client(nats_server.url) as client:
        async with running(config) as node:
            disk = gate(node)
            node.states["disk"].stuck_s = 0.3
            disk.open.clear()
            await client.offer(node.node_id, [run_of(chain_of(30))], range(30))
            await until(lambda: node.reasons != [], what="its being noticed")
            began = time.monotonic()
        assert time.monotonic() - began < 5
        disk.open.set()


async def test_a_full_disk_costs_only_what_does_not_fit(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    config = config_of(nats_server.url, tmp_path, dram_blocks=40)
    async with bare_client(nats_server.url) as client, running(config) as node:
        disk = gate(node)
        disk.full = True
        for seed in range(10):  # far more than memory holds
            assert await client.offer(node.node_id, [run_of(chain_of(20, seed))], range(20)) == 20
            await until(lambda: len(node.states["disk"].reasons) > 0)
        assert "no room, says the test" in node.reasons[0]
        found = await client.lookup(node.node_id, [run_of(chain_of(20, 9))])
        assert await fetched(client, node.node_id, [run_of(chain_of(20, 9))], 20, found.pin_id)
        assert node.states["dram"].num_evicted["room"] + node.states["dram"].num_evicted["watermark"] >= 160
        disk.full = False
        await until(lambda: node.reasons == [], 20, "the disk's being tried again")
        await until(lambda: node.num_dirty() == 0)


async def test_memory_above_its_watermark_goes_to_disk_and_comes_back_on_use(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    config = config_of(
        nats_server.url, tmp_path, dram_blocks=40, write_through=False, high_watermark=0.8, low_watermark=0.5
    )
    async with bare_client(nats_server.url) as client, running(config) as node:
        chains = [chain_of(10, seed) for seed in range(3)]
        for i, chain in enumerate(chains):
            await client.offer(node.node_id, [run_of(chain)], range(10 * i, 10 * i + 10))
        assert node.holdings.num_blocks == {"dram": 30, "disk": 0, "object": 0}
        await client.offer(node.node_id, [run_of(chain_of(10, 3))], range(30, 40))
        await until(lambda: node.holdings.num_blocks["dram"] == 20, what="the low watermark")
        for i, chain in enumerate(chains):
            found = await client.lookup(node.node_id, [run_of(chain)])
            assert found.num_found == [10]
            expected = client.bytes_of(range(10 * i, 10 * i + 10))
            assert await fetched(client, node.node_id, [run_of(chain)], 10, found.pin_id) == expected
        assert node.states["disk"].num_hits >= 10


async def test_fetches_of_the_same_blocks_share_one_read(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    config = config_of(nats_server.url, tmp_path)
    async with bare_client(nats_server.url, num_blocks=512) as client, running(config) as node:
        disk = gate(node)
        runs = [run_of(chain_of(30))]
        await client.offer(node.node_id, runs, range(30))
        await written(node, 30)
        node.holdings.evict_memory(30, "by the test")
        disk.open.clear()
        targets = [range(client.half + 30 * i, client.half + 30 * i + 30) for i in range(5)]
        fetches = [asyncio.create_task(client.fetch(node.node_id, runs, t)) for t in targets]
        await until(lambda: len(node.fetches) == 5)
        fetches.pop().cancel()  # whoever gives up takes nothing from the others
        disk.open.set()
        await asyncio.gather(*fetches)
        assert all(client.bytes_of(t) == client.bytes_of(range(30)) for t in targets[:4])
        assert node.states["disk"].num_read == 30
        await until(lambda: len(node.fetches) == 0)


async def test_a_clean_stop_writes_what_is_only_in_memory(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    config = config_of(nats_server.url, tmp_path, write_through=False)
    runs = [run_of(chain_of(30))]
    async with bare_client(nats_server.url) as client:
        async with running(config) as node:
            await client.offer(node.node_id, runs, range(30))
            assert node.holdings.num_blocks["disk"] == 0
        async with running(config) as node:
            found = await client.lookup(node.node_id, runs)
            assert (found.num_found, found.tiers) == ([30], [DISK * 30])
            assert await fetched(client, node.node_id, runs, 30, found.pin_id) == client.bytes_of(range(30))


def flip(folder: Path, block: bytes) -> int:
    """A bit of this block, wherever it is on disk; in how many files."""
    num = 0
    for path in folder.rglob("*"):
        data = bytearray(path.read_bytes()) if path.is_file() else bytearray()
        if (at := data.find(block[:64])) >= 0:
            data[at + 100] ^= 4
            path.write_bytes(data)
            num += 1
    return num


def size_of(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


async def test_a_flipped_bit_is_never_served(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    config = config_of(nats_server.url, tmp_path)
    runs = [run_of(chain_of(20))]
    async with bare_client(nats_server.url) as client:
        async with running(config) as node:
            await client.offer(node.node_id, runs, range(20))
        assert flip(tmp_path, client.bytes_of([12])) == 1
        async with running(config) as node:
            found = await client.lookup(node.node_id, runs)
            with pytest.raises(BlocksMissing) as missing:
                await client.fetch(node.node_id, runs, range(client.half, client.half + 20), pin_id=found.pin_id)
            num = missing.value.num_present
            assert num == 12
            again = await client.lookup(node.node_id, runs)
            assert again.num_found == [12]
            part = [run_of(chain_of(20), 0, 12)]
            assert await fetched(client, node.node_id, part, 12, again.pin_id) == client.bytes_of(range(12))
            # Offered again, it is whole again.
            assert await client.offer(node.node_id, runs, range(20)) == 1
            assert (await client.lookup(node.node_id, runs, pin_s=0)).num_found == [20]


async def test_verify_finds_what_is_damaged_and_prune_gives_space_back(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    config = config_of(nats_server.url, tmp_path)
    async with bare_client(nats_server.url) as client, running(config) as node:
        for seed in range(4):
            await client.offer(node.node_id, [run_of(chain_of(20, seed))], range(20))
        await written(node, 80)
        done = decode_as(StoreVerified, await client.ask(node.node_id, StoreVerifyRequest()))
        assert (done.num_good, done.num_damaged) == (80, 0)
        pruned = decode_as(StoreDone, await client.ask(node.node_id, StorePruneRequest(keep_blocks=30)))
        assert (pruned.num_blocks, node.holdings.num_blocks["disk"]) == (50, 30)
        assert node.disk is not None
        assert node.disk.stats.num_blocks == 30
        node.check()


async def test_what_is_deleted_does_not_come_back_after_a_restart(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    config = config_of(nats_server.url, tmp_path / "blocks")
    mine, theirs = [run_of(chain_of(10, 0))], [run_of(chain_of(10, 1))]
    async with bare_client(nats_server.url) as client, client.bus.registry().watch() as watch:
        with process(config, "kvstore-a", tmp_path / "a.log") as first:
            await ready(watch, "kvstore-a")
            await client.offer("kvstore-a", mine, range(10), tenant="a")
            await client.offer("kvstore-a", theirs, range(10, 20), tenant="b")
            deadline = time.monotonic() + 20
            while (await client.stats("kvstore-a")).tiers["disk"].num_blocks < 20:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            done = decode_as(StoreDone, await client.ask("kvstore-a", DeleteRequest(tenant="a")))
            assert done.num_blocks == 10
            first.kill()
        with process(config, "kvstore-b", tmp_path / "b.log"):
            await ready(watch, "kvstore-b")
            assert (await client.lookup("kvstore-b", [*mine, *theirs])).num_found == [0, 10]


async def test_more_than_the_disk_holds_pushes_the_coldest_out(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    config = config_of(nats_server.url, tmp_path, dram_blocks=64, disk_bytes=4 << 20)
    async with bare_client(nats_server.url) as client, running(config) as node:
        for seed in range(60):  # 1,200 blocks, 9.6 MiB
            await offered(client, node.node_id, [run_of(chain_of(20, seed))], range(20))
        await until(lambda: node.write_back is not None and not len(node.write_back), 30, "everything's being written")
        assert node.disk is not None
        await until(
            lambda: node.disk is not None and node.holdings.num_blocks["disk"] <= 0.96 * node.disk.stats.usable_blocks,
            what="the watermark",
        )
        assert node.states["disk"].num_evicted["watermark"] > 200
        assert node.disk.stats.file_bytes <= 4 << 20
        assert (node.reasons, node.states["disk"].num_errors) == ([], 0)
        node.check()
    assert size_of(tmp_path) < 5 << 20
    assert BLOCK == 8192

"""Deletion and what races it: offers under way, copies on other nodes, a stop of the node; and hanging at its start."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from distserve.bus.embedded import EmbeddedNats
from distserve.errors import DiskFailed, DistServeError, MalformedMessage
from distserve.lifecycle import Shutdown
from distserve.messages import DeleteRequest, OfferedState, PinRequest, StoreDone, decode_as, encode
from distserve_kvstore.disk import DiskOptions, DiskTier
from distserve_kvstore.main import serve
from distserve_kvstore.opening import open_disk
from tests.contracts.transport.pools import SMALL
from tests.integration.kvstore.bare_client import bare_client, chain_of, run_of
from tests.integration.kvstore.nodes import config_of, running
from tests.waiting import until


async def test_what_was_being_offered_when_it_was_deleted_does_not_come(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    async with bare_client(nats_server.url) as client, running(config_of(nats_server.url, tmp_path)) as node:
        mine, theirs = [run_of(chain_of(8))], [run_of(chain_of(8, 1))]
        grant = await client.grant(node.node_id, mine, tenant="t", conversation="c")
        other = await client.grant(node.node_id, theirs, tenant="t", conversation="d")
        transfers = [await client.open(node.node_id, g) for g in (grant, other)]
        client.write(transfers[0], range(8))
        client.write(transfers[1], range(8, 16))
        decode_as(StoreDone, await client.ask(node.node_id, DeleteRequest(tenant="t", conversation="c")))
        state = encode(OfferedState(worker=client.worker_id))
        with pytest.raises(DistServeError):
            await transfers[0].commit(state, timeout_s=5)
        await transfers[1].commit(state, timeout_s=5)
        for transfer in transfers:
            await transfer.abort("not finished")
        assert (await client.lookup(node.node_id, [*mine, *theirs], pin_s=0)).num_found == [0, 8]
        assert await client.offer(node.node_id, mine, range(8), tenant="t", conversation="c") == 8  # from now on it may
        assert (await client.lookup(node.node_id, mine, pin_s=0)).num_found == [8]


async def test_names_that_no_record_has_room_for_are_refused_at_the_door(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    async with bare_client(nats_server.url) as client, running(config_of(nats_server.url, tmp_path)) as node:
        with pytest.raises(MalformedMessage, match="conversation of 2000 bytes"):
            await client.grant(node.node_id, [run_of(chain_of(4))], conversation="x" * 2000)
        with pytest.raises(MalformedMessage, match="tenant of 300 bytes"):
            decode_as(StoreDone, await client.ask(node.node_id, PinRequest(tenant="t" * 300, conversation="c")))
        assert len(node.grants) == 0


async def test_a_copy_is_found_by_its_conversation_and_deleted_by_it(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    configs = [config_of(nats_server.url, tmp_path / name) for name in "xy"]
    async with (
        bare_client(nats_server.url) as client,
        running(configs[0], "kvstore-x") as x,
        running(configs[1], "kvstore-y") as y,
    ):
        run = [run_of(chain_of(20))]
        await client.offer(x.node_id, run, range(20), tenant="t", conversation="vip")
        await client.ask(x.node_id, PinRequest(tenant="t", conversation="vip"))
        await until(lambda: y.holdings.num_blocks["dram"] == 20, what="the copy")
        answer = await client.ask(y.node_id, DeleteRequest(tenant="t", conversation="vip"))
        assert decode_as(StoreDone, answer).num_blocks == 20
        assert len(y.holdings.index) == 0


async def test_a_clean_stop_without_a_disk_leaves_what_memory_had_in_objects(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/objects"
    config = config_of(nats_server.url, tmp_path / "a", disk_bytes=0, object_url=url)
    run = [run_of(chain_of(100))]
    async with bare_client(nats_server.url) as client:
        async with running(config) as node:
            await client.offer(node.node_id, run, range(100))
            assert node.num_dirty() == 100
        async with running(config, "kvstore-b") as node:
            await until(lambda: node.holdings.num_blocks["object"] == 100, what="the list of objects")
            found = await client.lookup(node.node_id, run)
            targets = range(client.half, client.half + 100)
            await client.fetch(node.node_id, run, targets, pin_id=found.pin_id)
            assert client.bytes_of(targets) == client.bytes_of(range(100))


@pytest.fixture
def hanging_disk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """DiskTier.open() comes back only when the event is set."""
    gate = threading.Event()
    real = DiskTier.open

    def slow(*args: Any) -> Any:
        assert gate.wait(60)
        return real(*args)

    monkeypatch.setattr(DiskTier, "open", slow)
    yield gate
    gate.set()


async def test_a_disk_that_hangs_when_it_is_opened_is_done_without_and_given_back_when_it_answers(
    hanging_disk: threading.Event, tmp_path: Path
) -> None:
    options = DiskOptions(capacity_bytes=64 << 20, segment_bytes=1 << 20, min_free_fraction=0.0)
    with pytest.raises(DiskFailed, match=r"not opened within 0\.1 s"):
        await open_disk(tmp_path, SMALL, options, timeout_s=0.1)
    hanging_disk.set()
    deadline = time.monotonic() + 20
    while True:  # until the one that came too late has left the folder
        with contextlib.suppress(DistServeError):
            tier, _ = DiskTier.open(tmp_path, SMALL, options)
            break
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    tier.close()


async def test_a_node_whose_disk_hangs_at_the_start_still_leaves_when_it_is_asked_to(
    hanging_disk: threading.Event, nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    shutdown = Shutdown(2.0)
    async with bare_client(nats_server.url):
        task = asyncio.create_task(serve(config_of(nats_server.url, tmp_path), "kvstore-t", shutdown))
        opening = "disk tier or not"
        await until(lambda: any(t.name.startswith("once") for t in threading.enumerate()), what=opening)
        assert not task.done()
        shutdown.request()
        await asyncio.wait_for(task, 10)

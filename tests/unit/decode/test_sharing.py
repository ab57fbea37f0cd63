"""What a decode worker has part in, by what it is and by what reaches its pool. Real transports, no engine."""

import types
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from distserve.bus import subjects
from distserve.bus.base import Delivery
from distserve.bus.memory import MemoryBus, MemoryHub
from distserve.config import load_config
from distserve.errors import ConfigError
from distserve.kv.block_pool import BlockPool
from distserve.kv.hashing import block_hashes, pack
from distserve.kv.layout import fingerprint
from distserve.messages import (
    ChainRun,
    KVEvents,
    KVSnapshot,
    KVSnapshotRequest,
    PrefixReply,
    PrefixRequest,
    decode_as,
)
from distserve.transport.base import PoolMemory
from distserve.worker.store.sharing import Sharing
from distserve_decode.sharing import open_sharing
from tests.contracts.transport.fake_device import FakeDevice
from tests.contracts.transport.pools import SMALL, pool
from tests.waiting import until

NUM_BLOCKS = 8
NAMES = block_hashes(list(range(4 * SMALL.block_size)), SMALL.block_size, fingerprint(SMALL))


class Told:
    """What is said on the bus of what the pool holds."""

    def __init__(self) -> None:
        self.events: list[KVEvents] = []

    async def __call__(self, delivery: Delivery) -> None:
        self.events.append(decode_as(KVEvents, delivery.data))


@asynccontextmanager
async def sharing(told: Told, *, on_gpu: bool = False, **settings: object) -> AsyncIterator[tuple[Sharing, BlockPool]]:
    """Of a pool that holds NAMES from when it is open."""
    keys = {f"DISTSERVE_{key}".upper(): str(value).lower() for key, value in settings.items()}
    config = load_config(None, keys, {}, {})
    bus = MemoryBus(MemoryHub())
    with pool(NUM_BLOCKS, SMALL) as memory:
        if on_gpu:
            memory = PoolMemory(memory.layout, blocks=None, on_device=FakeDevice(memory, exports=False))
        blocks = BlockPool(NUM_BLOCKS, keep=config.kv.prefix_cache)
        parts: Any = types.SimpleNamespace(memory=memory, pool=blocks, model=types.SimpleNamespace(layout=SMALL))
        await bus.subscribe(subjects.kv_events(), told, inline=True)
        async with (
            bus.registry().watch() as watch,
            open_sharing(
                config,
                "d",
                bus,
                watch,
                parts,
                on_commit=lambda commit: None,
                on_lost=lambda *lost: None,
                on_freed=lambda: None,
            ) as opened,
        ):
            ids = blocks.allocate(len(NAMES))
            blocks.name(ids, NAMES)
            blocks.free(ids)
            yield opened, blocks
        assert blocks.num_used == 0


async def found(opened: Sharing) -> int:
    request = PrefixRequest(asker="p", layout=fingerprint(SMALL), runs=[ChainRun(start=0, hashes=pack(NAMES))])
    reply = await opened.store.answer(request)
    assert isinstance(reply, PrefixReply)
    return reply.num_found[0]


async def snapshot(opened: Sharing) -> int:
    reply = await opened.store.answer(KVSnapshotRequest())
    assert isinstance(reply, KVSnapshot)
    return reply.total


async def test_a_decode_worker_takes_hand_overs_tells_what_it_holds_and_gives_it() -> None:
    told = Told()
    async with sharing(told) as (opened, _):
        assert {"shm", "tcp"} <= set(opened.receivers)
        assert (await found(opened), await snapshot(opened)) == (4, 4)
        await until(lambda: len(told.events) == 1, what="its blocks are told")
        assert len(told.events[0].stored) == 4 * 8


async def test_without_the_cache_it_takes_hand_overs_and_holds_nothing() -> None:
    told = Told()
    async with sharing(told, kv_prefix_cache=False) as (opened, blocks):
        assert {"shm", "tcp"} <= set(opened.receivers)
        assert (await found(opened), await snapshot(opened), blocks.num_cached) == (0, 0, 0)
    assert told.events == []


async def test_a_colocated_worker_can_be_reached_by_store_nodes() -> None:
    async with sharing(Told(), decode_colocated=True) as (opened, _):
        assert {"shm", "tcp"} <= set(opened.receivers)


@pytest.mark.parametrize("settings", [{"kvstore_use": False}, {"kv_prefix_cache": False}])
async def test_one_that_has_no_part_in_the_store_opens_no_transport(settings: dict[str, bool]) -> None:
    async with sharing(Told(), decode_colocated=True, **settings) as (opened, _):
        assert (opened.receivers, opened.plane.kinds) == ({}, [])
        assert not opened.store.client.may_find("anybody")


async def test_a_colocated_worker_on_a_gpu_that_nothing_reaches_serves_without_the_store(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("distserve.transport.factory.rdma_unusable", lambda options: "there is no RDMA device")
    told = Told()
    async with sharing(told, on_gpu=True, decode_colocated=True, model_device="cuda") as (opened, _):
        assert opened.receivers == {}
        assert await snapshot(opened) == 4
        await until(lambda: len(told.events) == 1, what="gateways are told what it holds")
    assert "no part in the store" in caplog.text
    with pytest.raises(ConfigError, match="there is no RDMA device"):
        async with sharing(told, on_gpu=True, model_device="cuda"):
            pass

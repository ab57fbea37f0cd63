"""A worker reduced to its side of the store: a pool, the store's client, an entry in the registry. A driver
(store_lines).

    python -m benchmarks.store_client --url nats://… --model NAME --kind shm|tcp --from dram|disk --size 1MiB --mib 256

put: each request is a prompt of its own; it is hashed and offered as a worker offers a finished sequence, and the time
ends when the node has confirmed the last commit. get: each prompt is hashed, looked up and fetched into blocks of the
pool, one after the other. Checksums are on, as always.

--from disk: a put ends when all of it is on disk. A get fails if a block came from another tier than --from says.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TextIO, TypeVar

from benchmarks.store_lines import own_stdout, serve
from benchmarks.store_pool import Blocks, layout_of
from benchmarks.store_values import BLOCK_SIZE, MIB, SIZES, Load
from distserve.bus import subjects
from distserve.bus.base import Bus, Watch
from distserve.config import Config, load_config
from distserve.kv.hashing import Chain
from distserve.kv.layout import fingerprint
from distserve.kv.lease import LeaseTable, first_epoch
from distserve.lifecycle import Shutdown, run_service, settle_garbage
from distserve.messages import (
    DeleteRequest,
    KVLayout,
    StoreDone,
    StoreStats,
    StoreStatsRequest,
    Tier,
    WorkerInfo,
    decode_as,
    encode,
)
from distserve.transport.select import host_key
from distserve.worker.data_plane import plan, receivers, senders
from distserve.worker.membership import Membership
from distserve.worker.service import connect
from distserve.worker.store import Arrivals, Label, StoreClient, open_store

NODE_S = 60.0  # to be there, with our layout
PUT_S, GET_S = 60.0, 30.0  # of all requests, of one

T = TypeVar("T")


@dataclass(slots=True)
class Client:
    """Puts and gets on the event loop."""

    load: Load
    layout: KVLayout
    blocks: Blocks
    store: StoreClient
    bus: Bus
    watch: Watch
    freed: asyncio.Event
    max_offered: int
    tier: Tier
    node: str = ""  # that the last put went to

    def chain(self, turn: int, values: range) -> Chain:
        """Of a prompt that no other request and no other turn has."""
        chain = Chain(BLOCK_SIZE, fingerprint(self.layout), salt=tenant(turn))
        chain.extend(range(values.start, values.start + len(values) * BLOCK_SIZE))
        return chain

    async def put(self, turn: int) -> float:
        self.blocks.bytes.stamp(turn)
        counts, sources = self.store.counts, self.blocks.sources
        had, dropped = counts.num_offered_blocks, counts.num_dropped_blocks.copy()
        began = time.perf_counter()
        async with asyncio.timeout(PUT_S):
            for values in self.load.requests():
                await self._room(self.max_offered - len(values))
                ids = sources[values.start : values.stop]
                self.store.offer(self.chain(turn, values), 0, ids, Label(tenant(turn)))
            await self._room(0)
            self.node = self._nodes()[0]
            if self.tier == "disk":
                await self._on_disk()
        seconds = time.perf_counter() - began
        if (got := counts.num_offered_blocks - had) != self.load.num_values:
            why = dict(counts.num_dropped_blocks - dropped)
            raise ValueError(f"the node has taken {got} of {self.load.num_values} blocks; dropped: {why}")
        return seconds

    async def _room(self, held: int) -> None:
        """Until at most `held` blocks are on offer."""
        while self.store.num_held_blocks > held:
            self.freed.clear()
            await self.freed.wait()

    async def _on_disk(self) -> None:
        while True:
            answer = await self.bus.request(self._subject(), encode(StoreStatsRequest()), timeout_s=30)
            disk = decode_as(StoreStats, answer).tiers.get("disk")
            if disk is not None and disk.num_blocks >= self.load.num_values:
                return
            await asyncio.sleep(0.01)

    def _nodes(self) -> list[str]:
        """Those that serve our layout."""
        return [
            i
            for i, info in self.watch.snapshot.items()
            if info.role == "kvstore" and info.layout == self.layout and info.status in ("ok", "degraded")
        ]

    def _subject(self) -> str:
        return subjects.worker("kvstore", self.node)

    async def wait(self) -> None:
        """For another node than the last put went to. Raises TimeoutError if none takes up our layout."""
        await self.watch.wait_for(lambda workers: any(node != self.node for node in self._nodes()), NODE_S)

    async def get(self, turn: int) -> float:
        self.blocks.bytes.blank()
        tiers: Counter[str] = Counter()
        began = time.perf_counter()
        for values in self.load.requests():
            found = await self.store.lookup(self.chain(turn, values), 0)
            tiers += found.tiers
            ids = self.blocks.targets[values.start : values.start + len(found)]
            num = await self.store.fetch(found, ids, timeout_s=GET_S)
            if num != len(values):
                raise ValueError(f"{num} blocks have come, {len(found)} were found, of {len(values)}")
        seconds = time.perf_counter() - began
        self.blocks.bytes.check()
        if set(tiers) != {self.tier}:
            raise ValueError(f"blocks came from {dict(tiers)}, must be {self.tier} alone")
        return seconds

    async def clear(self, turn: int) -> None:
        [self.node] = self._nodes()
        answer = await self.bus.request(self._subject(), encode(DeleteRequest(tenant=tenant(turn))), timeout_s=30)
        decode_as(StoreDone, answer)


def tenant(turn: int) -> str:
    return f"turn-{turn}"


@asynccontextmanager
async def opened(config: Config, load: Load, tier: Tier) -> AsyncIterator[Client]:
    """Registered as a decode worker of config.model.name. Raises TimeoutError if no node takes up its layout."""
    layout, worker_id = layout_of(load.size, config.model.served_name), f"bench-{os.getpid()}"
    blocks, freed = Blocks.of(load, layout), asyncio.Event()
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(await connect(config.bus, worker_id))
        plane, arrivals, leases = plan(config, blocks.memory), Arrivals(), LeaseTable(first_epoch())
        kv_senders = senders(config, plane, blocks.memory, worker_id, bus)
        for sender in kv_senders.values():
            stack.push_async_callback(sender.stop)
        kv_receivers = await receivers(
            config,
            plane,
            blocks.memory,
            worker_id,
            bus,
            on_commit=arrivals.on_commit,
            on_lost=arrivals.on_lost,
            stack=stack,
        )
        watch = await stack.enter_async_context(bus.registry().watch())
        store = await stack.enter_async_context(
            open_store(
                config,
                worker_id,
                bus,
                watch,
                plane,
                pool=blocks.pool,
                layout=layout,
                leases=leases,
                arrivals=arrivals,
                receivers=kv_receivers,
                senders=kv_senders,
                on_freed=freed.set,
            )
        )
        info = WorkerInfo(
            worker_id=worker_id,
            role="decode",
            model=config.model.served_name,
            status="ok",
            layout=layout,
            host_key=host_key(),
        )
        await stack.enter_async_context(Membership(bus.registry(), lambda: info, beat_s=config.bus.beat_s))
        max_offered = min(config.kvstore.offer_blocks, blocks.pool.num_total // 4)
        client = Client(load, layout, blocks, store.client, bus, watch, freed, max_offered, tier)
        await client.wait()
        settle_garbage()
        yield client


class OnLoop:
    """A Store for a thread beside the loop."""

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop

    def put(self, turn: int) -> float:
        return self._wait(self._client.put(turn))

    def get(self, turn: int) -> float:
        return self._wait(self._client.get(turn))

    def clear(self, turn: int) -> None:
        self._wait(self._client.clear(turn))

    def wait(self) -> None:
        self._wait(self._client.wait())

    def _wait(self, work: Coroutine[None, None, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def drive(config: Config, load: Load, tier: Tier, answers: TextIO) -> None:
    async with opened(config, load, tier) as client:
        await asyncio.to_thread(serve, OnLoop(client, asyncio.get_running_loop()), answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--kind", choices=["shm", "tcp"], required=True)
    parser.add_argument("--from", dest="tier", choices=["dram", "disk"], required=True)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--mib", type=int, required=True)
    a = parser.parse_args()
    config = load_config(
        overrides={
            "bus.url": a.url,
            "model.path": a.model,
            "model.name": a.model,
            "transport.kind": a.kind,
            "kvstore.min_fetch_blocks": 1,
            "kvstore.lookup_timeout_s": 5.0,  # a busy machine must not make a miss of a measurement
        }
    )
    answers = own_stdout()

    async def work(shutdown: Shutdown) -> None:
        await drive(config, Load(SIZES[a.size], a.mib * MIB), a.tier, answers)

    run_service(work, grace_s=1)


if __name__ == "__main__":
    main()

"""What `distserve kv` asks the KV store's nodes that run, over the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from distserve.bus import subjects
from distserve.bus.nats import NatsBus
from distserve.config import Config
from distserve.errors import DistServeError, NoWorker
from distserve.messages import (
    DeleteRequest,
    Message,
    PinRequest,
    StoreDone,
    StoreList,
    StoreListRequest,
    StorePruneRequest,
    StoreStats,
    StoreStatsRequest,
    StoreVerified,
    StoreVerifyRequest,
    UnpinRequest,
    WorkerInfo,
    decode_as,
    encode,
)

LONG_S = 600.0  # for reading or rewriting whole disks
PART = 500  # conversations in one answer

Row = dict[str, Any]
Ask = Callable[[Message, float], Awaitable[bytes]]  # one node; the seconds that it has


async def statistics(config: Config, node: str) -> list[Row]:
    """Of each node, StoreStats as plain values."""

    async def one(info: WorkerInfo, ask: Ask) -> list[Row]:
        # Not to_builtins(): it leaves out what is at its default.
        row = msgspec.structs.asdict(decode_as(StoreStats, await ask(StoreStatsRequest(), _soon(config))))
        row["tiers"] = {tier: msgspec.structs.asdict(stats) for tier, stats in row["tiers"].items()}
        return [row | {"node": info.worker_id, "model": info.model, "status": info.status, "reasons": info.reasons}]

    return await _of_each(config, node, one)


async def conversations(config: Config, node: str) -> list[Row]:
    async def one(info: WorkerInfo, ask: Ask) -> list[Row]:
        rows: list[Row] = []
        after = ""
        while True:
            answer = await ask(StoreListRequest(after=after, limit=PART), _soon(config))
            part = decode_as(StoreList, answer).conversations
            rows += [{"node": info.worker_id} | msgspec.structs.asdict(c) for c in part]
            if len(part) < PART:
                return rows
            after = part[-1].conversation

    return await _of_each(config, node, one)


async def verified(config: Config, node: str) -> list[Row]:
    async def one(info: WorkerInfo, ask: Ask) -> list[Row]:
        done = decode_as(StoreVerified, await ask(StoreVerifyRequest(), LONG_S))
        return [{"node": info.worker_id} | msgspec.structs.asdict(done)]

    return await _of_each(config, node, one)


async def pruned(config: Config, node: str, keep_blocks: int) -> list[Row]:
    return await _done(config, node, StorePruneRequest(keep_blocks=keep_blocks), "num_evicted", LONG_S)


async def deleted(config: Config, tenant: str, conversation: str) -> list[Row]:
    """By every node: any may hold a part."""
    return await _done(config, "", DeleteRequest(tenant=tenant, conversation=conversation), "num_deleted", LONG_S)


async def pinned(config: Config, tenant: str, conversation: str, ttl_s: float) -> list[Row]:
    message = PinRequest(tenant=tenant, conversation=conversation, ttl_s=ttl_s)
    return await _done(config, "", message, "num_pinned", _soon(config))


async def unpinned(config: Config, tenant: str, conversation: str) -> list[Row]:
    message = UnpinRequest(tenant=tenant, conversation=conversation)
    return await _done(config, "", message, "num_unpinned", _soon(config))


def _soon(config: Config) -> float:
    return config.bus.request_timeout_s


async def _done(config: Config, node: str, message: Message, called: str, timeout_s: float) -> list[Row]:
    async def one(info: WorkerInfo, ask: Ask) -> list[Row]:
        return [{"node": info.worker_id, called: decode_as(StoreDone, await ask(message, timeout_s)).num_blocks}]

    return await _of_each(config, node, one)


async def _of_each(config: Config, node: str, one: Callable[[WorkerInfo, Ask], Awaitable[list[Row]]]) -> list[Row]:
    """What `one` finds at each of the nodes that are meant, all at once; of a node that doesn't answer, or refuses, one
    row with "error". Raises NoWorker if there is no node."""
    async with await NatsBus.connect(
        config.bus.url,
        name="distserve-kv",
        registry_ttl_s=config.bus.ttl_s,
        connect_timeout_s=config.bus.connect_timeout_s,
    ) as bus:
        async with bus.registry().watch() as watch:
            found = [w for i, w in sorted(watch.snapshot.items()) if w.role == "kvstore" and node in ("", i)]
        if not found:
            what = f"store node {node!r}" if node else "store node"
            raise NoWorker(f"no {what} is registered at {config.bus.url}", role="kvstore")

        async def of(info: WorkerInfo) -> list[Row]:
            async def ask(message: Message, timeout_s: float) -> bytes:
                return await bus.request(
                    subjects.worker("kvstore", info.worker_id), encode(message), timeout_s=timeout_s
                )

            try:
                return await one(info, ask)
            except DistServeError as e:
                return [{"node": info.worker_id, "status": info.status, "error": str(e)}]

        return [row for rows in await asyncio.gather(*map(of, found)) for row in rows]

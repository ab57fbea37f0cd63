"""Blocks into the object tier: runs of a chain, one object each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import numpy as np

from distserve.errors import DistServeError
from distserve.kv.placement import SEGMENT_BLOCKS
from distserve_kvstore.byte_budget import ByteBudget
from distserve_kvstore.columns import Entries
from distserve_kvstore.holdings import Holdings
from distserve_kvstore.object_io import ObjectIo
from distserve_kvstore.objects import ObjectRun
from distserve_kvstore.promotion import Source, Wanted

log = logging.getLogger(__name__)

PUTS_AT_ONCE = 4
PUT_BYTES = 256 << 20  # of blocks in all puts under way; an object is made of a copy of them


class Archive:
    """Belongs to the event loop. What is not in memory is read from disk into buffers of its own."""

    def __init__(self, holdings: Holdings, objects: ObjectIo, disk: Source | None) -> None:
        self._holdings = holdings
        self._objects = objects
        self._disk = disk
        self._slots = asyncio.Semaphore(PUTS_AT_ONCE)
        self._budget = ByteBudget(PUT_BYTES)
        self._puts: dict[asyncio.Task[DistServeError | None], Entries] = {}  # under way, or waiting for their turn

    async def put(self, entries: Entries) -> Entries:
        """Those of `entries` that are in an object now, which were held meanwhile. Never raises for the store's
        faults."""
        holdings = self._holdings
        index = holdings.index
        there = index.object[entries] >= 0
        todo = entries[~there]
        holdings.pins.hold(entries)
        try:
            runs = list(_runs(todo, index.depth, index.parent))
            await asyncio.gather(*(self._begin(run) for run in runs))
            return entries[index.object[entries] >= 0]
        finally:
            holdings.pins.unhold(entries)

    async def settled(self) -> DistServeError | None:
        """When the puts of what is deleted that are under way now have ended, and their objects are deleted for good;
        or why they aren't yet. Takes as long as disk and object store do."""
        doomed = [put for put, run in self._puts.items() if self._holdings.doomed.among(run).any()]
        if doomed:
            await asyncio.wait(doomed)
        ended = [put for put in doomed if not put.cancelled() and put.exception() is None]
        return next((error for put in ended if (error := put.result()) is not None), None)

    def _begin(self, run: Entries) -> asyncio.Task[DistServeError | None]:
        task = asyncio.create_task(self._put(run), name=f"put {len(run)} blocks into an object")
        self._puts[task] = run
        task.add_done_callback(self._puts.pop)
        return task

    async def _put(self, run: Entries) -> DistServeError | None:
        """Why an object of what was deleted meanwhile is still there; None: there is none."""
        holdings, index = self._holdings, self._holdings.index
        async with self._slots, self._budget.taken(len(run) * holdings.arena.block_bytes):
            if holdings.doomed.among(run).any():  # deleted before its turn came
                return None
            try:
                payloads = await self._payloads(run)
                tip = int(run[-1])
                head = next((e for e in index.ancestors(tip) if index.depth[e] % SEGMENT_BLOCKS == 0), int(run[0]))
                number = await self._objects.put(
                    ObjectRun(
                        key=index.hash_of(head),
                        hashes=[index.hash_of(e) for e in run.tolist()],
                        parent=index.parent_hash_of(int(run[0])),
                        start=int(index.depth[run[0]]),
                        tenant=index.tenant_of(tip),
                        conversation=index.conversations.through(tip),
                        payloads=payloads,
                    )
                )
            except DistServeError as e:
                log.warning("%d blocks were not put into the object store: %s", len(run), e)
                return None
        alive = ~holdings.doomed.among(run)
        fresh = run[alive & (index.object[run] < 0)]
        holdings.enter(fresh, "object", [number] * len(fresh))
        if not alive.all():  # deleted meanwhile: the object holds what must not be there
            holdings.leave(run[index.object[run] == number], "object", "deleted")
            try:
                await self._objects.delete([number])
            except DistServeError as e:
                return e
        return None

    async def _payloads(self, run: Entries) -> list[memoryview]:
        """Of each its bytes: the arena's row, or read from disk. Raises DistServeError."""
        holdings, index = self._holdings, self._holdings.index
        found: dict[int, memoryview] = {
            e: holdings.arena.row(int(index.dram[e])) for e in run.tolist() if index.dram[e] >= 0
        }
        missing = [e for e in run.tolist() if e not in found]
        if missing and self._disk is None:
            raise DistServeError("a block to be archived is neither in memory nor on disk")
        if missing and self._disk is not None:
            buffer = np.empty((len(missing), holdings.arena.block_bytes), np.uint8)
            rows = [row.data for row in buffer]
            wanted = [Wanted(index.hash_of(e), int(index.disk[e]), int(index.depth[e])) for e in missing]
            errors = await self._disk.read(wanted, rows)
            if bad := next((e for e in errors if e is not None), None):
                raise bad
            found |= dict(zip(missing, rows, strict=True))
        return [found[e] for e in run.tolist()]


def _runs(entries: Entries, depth: Entries, parent: Entries) -> Iterator[Entries]:
    """Entries that follow one another in a chain and lie in one segment, cut where either ends; each in order."""
    ordered = entries[np.argsort(depth[entries], kind="stable")].tolist()
    members = set(ordered)
    following: dict[int, int] = {}  # parent -> the child that goes on with its run
    for e in ordered:
        p = int(parent[e])
        if p in members and p not in following and depth[e] % SEGMENT_BLOCKS:
            following[p] = e
    inner = set(following.values())
    for e in ordered:
        if e not in inner:
            run = [e]
            while run[-1] in following:
                run.append(following[run[-1]])
            yield np.asarray(run, np.int32)

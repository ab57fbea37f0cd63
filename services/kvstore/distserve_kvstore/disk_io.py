"""The disk tier's blocking calls on threads of their own, so that one that hangs holds up only who reads it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

from distserve.errors import DiskFailed, DiskFull, DistServeError
from distserve_kvstore.disk import DiskStats, DiskTier, Record
from distserve_kvstore.io_threads import IoThreads
from distserve_kvstore.promotion import Wanted
from distserve_kvstore.tier_state import Call, TierState

log = logging.getLogger(__name__)

T = TypeVar("T")

READ_THREADS = 4
SLICE_BYTES = 8 << 20  # moved in one slice of compaction: what an append may have to wait for
COMPACT_BYTES = 32 << 20  # moved for an append that found no room


class DiskIo:
    """Belongs to the event loop. Writes, frees and compaction go in order by one thread, reads by several."""

    def __init__(self, disk: DiskTier, state: TierState) -> None:
        self._disk = disk
        self._state = state
        self._readers = IoThreads("disk-read", READ_THREADS)
        self._writer = IoThreads("disk-write", 1)
        self._reading = asyncio.Semaphore(READ_THREADS)
        self._upkeep: set[asyncio.Task[None]] = set()
        self._to_forget = 0  # places that are being forgotten
        self._note(disk.stats())

    async def read(self, blocks: Sequence[Wanted], into: Sequence[memoryview]) -> list[DistServeError | None]:
        """As DiskTier.read(). The tier's state hears of failures that are no single block's."""
        places, hashes = [b.place for b in blocks], [b.hash for b in blocks]
        async with self._reading:
            with self._state.operation("read", queued=True) as call:
                errors = await self._readers.run(call.timed(lambda: self._disk.read(places, hashes, into)))
                failed = next((e for e in errors if isinstance(e, DiskFailed)), None)
                if failed is not None and all(isinstance(e, DiskFailed) for e in errors):
                    raise failed
        self._state.num_errors += sum(e is not None for e in errors)
        return errors

    @property
    def num_to_forget(self) -> int:
        """Places that are not forgotten for good yet."""
        return self._to_forget + self._disk.num_unforgotten

    @property
    def num_free(self) -> int:
        """Blocks that may be added before others must go."""
        return self.stats.usable_blocks - self.stats.num_blocks

    async def append(self, records: Sequence[Record]) -> list[int]:
        """As DiskTier.append(), after a slice of compaction if that is what it takes. Raises DiskFull, DiskFailed."""

        def write() -> list[int]:
            try:
                return self._disk.append(records)
            except DiskFull:
                if not self._disk.compact(COMPACT_BYTES).freed_bytes:
                    raise
                return self._disk.append(records)

        with self._state.operation("write", queued=True) as call:
            places = await self._write(call, write)
        self._state.num_written += len(places)
        return places

    def free(self, places: Sequence[int]) -> None:
        """Some time soon."""
        if not len(places):
            return
        taken = list(places)
        self._in_background(self._free(taken), "free places on disk")

    async def _free(self, places: list[int]) -> None:
        try:
            with self._state.watched("write", queued=True) as call:
                await self._write(call, lambda: self._disk.free(places))
        except DistServeError as e:  # they are free in this life all the same
            self._state.num_errors += 1
            log.warning("the disk tier could not note what was let go: %s", e)

    async def forget(self, places: Sequence[int]) -> None:
        """For good when it returns. Raises DiskFull, DiskFailed: then retry() does the rest, until it works. Cancelled,
        it goes on all the same."""
        if not len(places):
            return
        taken = list(places)
        self._to_forget += len(taken)
        task = self._in_background(self._forget(taken), "forget places on disk")
        await asyncio.shield(task)

    async def _forget(self, places: list[int]) -> None:
        try:
            with self._state.watched("write", queued=True) as call:
                await self._write(call, lambda: self._disk.forget(places))
        finally:
            self._to_forget -= len(places)  # what has failed is the tier's to finish, which counts it

    async def retry(self) -> None:
        """Once more: what could not be forgotten, and a look for room where there was none. Never raises."""
        if self.stats.usable_blocks <= 0:
            await self.look()
        if not self._disk.num_unforgotten or self._state.resting("write"):
            return
        try:
            with self._state.watched("write", queued=True) as call:
                await self._write(call, self._disk.finish_forgetting)
        except DistServeError as e:
            self._state.failed("write", e)

    async def look(self) -> None:
        """What may be written by now: others may have filled their file system, or given room back. Never raises."""
        try:
            with self._state.watched("write", queued=True) as call:
                await self._write(call, self._disk.look)
        except DistServeError as e:
            self._state.failed("write", e)

    async def compact(self) -> bool:
        """A slice; whether another is worth while. What was freed until now counts. Raises DiskFull, DiskFailed."""
        if self._upkeep:
            await asyncio.wait(set(self._upkeep))
        with self._state.watched("write", queued=True) as call:
            return (await self._write(call, lambda: self._disk.compact(SLICE_BYTES))).more

    async def _write(self, call: Call, job: Callable[[], T]) -> T:
        """On the writer's thread. What the tier says of itself afterwards is known here then, also if it fails."""
        stats = self.stats

        def write() -> T:
            nonlocal stats
            try:
                return job()
            finally:
                stats = self._disk.stats()

        try:
            return await self._writer.run(call.timed(write))
        finally:
            self._note(stats)

    def _note(self, stats: DiskStats) -> None:
        self.stats: DiskStats = stats
        self._state.no_room = (
            ""
            if stats.usable_blocks > 0
            else f"no room for blocks: its file system can spare {stats.capacity_bytes} bytes beyond what stays free "
            "for others"
        )

    def _in_background(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._upkeep.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._upkeep.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waits has it; whoever does not has retry()

    async def close(self, timeout_s: float) -> None:
        """No further calls. What was written is on the disk when it returns, unless that takes longer than timeout_s,
        or the disk hangs anyway; then the next opening has to look harder."""
        try:
            async with asyncio.timeout(0.1 if self._writer.longest_s > self._state.stuck_s / 2 else timeout_s):
                await self._writer.run(self._disk.close)
        except (DistServeError, TimeoutError) as e:
            log.warning("the disk tier was not closed well: %s", str(e) or "it did not answer in time")
        finally:
            self._readers.close()
            self._writer.close()

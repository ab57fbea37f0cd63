"""Blocks from memory to disk, in the background: soon after they came (write-through), or when memory is short."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

import numpy as np

from distserve.errors import DiskFailed, DiskFull, DistServeError
from distserve_kvstore.columns import Entries
from distserve_kvstore.disk import Record
from distserve_kvstore.disk_io import DiskIo
from distserve_kvstore.holdings import Holdings
from distserve_kvstore.tier_state import TierState

log = logging.getLogger(__name__)

WRITE_BYTES = 8 << 20  # in one append, about
_REFUSALS = (DiskFull, DiskFailed)  # not a block's fault
_RETRY_S = 0.5  # between two looks at a disk that is in trouble


class WriteBack:
    """A queue of dirty entries, written in order, parents before children, one append at a time. Belongs to the event
    loop, on which nothing here waits but run() and flush()."""

    def __init__(self, holdings: Holdings, disk: DiskIo, state: TierState, *, write_through: bool) -> None:
        self._holdings = holdings
        self._disk = disk
        self._state = state
        self._write_through = write_through
        self._most = self._batch  # blocks in the next append
        self._queue: deque[int] = deque()
        self._queued: set[int] = set()
        self._wake = asyncio.Event()
        self.on_full: Callable[[], None] = lambda: None  # the disk takes no more until others have gone
        self.room = asyncio.Event()  # to be set when some have
        self.progress = asyncio.Event()  # set after every append
        self._append: asyncio.Future[DistServeError | None] | None = None  # under way

    def __len__(self) -> int:
        return len(self._queued)

    @property
    def _batch(self) -> int:
        """Blocks of one append: what compaction leaves room for on a small disk, too, a part of a segment."""
        most_bytes = min(WRITE_BYTES, self._disk.stats.capacity_bytes // 32)
        return max(1, most_bytes // self._holdings.arena.block_bytes)

    def dirty(self, entries: Entries) -> None:
        """They came."""
        if self._write_through:
            self.add(entries)

    def add(self, entries: Entries) -> None:
        """Write these, children after parents as given here. Those that are queued stay where they are."""
        new = [e for e in entries.tolist() if e not in self._queued]
        self._queue.extend(new)
        self._queued.update(new)
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            if not self._queue:
                self._wake.clear()
                await self._wake.wait()
            if self._state.trouble("write"):
                await asyncio.sleep(_RETRY_S)
                continue
            if (room := self._disk.num_free) <= 0:
                await self._wait_for_room()
                continue
            await self._write(self._take(min(room, self._most)))
            self.progress.set()

    async def flush(self) -> None:
        """All that is dirty is on disk when it returns. It returns at once when the disk is in trouble. Its caller has
        a deadline."""
        index = self._holdings.index
        entries = index.entries()
        dirty = entries[self._holdings.dirty(entries)]
        self.add(dirty[np.argsort(index.depth[dirty], kind="stable")])
        while self._queued and not self._state.trouble("write"):
            await self.wait_for_progress()

    async def settled(self) -> DistServeError | None:
        """When the append that is under way now has ended, and what of it was deleted meanwhile is forgotten for good;
        or why it isn't yet. Takes as long as the disk does."""
        return None if self._append is None else await asyncio.shield(self._append)

    async def wait_for_progress(self) -> bool:
        """Until an append has ended, well or not, or for _RETRY_S: then False."""
        self.progress.clear()
        return await _is_set(self.progress)

    async def _wait_for_room(self) -> None:
        """A disk that holds as much as it may is no disk in trouble."""
        self.room.clear()
        self.on_full()
        await _is_set(self.room)
        await self._disk.look()

    def _take(self, most: int) -> Entries:
        """The next ones that are still dirty, held."""
        taken: list[int] = []
        index = self._holdings.index
        while self._queue and len(taken) < most:
            entry = self._queue.popleft()
            is_dirty = index.dram[entry] >= 0 and index.disk[entry] < 0 and index.depth[entry] >= 0
            if is_dirty and entry not in self._holdings.doomed:
                taken.append(entry)
            else:
                self._queued.discard(entry)
        entries = np.asarray(taken, np.int32)
        self._holdings.pins.hold(entries)
        return entries

    async def _write(self, entries: Entries) -> None:
        if not len(entries):
            return
        holdings = self._holdings
        self._append = asyncio.get_running_loop().create_future()
        not_forgotten: DistServeError | None = None
        try:
            places = await self._disk.append(self._records(entries))
        except DistServeError as e:
            log.info("%d blocks were not written to disk: %s", len(entries), e)
            if isinstance(e, DiskFull):
                self._refused()
            if isinstance(e, _REFUSALS):
                self._queue.extendleft(reversed(entries.tolist()))
            else:
                self._suspect(entries, e)
        except BaseException:
            self._queue.extendleft(reversed(entries.tolist()))
            raise
        else:
            self._most = min(2 * self._most, self._batch)
            not_forgotten = await self._landed(entries, np.asarray(places, np.int64))
        finally:
            self._append.set_result(not_forgotten)
            self._append = None
            holdings.pins.unhold(entries)

    def _suspect(self, entries: Entries, error: DistServeError) -> None:
        """It is one of the blocks that can't be written, not the disk: each alone from here on, and that one not at
        all, since it would be tried again for ever."""
        self._state.try_again("write")
        if len(entries) > 1:
            self._most = 1
            self._queue.extendleft(reversed(entries.tolist()))
            return
        log.warning("a block can't be written to disk and is dropped: %s", error)
        self._queued.difference_update(entries.tolist())
        self._holdings.doomed.add(entries)
        self._holdings.remove_doomed(entries)

    def _refused(self) -> None:
        """An append is all or nothing: what is left may hold half of it."""
        self.on_full()
        if self._most > 1:
            self._most //= 2
            self._state.try_again("write")

    async def _landed(
        self, entries: Entries, places: np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> DistServeError | None:
        """What was deleted meanwhile is deleted there too; or why it isn't yet."""
        alive = ~self._holdings.doomed.among(entries)
        self._holdings.enter(entries[alive], "disk", places[alive])
        self._queued.difference_update(entries.tolist())
        try:
            await self._disk.forget(places[~alive].tolist())
        except DistServeError as e:
            return e
        return None

    def _records(self, entries: Entries) -> list[Record]:
        index = self._holdings.index
        names = self._conversations_of(entries)
        return [
            Record(
                hash=index.hash_of(entry),
                parent=index.parent_hash_of(entry),
                depth=int(index.depth[entry]),
                tenant=index.tenant_of(entry),
                conversation=name,
                payload=self._holdings.arena.row(int(index.dram[entry])),
            )
            for entry, name in zip(entries.tolist(), names, strict=True)
        ]

    def _conversations_of(self, entries: Entries) -> list[str]:
        """Of each, one that runs through it: found once for neighbours, of which the last is asked."""
        index = self._holdings.index
        names = [""] * len(entries)
        name, below = "", -1
        for i in range(len(entries) - 1, -1, -1):
            entry = int(entries[i])
            if below < 0 or index.parent[below] != entry:
                name = index.conversations.through(entry)
            names[i], below = name, entry
        return names


async def _is_set(event: asyncio.Event) -> bool:
    try:
        async with asyncio.timeout(_RETRY_S):
            return await event.wait()
    except TimeoutError:
        return False

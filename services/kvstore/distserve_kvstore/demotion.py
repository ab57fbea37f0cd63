"""What leaves a tier that is nearly full, in the background: from memory to disk, from disk to objects, from the last
one to nowhere. Never waited for by a lookup or a heartbeat."""

from __future__ import annotations

import asyncio
import logging

import numpy as np

from distserve.errors import DistServeError
from distserve.messages import Tier
from distserve_kvstore.archive import Archive
from distserve_kvstore.disk_io import DiskIo
from distserve_kvstore.holdings import Holdings
from distserve_kvstore.tier_state import TierState
from distserve_kvstore.write_back import WriteBack

log = logging.getLogger(__name__)

_SLICE = 256  # blocks that are moved before the loop serves others
_PAUSE_S = 0.5  # when nothing could be moved


class Watermarks:
    """With hysteresis: above `high` a tier is emptied until it is at `low`. In parts of its capacity."""

    def __init__(self, low: float, high: float) -> None:
        self._low, self._high = min(low, high), high
        self._emptying = False

    def begin(self) -> None:
        """Whatever it looks like: empty it to the low mark."""
        self._emptying = True

    def excess(self, used: int, capacity: int) -> int:
        """How much must go now; 0 while all is well."""
        if used > self._high * capacity:
            self._emptying = True
        if used <= self._low * capacity:
            self._emptying = False
        return used - int(self._low * capacity) if self._emptying else 0


class Demotion:
    """Belongs to the event loop."""

    def __init__(
        self,
        holdings: Holdings,
        states: dict[Tier, TierState],
        *,
        low: float,
        high: float,
        disk: DiskIo | None,
        write_back: WriteBack | None,
        archive: Archive | None,
    ) -> None:
        self._holdings = holdings
        self._states = states
        self._marks = {"dram": Watermarks(low, high), "disk": Watermarks(low, high)}
        self._last_resort = (1 + high) / 2  # part of the disk beyond which blocks go even if no object takes them
        self._disk = disk
        self._write_back = write_back
        self._archive = archive
        self._wake = {"dram": asyncio.Event(), "disk": asyncio.Event()}
        self._compacting = asyncio.Lock()

    def wake(self, tier: Tier) -> None:
        """Something came into it, or time has passed."""
        if tier in self._wake:
            self._wake[tier].set()

    def disk_full(self) -> None:
        """It has refused a block: it needs room beside what is counted (others' files, dead blocks)."""
        self._marks["disk"].begin()
        self._wake["disk"].set()

    def may_drop_dirty(self) -> bool:
        """No tier below memory takes anything now."""
        disk = self._write_back is not None and not self._states["disk"].failing("write")
        objects = self._archive is not None and not self._states["object"].failing("write")
        return not disk and not objects

    async def run_memory(self) -> None:
        """Until cancelled."""
        arena = self._holdings.arena
        while True:
            await self._wake["dram"].wait()
            self._wake["dram"].clear()
            while excess := self._marks["dram"].excess(self._holdings.num_blocks["dram"], arena.num_blocks):
                n = min(excess, _SLICE)
                if self._holdings.evict_memory(n, "watermark") < n and not await self._push_down(n):
                    await asyncio.sleep(_PAUSE_S)
                await asyncio.sleep(0)

    async def _push_down(self, n: int) -> bool:
        """Have victims written to a lower tier, so that they can go. Whether anything may have changed."""
        victims = self._holdings.policy.victims(n, "dram")
        dirty = victims[self._holdings.dirty(victims)]
        if not len(dirty):
            return False
        if self._write_back is not None and not self._states["disk"].trouble("write"):
            self._write_back.add(dirty[np.argsort(self._holdings.index.depth[dirty], kind="stable")])
            return await self._write_back.wait_for_progress()
        if self._archive is not None and not self._states["object"].trouble("write"):
            return len(await self._archive.put(dirty)) > 0
        return True  # may_drop_dirty() lets them go

    async def run_disk(self) -> None:
        """Until cancelled."""
        while True:
            await self._wake["disk"].wait()
            self._wake["disk"].clear()
            if self._disk is None:
                continue
            while excess := self._marks["disk"].excess(self._holdings.num_blocks["disk"], self._capacity()):
                if not await self.shrink_disk(min(excess, _SLICE), "watermark"):
                    break  # nothing can go at the moment
            await self.compact()
            if self._write_back is not None:
                self._write_back.room.set()

    async def shrink_disk(self, n: int, reason: str, *, archive: bool = True) -> int:
        """Let up to `n` blocks go from disk, with `archive` into objects where there are any. How many went."""
        holdings = self._holdings
        victims = holdings.policy.victims(n, "disk")
        victims = holdings.without(victims, holdings.doomed.among(victims))  # those are forgotten, not only freed
        if not len(victims):
            return 0
        if self._archive is not None and archive:
            if not self._states["object"].trouble("write"):
                names = holdings.index.hashes_of(victims)
                await self._archive.put(victims)
                # Some may have been deleted meanwhile, and their numbers given to others.
                entries = holdings.index.find(names)
                same = entries == victims
                victims = victims[same & (holdings.index.disk[victims] >= 0)]
            full = holdings.num_blocks["disk"] > self._last_resort * self._capacity()
            if not full:
                victims = holdings.without(victims, holdings.index.object[victims] < 0)
            # While they were being archived somebody may have found some.
            victims = holdings.without(victims, holdings.index.num_pins[victims] > 0)
        holdings.leave(victims, "disk", reason)
        await asyncio.sleep(0)
        return len(victims)

    async def compact(self) -> None:
        """Give the space of what went back, slice by slice: also, and above all, of a disk that is full. Never raises
        for the disk's faults."""
        if self._disk is None or self._states["disk"].trouble("read"):
            return
        async with self._compacting:
            before = self._disk.stats.file_bytes
            try:
                while await self._disk.compact():
                    pass
                if self._disk.stats.file_bytes < before:
                    self._states["disk"].try_again("write")
            except DistServeError as e:
                self._states["disk"].num_errors += 1
                log.warning("compaction stopped: %s", e)

    def _capacity(self) -> int:
        return 0 if self._disk is None else self._disk.stats.usable_blocks

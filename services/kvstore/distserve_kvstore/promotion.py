"""Blocks from disk and objects into memory, because somebody waits for them: several reads at once, each bounded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from distserve.errors import BlockDamaged, BlocksMissing, DistServeError
from distserve.messages import Tier
from distserve_kvstore.holdings import Holdings
from distserve_kvstore.tier_state import TierState

log = logging.getLogger(__name__)

READ_BYTES = 8 << 20  # in one call, about: enough for a disk to stream, little enough that several run at once


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block to be read: its name, its place in the tier, and its depth in the chain."""

    hash: bytes
    place: int
    depth: int


class Source(Protocol):
    """A tier that blocks are read from."""

    async def read(self, blocks: Sequence[Wanted], into: Sequence[memoryview]) -> list[DistServeError | None]:
        """Each block into its buffer, verified: None; else what is wrong, BlockDamaged and BlocksMissing for what is
        lost for good. Raises DistServeError if the tier can't be read at all. It must not be cancelled: a thread goes
        on writing into `into` all the same."""


class Promotion:
    """Belongs to the event loop. A read that hangs keeps its rows and its entries' pins until it returns, however long;
    nobody else is held up by it."""

    def __init__(self, holdings: Holdings, sources: Mapping[Tier, Source], states: Mapping[Tier, TierState]) -> None:
        self._holdings = holdings
        self._sources = sources
        self._states = states
        self._coming: dict[int, asyncio.Future[bool]] = {}  # entry -> whether it came
        self._reads: dict[asyncio.Task[None], int] = {}  # -> rows that it owns
        self._block_bytes = holdings.arena.block_bytes

    @property
    def num_blocks(self) -> int:
        """Rows of the arena that reads own."""
        return sum(self._reads.values())

    def bring(self, entries: Sequence[int]) -> list[asyncio.Future[bool]]:
        """Of each entry, in order, whether it is in memory, once that is known. The caller holds the entries, or they
        may be gone again by then. What finds no room, or can't be read at the moment, is False at once. The futures are
        shared: wait for them with asyncio.wait(), which cancels none."""
        index = self._holdings.index
        absent = [
            e for e, row in zip(entries, index.dram[np.asarray(entries, np.int32)].tolist(), strict=True) if row < 0
        ]
        readable: dict[int, Tier] = {}
        for e in absent:
            if e not in self._coming and (tier := self._tier_of(e)) is not None:
                readable[e] = tier
        room = self._holdings.make_room(len(readable))
        taken = list(readable)[:room]
        for tier in self._sources:
            for part in self._parts([e for e in taken if readable[e] == tier]):
                self._start(tier, part)
        loop = asyncio.get_running_loop()
        here, nowhere = loop.create_future(), loop.create_future()
        here.set_result(True)
        nowhere.set_result(False)
        missing = set(absent)
        return [self._coming.get(e, nowhere) if e in missing else here for e in entries]

    def _tier_of(self, entry: int) -> Tier | None:
        for tier in self._sources:
            if self._holdings.column(tier)[entry] >= 0 and not self._states[tier].trouble("read"):
                return tier
        return None

    def _parts(self, entries: list[int]) -> Iterator[list[int]]:
        step = max(1, READ_BYTES // self._block_bytes)
        for i in range(0, len(entries), step):
            yield entries[i : i + step]

    def _start(self, tier: Tier, entries: list[int]) -> None:
        rows = self._holdings.arena.allocate(len(entries))
        loop = asyncio.get_running_loop()
        for e in entries:
            self._coming[e] = loop.create_future()
        # From here on, not from the task's first step: nothing may take them in between.
        self._holdings.pins.hold(np.asarray(entries, np.int32))
        task = asyncio.create_task(self._read(tier, entries, rows), name=f"read {len(entries)} from {tier}")
        self._reads[task] = len(rows)
        task.add_done_callback(self._reads.pop)

    async def _read(self, tier: Tier, entries: list[int], rows: list[int]) -> None:
        holdings, state = self._holdings, self._states[tier]
        numbers = np.asarray(entries, np.int32)
        places = holdings.column(tier)[numbers].tolist()
        depths = holdings.index.depth[numbers].tolist()
        blocks = [Wanted(holdings.index.hash_of(e), p, d) for e, p, d in zip(entries, places, depths, strict=True)]
        errors: Sequence[DistServeError | None]
        try:
            errors = await self._sources[tier].read(blocks, [holdings.arena.row(r) for r in rows])
        except DistServeError as error:
            errors = [error] * len(entries)
        except Exception as error:  # a read that fails must neither lose rows nor leave anybody waiting
            log.exception("%d blocks could not be read from the %s tier", len(entries), tier)
            errors = [DistServeError(f"{type(error).__name__}: {error}")] * len(entries)
        if bad := [e for e in errors if e is not None]:
            log.warning("%d of %d blocks did not come from the %s tier: %s", len(bad), len(entries), tier, bad[0])
        state.num_read += len(entries) - len(bad)
        task = asyncio.current_task()
        if task is not None:
            self._reads[task] = 0  # the rows are counted elsewhere from here on
        for entry, row, place, problem in zip(entries, rows, places, errors, strict=True):
            self._landed(tier, entry, row, place, problem)
        for e in entries:
            self._coming.pop(e).set_result(bool(holdings.index.dram[e] >= 0))
        holdings.pins.unhold(numbers)

    def _landed(self, tier: Tier, entry: int, row: int, place: int, error: DistServeError | None) -> None:
        holdings = self._holdings
        one = np.asarray([entry], np.int32)
        if error is None and holdings.index.dram[entry] < 0 and entry not in holdings.doomed:
            holdings.enter(one, "dram", [row])
            return
        holdings.arena.free([row])
        # Deleted before the read began it has no place, and has left the tier already.
        if isinstance(error, BlockDamaged | BlocksMissing) and place >= 0 and holdings.column(tier)[entry] == place:
            holdings.leave(one, tier, "damaged")

"""A store node's tiers without its doors: real memory, real files, faults on demand."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np

from distserve.bus.base import Bus
from distserve.errors import DiskFailed
from distserve.kv.hashing import pack
from distserve.messages import Tier
from distserve_kvstore.archive import Archive
from distserve_kvstore.arena import Arena
from distserve_kvstore.columns import Entries
from distserve_kvstore.deletions import Deletions
from distserve_kvstore.disk import DiskOptions, DiskTier, Record, RecoveredRun
from distserve_kvstore.disk_io import DiskIo
from distserve_kvstore.eviction import make_policy
from distserve_kvstore.grants import Grants
from distserve_kvstore.holdings import Holdings
from distserve_kvstore.index import BlockIndex
from distserve_kvstore.object_io import ObjectIo
from distserve_kvstore.objects import ObjectOptions, ObjectTier
from distserve_kvstore.offers import Owner, Piece
from distserve_kvstore.promotion import Promotion
from distserve_kvstore.replication import Replication
from distserve_kvstore.tier_state import TierState
from distserve_kvstore.write_back import WriteBack
from tests.contracts.transport.pools import SMALL

ROOT = bytes(32)
OPTIONS = DiskOptions(capacity_bytes=64 << 20, segment_bytes=1 << 20, min_free_fraction=0.0)
TIERS: tuple[Tier, ...] = ("dram", "disk", "object")


def names(*numbers: int) -> bytes:
    return pack([n.to_bytes(32, "little") for n in numbers])


class FaultyDisk:
    """A disk tier that can't note what is forgotten while `refuses` is set, and appends nothing while `gate` is
    shut."""

    def __init__(self, disk: DiskTier) -> None:
        self._disk = disk
        self.refuses = False
        self._sync = disk._journal.sync
        disk._journal.sync = self._refuse_or_sync  # type: ignore[method-assign]
        self.gate = threading.Event()
        self.gate.set()
        self.num_appends = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    def append(self, records: Sequence[Record]) -> list[int]:
        self.num_appends += 1
        assert self.gate.wait(30)
        return self._disk.append(records)

    def _refuse_or_sync(self) -> None:
        if self.refuses:
            raise DiskFailed("no, says the test", path="/", operation="write", errno=5)
        self._sync()


class Parts:
    def __init__(self, folder: Path, *, num_rows: int = 64, write_through: bool = True) -> None:
        self.folder = folder
        self.arena = Arena(SMALL, num_rows)
        index = BlockIndex(256)
        policy = make_policy("lru", index, dict.fromkeys(TIERS, 10_000), 0.25)
        self.states: dict[Tier, TierState] = {tier: TierState(tier) for tier in TIERS}
        self.holdings = Holdings(self.arena, index, policy, self.states)
        tier, _ = DiskTier.open(folder / "disk", SMALL, OPTIONS)
        self.faults = FaultyDisk(tier)
        self.disk = DiskIo(cast(DiskTier, self.faults), self.states["disk"])
        self.holdings.free_places = self.disk.free
        self.holdings.may_drop_dirty = lambda: False
        self.write_back = WriteBack(self.holdings, self.disk, self.states["disk"], write_through=write_through)
        self.holdings.on_dirty = self.write_back.dirty
        url = f"file://{folder}/objects"
        self.objects = ObjectIo(ObjectTier.open(url, SMALL, ObjectOptions()), self.states["object"])
        self.archive = Archive(self.holdings, self.objects, self.disk)
        self.grants = Grants(
            self.holdings,
            {},
            choose=cast(Any, None),
            in_use=cast(Any, None),
            ttl_s=1.0,
            max_leases=4,
            max_stale_slots=0,
        )
        self.replication = Replication(
            cast(Bus, None),
            "kvstore-me",
            self.holdings,
            Promotion(self.holdings, {}, self.states),
            {},
            peers=list,
            replicas=1,
            request_timeout_s=1.0,
        )
        self.deletions = Deletions(
            self.holdings,
            self.grants,
            self.replication,
            disk=self.disk,
            write_back=self.write_back,
            objects=self.objects,
            archive=self.archive,
        )

    def adopt(self, *numbers: int, owner: Owner = Owner("t", "c"), parent: bytes = ROOT, start: int = 0) -> Entries:
        rows = self.arena.allocate(len(numbers))
        for n, row in zip(numbers, rows, strict=True):
            np.frombuffer(self.arena.row(row), np.uint8)[:] = n % 251
        self.holdings.adopt(Piece(parent, start, names(*numbers), rows), owner, 0.0)
        return self.holdings.index.find(names(*numbers))

    def found_on_disk(self) -> list[RecoveredRun]:
        """By the next one to open the folder, which must be free."""
        tier, runs = DiskTier.open(self.folder / "disk", SMALL, OPTIONS)
        tier.close()
        return runs


@asynccontextmanager
async def parts(folder: Path, **settings: Any) -> AsyncIterator[Parts]:
    made = Parts(folder, **settings)
    try:
        yield made
        made.holdings.check()
        assert made.arena.num_used == made.holdings.num_blocks["dram"]
    finally:
        made.faults.gate.set()
        await made.disk.close(5.0)
        await made.objects.close()
        made.arena.close()

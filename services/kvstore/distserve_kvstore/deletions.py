"""Deletion of a conversation's blocks, or of all of a tenant's: hidden at once, then out of every tier, for good."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterator

import numpy as np

from distserve.errors import DistServeError
from distserve_kvstore.archive import Archive
from distserve_kvstore.columns import Entries
from distserve_kvstore.disk_io import DiskIo
from distserve_kvstore.doomed import Removed
from distserve_kvstore.grants import Grants
from distserve_kvstore.holdings import Holdings
from distserve_kvstore.object_io import ObjectIo
from distserve_kvstore.replication import Replication
from distserve_kvstore.write_back import WriteBack

log = logging.getLogger(__name__)

SLICE = 512  # blocks that are removed before the loop serves others: a few milliseconds

Name = tuple[str, str]  # tenant, conversation; "" for the second: all of the tenant's


class Deletions:
    """Belongs to the event loop. What disk or object store has not taken yet is tried again by them; who asks for the
    same once more is told "done" only when they have."""

    def __init__(
        self,
        holdings: Holdings,
        grants: Grants,
        replication: Replication,
        *,
        disk: DiskIo | None,
        write_back: WriteBack | None,
        objects: ObjectIo | None,
        archive: Archive | None,
    ) -> None:
        self._holdings = holdings
        self._grants = grants
        self._replication = replication
        self._disk = disk
        self._write_back = write_back
        self._objects = objects
        self._archive = archive
        self._under_way: dict[asyncio.Task[list[DistServeError]], Name] = {}
        self._unsure: dict[Name, DistServeError] = {}  # why it wasn't for good
        # What was found in the object store before must not come back by the list that is still being read.
        self._during_listing: set[Name] | None = None if objects is None else set()

    async def delete(self, tenant: str, conversation: str = "") -> int:
        """How many blocks went. They are found no more from the first step on, and gone for good when it returns.
        Raises DiskFailed, DiskFull, ObjectStoreDown where that is not sure yet."""
        name = (tenant, conversation)
        if self._during_listing is not None:
            self._during_listing.add(name)
        self._grants.owner_gone(tenant, conversation)
        self._replication.cancel(tenant, conversation)
        entries = self._doom(name)
        # From here on: a put that ends while names and blocks are forgotten may leave an object behind.
        puts = None if self._archive is None else asyncio.create_task(self._archive.settled(), name="puts")
        removed = await self._remove(name, entries)
        for_good = asyncio.create_task(
            self._for_good(removed, puts), name=f"delete {removed.num_blocks} blocks for good"
        )
        self._under_way[for_good] = name
        for_good.add_done_callback(self._ended)
        mine = [task for task, other in self._under_way.items() if _overlap(name, other)]
        await asyncio.wait(mine)
        if errors := for_good.result():
            raise errors[0]
        await self._make_sure(name)
        return removed.num_blocks

    def was_deleted(self, tenant: str, conversation: str) -> bool:
        """Since the node began to list the objects, and while it still does."""
        return any(_overlap((tenant, conversation), name) for name in self._during_listing or ())

    def listing_ended(self) -> None:
        """Every object that there was has been seen."""
        self._during_listing = None

    def settle(self) -> None:
        """Something may have been tried again, with success."""
        if not self._num_unsure():
            self._unsure.clear()

    def _doom(self, name: Name) -> Entries:
        """They are found no more."""
        index, (tenant, conversation) = self._holdings.index, name
        entries = index.conversations.deletable(tenant, conversation) if conversation else index.of_tenant(tenant)
        self._holdings.doomed.add(entries)
        return entries

    async def _remove(self, name: Name, entries: Entries) -> Removed:
        """Out of the index, slice by slice."""
        holdings, index = self._holdings, self._holdings.index
        await self._forget_names(name)
        num, places, objects = 0, list[int](), set[int]()
        for part in _slices(entries):
            done = holdings.remove_doomed(part)
            num += done.num_blocks
            places += done.places
            objects.update(done.objects)
            await asyncio.sleep(0)
        if objects:
            # An object is deleted whole: the other blocks in it are there no more either.
            everything = index.entries()
            also = everything[np.isin(index.object[everything], list(objects))]
            holdings.leave(index.deepest_first(also), "object", "deleted")
        return Removed(num, places, sorted(objects))

    async def _forget_names(self, name: Name) -> None:
        conversations = self._holdings.index.conversations
        if name[1]:
            conversations.forget(*name)
            return
        since = 0
        for one in conversations.of_tenant(name[0]):
            since += one.num_blocks
            conversations.forget(one.tenant, one.name)
            if since >= SLICE:
                since = 0
                await asyncio.sleep(0)

    async def _for_good(
        self, removed: Removed, puts: asyncio.Task[DistServeError | None] | None
    ) -> list[DistServeError]:
        """Disk and objects at once, also where one of them fails. puts: those of it that were under way."""
        calls: list[Awaitable[DistServeError | None]] = []
        # What of it was just being written or put is forgotten there.
        if self._write_back is not None:
            calls.append(self._write_back.settled())
        if puts is not None:
            calls.append(puts)
        if self._disk is not None:
            calls.append(self._disk.forget(removed.places))
        if self._objects is not None:
            calls.append(self._objects.delete(removed.objects))
        results = await asyncio.gather(*calls, return_exceptions=True)
        for error in results:
            if error is not None and not isinstance(error, DistServeError):
                raise error
        return [e for e in results if isinstance(e, DistServeError)]

    def _ended(self, task: asyncio.Task[list[DistServeError]]) -> None:
        name = self._under_way.pop(task)
        if not task.cancelled() and task.exception() is None and (errors := task.result()):
            self._unsure[name] = errors[0]

    async def _make_sure(self, name: Name) -> None:
        """What failed before of the same: raises its error while it has not worked."""
        failed = [other for other in self._unsure if _overlap(name, other)]
        if not failed:
            return
        if self._disk is not None:
            await self._disk.retry()
        if self._objects is not None:
            await self._objects.retry()
        self.settle()
        if failed[0] in self._unsure:
            raise self._unsure[failed[0]]

    def _num_unsure(self) -> int:
        on_disk = 0 if self._disk is None else self._disk.num_to_forget
        return on_disk + (0 if self._objects is None else self._objects.num_to_delete)


def _overlap(a: Name, b: Name) -> bool:
    return a[0] == b[0] and (a[1] == b[1] or not a[1] or not b[1])


def _slices(entries: Entries) -> Iterator[Entries]:
    for i in range(0, len(entries), SLICE):
        yield entries[i : i + SLICE]

"""What is done again and again: collecting what has run out, trying again what failed, looking the disk over."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import numpy as np

from distserve.errors import BlockDamaged, BlocksMissing, DiskFailed, DistServeError
from distserve_kvstore.disk_io import DiskIo
from distserve_kvstore.holdings import Holdings
from distserve_kvstore.index import BlockIndex
from distserve_kvstore.promotion import Wanted

if TYPE_CHECKING:
    from distserve_kvstore.node import Node

log = logging.getLogger(__name__)

VERIFY_BYTES = 8 << 20  # read in one call
_COLD_S = 10.0


async def collect(node: Node, interval_s: float) -> None:
    """Until cancelled: leases, pins and stale slots that have run out, pinned conversations whose time is over, tiers
    whose state has changed. Nothing in it waits for I/O."""
    cold_at = 0.0
    while True:
        await asyncio.sleep(interval_s)
        now = time.monotonic()
        node.grants.collect(now)
        node.holdings.pins.expire(now)
        node.holdings.index.conversations.expire(now)
        for state in node.states.values():
            state.say()
        node.demotion.wake("dram")
        node.demotion.wake("disk")
        if now >= cold_at:
            node.heat.forget_cold(now)
            cold_at = now + _COLD_S


async def retry(node: Node, interval_s: float) -> None:
    """Until cancelled: deletions that a disk or an object store has not taken. Waits for them as long as they take."""
    while True:
        await asyncio.sleep(max(1.0, interval_s))
        if node.disk is not None:
            await node.disk.retry()
        if node.objects is not None:
            await node.objects.retry()
        node.deletions.settle()


async def restore_objects(node: Node) -> None:
    """What the object store has of this layout, into the index; goes on where it was when the store is back."""
    if node.objects is None:
        return
    after, num = "", 0
    while True:
        try:
            async for header in node.objects.tier.headers(after=after):
                after = header.name
                try:
                    num += restore(
                        node,
                        header.name,
                        header.hashes,
                        header.parent,
                        header.start,
                        header.tenant,
                        header.conversation,
                    )
                except Exception:  # whatever one object says, it must not keep the others out, nor end the node
                    log.exception("object %s is left out", header.name)
            break
        except DistServeError as e:
            log.warning("the object store can't be listed now: %s", e)
            await asyncio.sleep(max(1.0, node.objects.tier.down_for_s))
    node.deletions.listing_ended()
    if num:
        log.info("%d blocks found in the object store", num)


def restore(
    node: Node, name: str, hashes: tuple[bytes, ...], parent: bytes, start: int, tenant: str, conversation: str
) -> int:
    """An object that was found. How many of its blocks were not known to be in one."""
    assert node.objects is not None
    index = node.holdings.index
    number = node.objects.number_of(name, start)
    if node.deletions.was_deleted(tenant, conversation) and not _is_known(index, b"".join(hashes), number):
        node.objects.delete_soon([number])
        return 0
    try:
        entries = index.insert(b"".join(hashes), parent, start, tenant, conversation)
    except DistServeError as e:
        log.warning("object %s is left out: %s", name, e)
        return 0
    fresh = entries[(index.object[entries] < 0) & ~node.holdings.doomed.among(entries)]
    node.holdings.enter(fresh, "object", [number] * len(fresh))
    return len(fresh)


def _is_known(index: BlockIndex, hashes: bytes, number: int) -> bool:
    """It was put there after the deletion, by this node."""
    entries = index.find(hashes)
    return bool((index.object[entries[entries >= 0]] == number).any())


async def verify_disk(holdings: Holdings, disk: DiskIo) -> tuple[int, int, int]:
    """(good, damaged, unreadable). Others' reads go on beside it."""
    index = holdings.index
    entries = index.entries()
    on_disk = entries[index.disk[entries] >= 0]
    names = [index.hash_of(e) for e in on_disk[np.argsort(index.disk[on_disk])].tolist()]
    step = max(1, VERIFY_BYTES // holdings.arena.block_bytes)
    buffer = np.empty((step, holdings.arena.block_bytes), np.uint8)
    good = damaged = unreadable = 0
    for i in range(0, len(names), step):
        entries = index.find(b"".join(names[i : i + step]))
        entries = entries[entries >= 0]
        entries = entries[index.disk[entries] >= 0]  # some may have left meanwhile
        holdings.pins.hold(entries)
        try:
            places = index.disk[entries].tolist()
            depths = index.depth[entries].tolist()
            wanted = [Wanted(index.hash_of(e), p, d) for e, p, d in zip(entries.tolist(), places, depths, strict=True)]
            try:
                errors = await disk.read(wanted, [row.data for row in buffer[: len(wanted)]])
            except DiskFailed as e:  # none of them could be read
                errors = [e] * len(wanted)
            for entry, place, error in zip(entries.tolist(), places, errors, strict=True):
                good += error is None
                unreadable += error is not None and not isinstance(error, BlockDamaged | BlocksMissing)
                if isinstance(error, BlockDamaged | BlocksMissing) and index.disk[entry] == place:
                    damaged += 1
                    holdings.leave(np.asarray([entry], np.int32), "disk", "damaged")
        finally:
            holdings.pins.unhold(entries)
    return good, damaged, unreadable

"""A store node of one layout: its parts, and what touches several of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from distserve.errors import KVError
from distserve.kv.placement import SEGMENT_BLOCKS
from distserve.messages import (
    ConversationStats,
    DeleteRequest,
    Endpoint,
    KVLayout,
    Load,
    PinRequest,
    PrefixReply,
    PrefixRequest,
    StoreDone,
    StoreList,
    StoreListRequest,
    StorePruneRequest,
    StoreStats,
    StoreVerified,
    Tier,
    TierStats,
    TouchRequest,
    UnpinRequest,
)
from distserve.transport.base import Commit
from distserve.worker.data_plane import DataPlane
from distserve_kvstore.archive import Archive
from distserve_kvstore.deletions import Deletions
from distserve_kvstore.demotion import Demotion
from distserve_kvstore.disk_io import DiskIo
from distserve_kvstore.fetches import Fetches
from distserve_kvstore.grants import Grants
from distserve_kvstore.heat import Heat
from distserve_kvstore.holdings import Holdings
from distserve_kvstore.lookups import Lookups
from distserve_kvstore.object_io import ObjectIo
from distserve_kvstore.offers import require_short
from distserve_kvstore.promotion import Promotion
from distserve_kvstore.replication import Replication
from distserve_kvstore.tier_state import TierState
from distserve_kvstore.upkeep import verify_disk
from distserve_kvstore.write_back import WriteBack

log = logging.getLogger(__name__)

_PRUNE_SLICE = 256


@dataclass(slots=True, eq=False)
class Node:
    """Made by assembly.open_node(). Belongs to the event loop."""

    node_id: str
    layout: KVLayout
    fingerprint: str
    holdings: Holdings
    states: Mapping[Tier, TierState]
    plane: DataPlane
    endpoints: list[Endpoint]
    grants: Grants
    lookups: Lookups
    fetches: Fetches
    promotion: Promotion
    demotion: Demotion
    replication: Replication
    deletions: Deletions
    heat: Heat
    archive: Archive | None
    write_back: WriteBack | None
    disk: DiskIo | None
    objects: ObjectIo | None
    draining: bool = False
    started_at: float = field(default_factory=time.monotonic)

    # ------------------------------------------------------------ what the bus brings

    def lookup(self, request: PrefixRequest) -> PrefixReply:
        if self.draining:  # nothing that is found now could still be fetched
            return PrefixReply(num_found=[0] * len(request.runs))
        return self.lookups.answer(request, time.monotonic())

    def touch(self, request: TouchRequest) -> StoreDone:
        num = 0
        for run in request.runs:
            entries = self.holdings.prefix(run.hashes)
            if len(entries):
                self.holdings.policy.used(entries)
            num += len(entries)
        return StoreDone(num_blocks=num)

    def pin(self, request: PinRequest) -> StoreDone:
        """Raises Overloaded over the quota; MalformedMessage for names that are too long."""
        require_short(request.tenant, request.conversation)
        until = time.monotonic() + request.ttl_s
        num = self.holdings.index.conversations.pin(request.tenant, request.conversation, until)
        self._replicate(request.tenant, request.conversation)
        return StoreDone(num_blocks=num)

    def _replicate(self, tenant: str, name: str) -> None:
        """A pinned conversation's segments, to the nodes next in rank."""
        index = self.holdings.index
        if (one := index.conversations.get(tenant, name)) is None:
            return
        for tip in one.tips:
            chain = index.chain_from(tip)
            segments = index.depth[chain] // SEGMENT_BLOCKS
            for segment in np.unique(segments):
                part = chain[segments == segment]
                self.replication.want(index.hash_of(int(part[0])), part, "vip", name)

    def unpin(self, request: UnpinRequest) -> StoreDone:
        return StoreDone(num_blocks=self.holdings.index.conversations.unpin(request.tenant, request.conversation))

    async def delete(self, request: DeleteRequest) -> StoreDone:
        """Found no more from now on; gone from disk and objects for good when it returns. Raises DiskFailed, DiskFull,
        ObjectStoreDown where that is not sure yet: it is tried again, and a later request is answered when it is."""
        return StoreDone(num_blocks=await self.deletions.delete(request.tenant, request.conversation))

    async def prune(self, request: StorePruneRequest) -> StoreDone:
        """The coldest blocks on disk, then those in objects, until keep_blocks are left there; pinned ones stay."""
        num = 0
        holdings = self.holdings
        while (excess := self._below_memory() - request.keep_blocks) > 0 and holdings.num_blocks["disk"]:
            gone = await self.demotion.shrink_disk(min(excess, _PRUNE_SLICE), "pruned", archive=False)
            if not gone:
                break
            num += gone
        if self.objects is not None:
            touched: set[int] = set()
            try:
                while (excess := self._below_memory() - request.keep_blocks) > 0:
                    victims = holdings.policy.victims(min(excess, _PRUNE_SLICE), "object")
                    if not len(victims):
                        break
                    touched.update(holdings.leave(victims, "object", "pruned"))
                    num += len(victims)
                    await asyncio.sleep(0)
            finally:  # also what was emptied before the asker gave up: a listing would find it again
                entries = holdings.index.entries()
                used = set(np.unique(holdings.index.object[entries]).tolist())
                self.objects.delete_soon(sorted(touched - used))
        await self.demotion.compact()
        return StoreDone(num_blocks=num)

    def _below_memory(self) -> int:
        return self.holdings.num_blocks["disk"] + self.holdings.num_blocks["object"]

    async def verify(self) -> StoreVerified:
        """Reads every block on disk; what is damaged is found no more."""
        if self.disk is None:
            return StoreVerified(num_good=0, num_damaged=0)
        good, damaged, unreadable = await verify_disk(self.holdings, self.disk)
        return StoreVerified(num_good=good, num_damaged=damaged, num_unreadable=unreadable)

    # ------------------------------------------------------------ what the data plane and the registry bring

    def on_commit(self, commit: Commit) -> None:
        self.grants.commit(commit)

    def on_lost(self, lease_id: int, epoch: int, error: Exception) -> None:
        self.grants.lost(lease_id, epoch, error)

    def asker_gone(self, worker_id: str) -> None:
        """It has left the registry: what it held here ends."""
        self.grants.worker_gone(worker_id)
        self.holdings.pins.asker_gone(worker_id)
        self.plane.in_use.forget(worker_id)
        self.plane.meter.forget(worker_id)

    # ------------------------------------------------------------ what it says of itself

    @property
    def reasons(self) -> list[str]:
        """Why it is degraded."""
        return [*self.plane.reasons, *(r for state in self.states.values() for r in state.reasons)]

    def load(self) -> Load:
        arena = self.holdings.arena
        return Load(
            num_running=len(self.grants) + len(self.fetches),
            num_waiting=0 if self.write_back is None else len(self.write_back),
            free_blocks=arena.num_free,
            total_blocks=arena.num_blocks,
        )

    def stats(self) -> StoreStats:
        index = self.holdings.index
        entries = index.entries()
        return StoreStats(
            node=self.node_id,
            layout=self.fingerprint,
            num_blocks=len(index),
            num_conversations=len(index.conversations),
            num_pinned=int(((index.num_pins[entries] > 0) | (index.num_vips[entries] > 0)).sum()),
            num_leases=len(self.grants),
            num_lookups=self.lookups.num_lookups,
            num_looked_up_blocks=self.lookups.num_blocks,
            num_hit_blocks=self.lookups.num_hits,
            uptime_s=time.monotonic() - self.started_at,
            tiers={tier: self._tier_stats(tier) for tier in self.states},
        )

    def _tier_stats(self, tier: Tier) -> TierStats:
        state, num = self.states[tier], self.holdings.num_blocks[tier]
        return TierStats(
            num_blocks=num,
            num_bytes=num * self.holdings.arena.block_bytes,
            capacity_bytes=state.capacity_bytes,
            num_hits=state.num_hits,
            num_read_blocks=state.num_read,
            num_written_blocks=state.num_written,
            num_evicted=dict(state.num_evicted),
            num_errors=state.num_errors,
            state=state.state,
        )

    def list(self, request: StoreListRequest) -> StoreList:
        now = time.monotonic()
        return StoreList(
            conversations=[
                ConversationStats(
                    tenant=one.tenant,
                    conversation=one.name,
                    num_blocks=one.num_blocks,
                    idle_s=max(0.0, now - (one.used_at or self.started_at)),
                    pinned_s=max(0.0, one.pinned_until - now),
                    priority=one.priority,
                )
                for one in self.holdings.index.conversations.list(request.after, request.limit)
            ]
        )

    # ------------------------------------------------------------ the end

    async def drain(self, grace_s: float) -> None:
        """Take nothing new, let what is under way end, write to disk, or into objects where there is no disk, what is
        only in memory, and delete what is still to be deleted: in grace_s, all in all."""
        self.draining = True
        ends_at = time.monotonic() + grace_s
        await asyncio.gather(self.grants.drain(grace_s / 2), self.fetches.drain(grace_s / 2))
        await self.grants.close(timeout_s=max(0.1, (ends_at - time.monotonic()) / 2))
        try:
            async with asyncio.timeout(left_s := max(0.0, ends_at - time.monotonic())):
                await asyncio.gather(self._finish_deletions(), self._save(left_s))
        except TimeoutError:
            pass
        if left := self.num_dirty():
            log.warning("%d blocks are lost: they were in memory only, and no lower tier has taken them in time", left)

    async def _save(self, within_s: float) -> None:
        """What is only in memory: to disk, and into objects what no disk takes. Never raises for a tier's faults."""
        if self.write_back is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s if self.archive is None else within_s / 2):
                    await self.write_back.flush()
        if self.archive is not None:
            entries = self.holdings.index.entries()
            await self.archive.put(entries[self.holdings.dirty(entries)])

    async def _finish_deletions(self) -> None:
        """Those that a tier did not take before."""
        if self.disk is not None:
            await self.disk.retry()
        if self.objects is not None:
            await self.objects.retry()

    def num_dirty(self) -> int:
        """Blocks that are in memory and nowhere else."""
        return int(self.holdings.dirty(self.holdings.index.entries()).sum())

    def check(self) -> None:
        """Raises KVError unless every row of the arena has one owner and all books agree. When idle, and in tests."""
        self.holdings.check()
        self.grants.check()
        arena = self.holdings.arena
        owned = self.holdings.num_blocks["dram"] + self.grants.num_blocks + self.promotion.num_blocks
        if arena.num_used != owned:
            raise KVError(
                f"{arena.num_used} blocks of the arena are used, {owned} have an owner",
                used=arena.num_used,
                owned=owned,
            )

"""From a layout to a node that runs: what it is made of, composed in one place."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from distserve.bus.base import Bus
from distserve.config import Config
from distserve.errors import DiskFailed, DiskFull
from distserve.kv.layout import block_bytes, fingerprint
from distserve.kv.lease import first_epoch
from distserve.machine import available_bytes
from distserve.messages import KVLayout, Tier
from distserve.sizing import STORE_SHARE, in_words
from distserve.transport.base import Commit
from distserve.transport.select import choose
from distserve.worker.data_plane import plan, receivers, senders
from distserve.worker.tasks import background
from distserve_kvstore.archive import Archive
from distserve_kvstore.arena import Arena
from distserve_kvstore.deletions import Deletions
from distserve_kvstore.demotion import Demotion
from distserve_kvstore.disk import DiskOptions, RecoveredRun
from distserve_kvstore.disk_io import DiskIo
from distserve_kvstore.eviction import make_policy
from distserve_kvstore.fetches import Fetches
from distserve_kvstore.grants import Grants
from distserve_kvstore.heat import Heat
from distserve_kvstore.holdings import Holdings
from distserve_kvstore.index import BlockIndex
from distserve_kvstore.layouts import folder_of
from distserve_kvstore.lookups import Lookups
from distserve_kvstore.node import Node
from distserve_kvstore.object_io import ObjectIo
from distserve_kvstore.objects import ObjectOptions, ObjectTier
from distserve_kvstore.opening import open_disk
from distserve_kvstore.promotion import Promotion, Source
from distserve_kvstore.replication import Replication
from distserve_kvstore.restoring import restore
from distserve_kvstore.tier_state import TierState
from distserve_kvstore.upkeep import collect, restore_objects, retry
from distserve_kvstore.write_back import WriteBack

log = logging.getLogger(__name__)

CLOSE_S = 5.0  # for the disk, beyond the grace time
_INDEX_ENTRIES = 1 << 16  # room beyond what memory and disk hold, for blocks that are in objects alone


def dram_blocks(config: Config, layout: KVLayout, free_bytes: int) -> int:
    return (config.kvstore.dram_bytes or int(free_bytes * STORE_SHARE)) // block_bytes(layout)


@asynccontextmanager
async def open_node(
    config: Config,
    layout: KVLayout,
    node_id: str,
    bus: Bus,
    *,
    peers: Callable[[], Sequence[str]],
) -> AsyncIterator[Node]:
    """Runs while inside; drain() it before leaving. Raises ConfigError: a folder that another node has, memory that
    can't be had, a transport that is forced and can't be."""
    settings = config.kvstore
    async with AsyncExitStack() as stack:
        arena = Arena(layout, dram_blocks(config, layout, available_bytes()))
        stack.callback(arena.close)
        states: dict[Tier, TierState] = {"dram": TierState("dram", capacity_bytes=arena.num_blocks * arena.block_bytes)}
        disk, recovered = await _open_disk(config, layout, node_id, states)
        if disk is not None:
            stack.push_async_callback(disk.close, timeout_s=min(CLOSE_S, settings.drain_s))
        objects = _open_objects(config, layout, states)
        if objects is not None:
            stack.push_async_callback(objects.close)
        disk_blocks = 0 if disk is None else disk.stats.usable_blocks

        low, high = min(settings.low_watermark, settings.high_watermark), settings.high_watermark
        index = BlockIndex(arena.num_blocks + disk_blocks + _INDEX_ENTRIES)
        capacities: dict[Tier, int] = {"dram": max(1, int(low * arena.num_blocks))}
        if disk is not None:
            capacities["disk"] = max(1, int(low * disk_blocks))
        if objects is not None:  # not bounded: only `prune` asks what is coldest
            capacities["object"] = arena.num_blocks + disk_blocks
        policy = make_policy(settings.eviction, index, capacities, settings.vip_quota)
        index.conversations.vip_limit = int(settings.vip_quota * max(arena.num_blocks, disk_blocks))
        holdings = Holdings(arena, index, policy, states)
        if disk is not None:
            holdings.free_places = disk.free
            await restore(holdings, disk, recovered)

        write_back = None
        if disk is not None:
            write_back = WriteBack(holdings, disk, states["disk"], write_through=settings.write_through)
            holdings.on_dirty = write_back.dirty
        archive = None if objects is None else Archive(holdings, objects, disk)
        demotion = Demotion(holdings, states, low=low, high=high, disk=disk, write_back=write_back, archive=archive)
        if write_back is not None:
            write_back.on_full = demotion.disk_full
        holdings.may_drop_dirty = demotion.may_drop_dirty
        holdings.on_added = demotion.wake

        sources: dict[Tier, Source] = {}
        if disk is not None:
            sources["disk"] = disk
        if objects is not None:
            sources["object"] = objects
        promotion = Promotion(holdings, sources, states)

        plane = plan(config, arena.memory)
        node: Node  # what the receivers call exists before they can be reached

        def on_commit(commit: Commit) -> None:
            node.on_commit(commit)

        def on_lost(lease_id: int, epoch: int, error: Exception) -> None:
            node.on_lost(lease_id, epoch, error)

        kv_senders = senders(config, plane, arena.memory, node_id, bus)
        for sender in kv_senders.values():
            stack.push_async_callback(sender.stop)
        kv_receivers = await receivers(
            config, plane, arena.memory, node_id, bus, on_commit=on_commit, on_lost=on_lost, stack=stack
        )
        grants = Grants(
            holdings,
            kv_receivers,
            choose=functools.partial(
                choose,
                forced=plane.forced,
                zero_copy_threshold_bytes=config.transport.zero_copy_threshold_bytes,
                may_fall_back=plane.may_fall_back,
            ),
            in_use=plane.in_use,
            ttl_s=settings.lease_ttl_s,
            max_leases=settings.max_leases,
            max_stale_slots=settings.max_stale_slots,
            epoch=first_epoch(),
        )
        replication = Replication(
            bus,
            node_id,
            holdings,
            promotion,
            kv_senders,
            peers=peers,
            replicas=settings.replicas,
            request_timeout_s=config.bus.request_timeout_s,
        )
        deletions = Deletions(
            holdings, grants, replication, disk=disk, write_back=write_back, objects=objects, archive=archive
        )
        heat = Heat(settings.hot_lookups_per_s)
        print_of = fingerprint(layout)
        node = Node(
            node_id=node_id,
            layout=layout,
            fingerprint=print_of,
            holdings=holdings,
            states=states,
            plane=plane,
            endpoints=[r.endpoint for r in kv_receivers.values()],
            grants=grants,
            lookups=Lookups(holdings, states, print_of, heat, replication.want),
            fetches=Fetches(holdings, promotion, kv_senders, plane.in_use, node_id),
            promotion=promotion,
            demotion=demotion,
            replication=replication,
            deletions=deletions,
            heat=heat,
            archive=archive,
            write_back=write_back,
            disk=disk,
            objects=objects,
        )
        log.info(
            "%s blocks of %s in memory, %s on disk%s",
            f"{arena.num_blocks:,}",
            in_words(arena.block_bytes),
            f"{disk_blocks:,}",
            "" if objects is None else f", more in {settings.object_url}",
        )
        interval_s = settings.gc_interval_ms / 1000
        work = [collect(node, interval_s), retry(node, interval_s), demotion.run_memory(), demotion.run_disk()]
        work += [replication.run()]
        work += [] if write_back is None else [write_back.run()]
        work += [] if objects is None else [restore_objects(node)]
        await stack.enter_async_context(background(*work))
        yield node


async def _open_disk(
    config: Config, layout: KVLayout, node_id: str, states: dict[Tier, TierState]
) -> tuple[DiskIo | None, list[RecoveredRun]]:
    """Without a disk that can't be used the node goes on, and says why. Raises ConfigError for a folder that another
    node has."""
    settings = config.kvstore
    if not settings.disk_bytes:
        return None, []
    options = DiskOptions(
        capacity_bytes=settings.disk_bytes,
        segment_bytes=settings.segment_bytes,
        direct_io=settings.direct_io,
        node=node_id,
    )
    state = states["disk"] = TierState("disk", capacity_bytes=settings.disk_bytes)
    try:
        tier, recovered = await open_disk(folder_of(config), layout, options)
    except (DiskFull, DiskFailed) as e:
        state.broken = str(e)
        state.say()
        return None, []
    return DiskIo(tier, state), recovered


def _open_objects(config: Config, layout: KVLayout, states: dict[Tier, TierState]) -> ObjectIo | None:
    settings = config.kvstore
    if not settings.object_url:
        return None
    tier = ObjectTier.open(settings.object_url, layout, ObjectOptions(timeout_s=settings.object_timeout_s))
    # A call ends within its time by itself, and says why.
    state = states["object"] = TierState("object", stuck_s=2 * settings.object_timeout_s + 1)
    return ObjectIo(tier, state)

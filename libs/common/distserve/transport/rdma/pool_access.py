"""How this side's devices get at the pool: chosen once, when they are opened."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from distserve.errors import DistServeError, TransportError, TransportUnavailable
from distserve.kv.checksum import Words
from distserve.transport.base import PoolMemory
from distserve.transport.device_pool import DevicePool
from distserve.transport.landing import Landing
from distserve.transport.rdma import dmabuf
from distserve.transport.rdma.device import Nic, Region
from distserve.transport.rdma.dmabuf import Plan
from distserve.transport.rdma.memory import DmabufMemory, HostMemory, LocalMemory
from distserve.transport.rdma.options import RdmaOptions
from distserve.transport.rows import PoolRows, PoolShape
from distserve.transport.spans import Ids
from distserve.transport.staging_ring import Copier, StagingRing

log = logging.getLogger(__name__)

SumRows = Callable[[Ids, int, int, object], Words]  # block ids, layer_start, layer_stop, after (Copier.sums)


@dataclass(slots=True, eq=False)
class PoolAccess:
    """`memory` is what is registered: the pool, or what stands between it and the devices, which this owns. Close it
    once they are closed."""

    plan: Plan
    memory: LocalMemory
    sums: SumRows  # of the pool's blocks, where they lie; blocks its thread. Raises TransportError
    mark: Callable[[], object] = lambda: None  # Copier.mark, for any thread
    ring: StagingRing | None = None  # a sender's, if the pool is staged
    landing: Landing | None = None  # a receiver's
    regions: list[Region] = field(default_factory=list)  # of each device

    def __str__(self) -> str:
        return f"{self.plan.path}: {self.plan.reason}"

    def close(self) -> None:
        """Waits for copies that a device still makes. Idempotent; logs what does not come to an end."""
        try:
            if self.ring is not None:
                self.ring.close()
                self.ring.drop_memory()
            if self.landing is not None:
                self.landing.close()
        except TransportError as e:
            log.error("staging memory is not given back: %s", e)
            return
        self.memory.let_go()


def get_at(memory: PoolMemory, nics: Sequence[Nic], options: RdmaOptions, *, receives: bool) -> PoolAccess:
    """Registers the pool with every device, or what stands in for it. Raises OSError, DistServeError."""
    pool = memory.on_device
    if pool is None:
        rows = PoolRows(memory.blocks, memory.layout)
        access = PoolAccess(
            Plan("host", "the pool is in host memory"),
            HostMemory(memory.blocks),
            lambda ids, start, stop, _: rows.sums_of(ids, start, stop),
        )
        return _registered(access, nics, options, receives)
    shape = PoolShape(pool.num_blocks, memory.layout)
    plan = _plan(pool, options)
    if plan.path == "dmabuf":
        try:
            return _exported(plan, pool, shape, nics, options, receives)
        except (OSError, TransportUnavailable) as e:
            plan = Plan("staged", f"the pool could not be registered as a dma-buf: {e}")
    return _staged(plan, memory, pool, shape, nics, options, receives)


def _plan(pool: DevicePool, options: RdmaOptions) -> Plan:
    """As far as it is known before it has been tried."""
    plan = dmabuf.plan(replace(pool.facts(), dmabuf_registered=True))
    return plan if options.use_dmabuf or plan.path != "dmabuf" else Plan("staged", "use_dmabuf is off")


def _exported(
    plan: Plan, pool: DevicePool, shape: PoolShape, nics: Sequence[Nic], options: RdmaOptions, receives: bool
) -> PoolAccess:
    export = pool.export()
    try:
        memory = DmabufMemory(export, shape.num_blocks * shape.block_bytes)
        copier = pool.copier()
        return _registered(PoolAccess(plan, memory, _summed_by(copier), copier.mark), nics, options, receives)
    finally:
        export.close()


def _staged(
    plan: Plan,
    memory: PoolMemory,
    pool: DevicePool,
    shape: PoolShape,
    nics: Sequence[Nic],
    options: RdmaOptions,
    receives: bool,
) -> PoolAccess:
    copier, layout = pool.copier(), memory.layout
    ring = landing = None
    if receives:
        num_blocks = max(1, min(options.landing_bytes // shape.block_bytes, shape.num_blocks - 1))
        landing = Landing(copier, layout, num_blocks)
        host = HostMemory(landing.memory.blocks)
    else:
        size = max(options.stage_slot_bytes, shape.layer_bytes)
        ring = StagingRing(copier, layout, num_slots=options.stage_slots, slot_bytes=size)
        host = HostMemory(ring.memory)
    access = PoolAccess(plan, host, _summed_by(copier), copier.mark, ring, landing)
    try:
        return _registered(access, nics, options, receives)
    except BaseException:
        access.close()
        raise


def _summed_by(copier: Copier) -> SumRows:
    return lambda ids, start, stop, after: copier.sums(ids, start, stop, after).wait()


def _registered(access: PoolAccess, nics: Sequence[Nic], options: RdmaOptions, receives: bool) -> PoolAccess:
    """A peer may write by the region's own key only if we receive and no windows are used."""
    try:
        for nic in nics:
            remote = receives and not uses_windows(nic, access.memory, options)
            access.regions.append(access.memory.register(nic, remote_write=remote))
    except (OSError, DistServeError):
        for region in access.regions:
            region.close()
        raise
    return access


def uses_windows(nic: Nic, memory: LocalMemory, options: RdmaOptions) -> bool:
    return options.use_windows and nic.has_windows and memory.takes_windows

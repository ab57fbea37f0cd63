"""The first and the last thing that every worker process does: to the bus, and away from it."""

import logging
from collections.abc import Callable
from typing import Protocol

from distserve.bus.base import Bus
from distserve.bus.nats import NatsBus
from distserve.config import BusConfig
from distserve.lifecycle import Shutdown, settle_garbage
from distserve.messages import WorkerInfo, WorkerStatus
from distserve.worker.membership import Membership

log = logging.getLogger(__name__)


class Drains(Protocol):
    status: WorkerStatus

    async def drain(self, grace_s: float) -> None: ...


async def connect(config: BusConfig, worker_id: str) -> NatsBus:
    """Raises BusError naming the URL."""
    return await NatsBus.connect(
        config.url, name=worker_id, registry_ttl_s=config.ttl_s, connect_timeout_s=config.connect_timeout_s
    )


async def advertise_until_drained(
    bus: Bus, worker: Drains, describe: Callable[[], WorkerInfo], shutdown: Shutdown, *, beat_s: float
) -> None:
    """The worker answers on its subject already: register it, and return when it was asked to leave and has drained."""
    settle_garbage()
    worker.status = "ok"
    async with Membership(bus.registry(), describe, beat_s=beat_s) as membership:
        log.info("ready")
        await shutdown.wait()
        worker.status = "draining"  # told at once, so that nothing new is sent here
        await membership.beat()
        await worker.drain(shutdown.remaining_s())
        log.info("drained")

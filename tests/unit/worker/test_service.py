"""Registered when it can answer, told that it drains before it does, gone at the end."""

import asyncio

from distserve.bus.memory import MemoryBus, MemoryHub
from distserve.lifecycle import Shutdown
from distserve.messages import WorkerInfo, WorkerStatus
from distserve.worker.service import advertise_until_drained


class Worker:
    def __init__(self) -> None:
        self.status: WorkerStatus = "warming"
        self.may_end = asyncio.Event()

    async def drain(self, grace_s: float) -> None:
        assert grace_s <= 5
        await self.may_end.wait()


async def test_draining_is_known_while_it_lasts() -> None:
    hub, worker, shutdown = MemoryHub(), Worker(), Shutdown(5)
    async with (
        MemoryBus(hub, registry_ttl_s=30) as bus,
        MemoryBus(hub, registry_ttl_s=30) as other,
        other.registry().watch() as watch,
    ):
        serving = asyncio.create_task(
            advertise_until_drained(
                bus,
                worker,
                lambda: WorkerInfo(worker_id="w", role="decode", status=worker.status),
                shutdown,
                beat_s=60,  # no beat comes by itself
            )
        )
        await watch.wait_for(lambda seen: "w" in seen and seen["w"].status == "ok", 5)
        shutdown.request()
        await watch.wait_for(lambda seen: "w" in seen and seen["w"].status == "draining", 5)
        worker.may_end.set()
        await watch.wait_for(lambda seen: "w" not in seen, 5)
        async with asyncio.timeout(5):
            await serving

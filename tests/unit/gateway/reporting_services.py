"""Services that tell figures of the test's making, and a gateway's own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from distserve.bus import subjects
from distserve.bus.base import Delivery
from distserve.bus.memory import MemoryBus, MemoryHub
from distserve.errors import MalformedMessage
from distserve.messages import KVLayout, Load, ReportReply, Role, WorkerInfo, encode
from distserve.status import ClusterStatus, GatewayStatus, Second, ServiceStatus, Trouble
from distserve_gateway.cluster_view import ClusterView

LAYOUT = KVLayout(weights="w", dtype="float32", num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, rope="{}")
DSCP: dict[Any, int] = {"decode": 48, "prefill": 34, "background": 0}


@dataclass
class Reporting:
    """`figures`: an exposition's samples; `answers`: how it takes a question."""

    worker_id: str
    role: Role
    load: Load = field(default_factory=Load)
    figures: dict[str, float] = field(default_factory=dict)
    health: dict[str, Any] = field(default_factory=lambda: {"status": "ok", "reasons": []})
    answers: str = "well"  # or "never", "wrongly", "unreadably"
    num_asked: int = 0

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            worker_id=self.worker_id, role=self.role, model="tiny", status="ok", layout=LAYOUT, load=self.load
        )

    async def answer(self, delivery: Delivery) -> bytes:
        self.num_asked += 1
        if self.answers == "never":
            await asyncio.sleep(60)
        if self.answers == "wrongly":
            raise MalformedMessage("it does not know this message")
        exposition = "".join(f"{name} {value}\n" for name, value in self.figures.items())
        health = b"{" if self.answers == "unreadably" else msgspec.json.encode(self.health)
        return encode(ReportReply(exposition=exposition.encode(), health=health))


class OwnFigures:
    """Of the gateway that looks."""

    def report(self) -> ReportReply:
        return ReportReply(exposition=b"distserve_gateway_live_sequences 2\n", health=b'{"status": "ok"}')

    def status(self) -> GatewayStatus:
        return GatewayStatus(id="gw", status="ok")

    def history(self) -> list[Second]:
        return [Second(at_unix_s=1.0)]

    def troubles(self) -> list[Trouble]:
        return [Trouble(at_unix_s=1.0, service="p0", code="worker_lost", message="gone")]


@dataclass
class Looking:
    view: ClusterView
    bus: MemoryBus

    async def status(self) -> ClusterStatus:
        return msgspec.json.decode(await self.view.status(), type=ClusterStatus)

    async def service(self, worker_id: str) -> ServiceStatus:
        return next(s for s in (await self.status()).services if s.id == worker_id)


@asynccontextmanager
async def looking(*services: Reporting) -> AsyncIterator[Looking]:
    """A view of a gateway `gw` at these, all in the registry."""
    hub = MemoryHub()
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(MemoryBus(hub, name="gw", registry_ttl_s=60))
        await bus.registry().put(WorkerInfo(worker_id="gw", role="gateway", model="tiny", status="ok"))
        for service in services:
            await bus.registry().put(service.info())
            subject = subjects.worker(service.role, service.worker_id)
            await stack.enter_async_context(await bus.serve(subject, service.answer))
        watch = await stack.enter_async_context(bus.registry().watch())
        view = ClusterView(bus, watch, OwnFigures(), gateway_id="gw", model="tiny", dscp=DSCP)
        yield Looking(await stack.enter_async_context(view), bus)

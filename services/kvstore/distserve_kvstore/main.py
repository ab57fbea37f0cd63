"""`distserve kvstore`: a store node's process, from its configuration to the registry."""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from distserve import __version__
from distserve.bus import subjects
from distserve.bus.base import Bus, RegistryEvent, Watch
from distserve.config import Config
from distserve.lifecycle import Shutdown, new_id, run_service, settle_garbage
from distserve.messages import WorkerInfo, WorkerStatus
from distserve.transport.select import host_key
from distserve.worker import bus_metrics, reporting
from distserve.worker.data_plane import check_forced
from distserve.worker.membership import Membership
from distserve.worker.report import Report
from distserve.worker.service import connect
from distserve.worker.side_door import reachable, side_door
from distserve.worker.traces import following_kept_traces, traced
from distserve_kvstore.assembly import open_node
from distserve_kvstore.layouts import learn, of_workers, replaced
from distserve_kvstore.metrics import families
from distserve_kvstore.node import Node
from distserve_kvstore.service import Door

log = logging.getLogger(__name__)


def main(config: Config) -> None:
    check_forced(config)
    node_id = config.kvstore.id or new_id("kvstore")
    with traced("kvstore", node_id, config.telemetry):
        run_service(lambda shutdown: serve(config, node_id, shutdown), grace_s=config.kvstore.drain_s)


class Service:
    """What the process is between its layouts and with one: in the registry throughout."""

    def __init__(self, config: Config, node_id: str, bus: Bus, watch: Watch) -> None:
        self._config = config
        self._node_id = node_id
        self._bus = bus
        self._watch = watch
        self.door = Door(node_id, report=lambda: reporting.reply(self.report, bus))
        self.status: WorkerStatus = "warming"
        self.http_url = ""

    @property
    def node(self) -> Node | None:
        return self.door.node

    def describe(self) -> WorkerInfo:
        node, reasons = self.node, self.reasons()
        return WorkerInfo(
            worker_id=self._node_id,
            role="kvstore",
            model=self._config.model.served_name,
            status="degraded" if reasons and self.status == "ok" else self.status,
            reasons=reasons,
            version=__version__,
            host_key=host_key(),
            pid=os.getpid(),
            http_url=self.http_url,
            **({} if node is None else of_node(node)),
        )

    def reasons(self) -> list[str]:
        if self.node is None:
            return []
        layouts = of_workers(self._watch.snapshot, self._config.model.served_name)
        odd = any(layout != self.node.layout for layout in layouts)
        return self.node.reasons + ["some workers of the model have another KV layout: they get nothing"] * odd

    def report(self) -> Report:
        node = self.node
        info = self.describe()
        labels = {"role": "kvstore", "model": info.model}
        common = (bus_metrics.build_info("kvstore"), *bus_metrics.families(self._bus, labels))
        if node is None:
            return Report(info=info, bus_connected=self._bus.connected, also=common)
        return Report(
            info=info,
            bus_connected=self._bus.connected,
            in_use=node.plane.in_use.snapshot(),
            pool_access=dict(node.plane.pool_access),
            flows=node.plane.meter.snapshot(),
            kv_cache_hit_rate=node.lookups.hit_rate,
            packets=node.plane.meter.packets,
            also=common + families(node),
        )

    def peers(self) -> list[str]:
        """Live nodes of this node's layout, this one too."""
        layout = None if self.node is None else self.node.layout
        found = {
            i
            for i, info in self._watch.snapshot.items()
            if info.role == "kvstore" and info.layout == layout and info.status in ("ok", "degraded")
        }
        return sorted(found | {self._node_id})

    def on_registry(self, event: RegistryEvent) -> None:
        if event.kind == "gone" and self.node is not None:
            self.node.asker_gone(event.worker_id)


def of_node(node: Node) -> dict[str, Any]:
    """What WorkerInfo says of a node once there is one."""
    return {
        "layout": node.layout,
        "endpoints": node.endpoints,
        "transports": list(node.plane.kinds),
        "transports_in_use": node.plane.in_use.kinds,
        "load": node.load(),
    }


async def serve(
    config: Config, node_id: str, shutdown: Shutdown, *, started: Callable[[Service], None] = lambda service: None
) -> None:
    """started: told of the service once it can be seen by others."""
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(await connect(config.bus, node_id))
        await stack.enter_async_context(following_kept_traces(bus))
        watch = await stack.enter_async_context(bus.registry().watch())
        service = Service(config, node_id, bus, watch)
        watch.on_event(service.on_registry)
        await stack.enter_async_context(await bus.serve(subjects.worker("kvstore", node_id), service.door))
        url = await stack.enter_async_context(
            side_door(
                config.telemetry.metrics_host, config.kvstore.metrics_port, "kvstore.metrics_port", service.report
            )
        )
        service.http_url = reachable(url, config)
        membership = Membership(bus.registry(), service.describe, beat_s=config.bus.beat_s)
        await stack.enter_async_context(membership)
        started(service)
        while not shutdown.requested:
            await one_layout(config, node_id, bus, watch, service, membership.beat, shutdown)


async def one_layout(
    config: Config,
    node_id: str,
    bus: Bus,
    watch: Watch,
    service: Service,
    beat: Callable[[], Any],
    shutdown: Shutdown,
) -> None:
    """Until the process is asked to leave, or the model has come back with another layout."""
    learning = asyncio.ensure_future(learn(config, watch))
    if not await shutdown.run_until_requested(learning):
        return
    layout = learning.result()
    async with AsyncExitStack() as stack:
        opened = open_node(config, layout, node_id, bus, peers=service.peers)
        opening = asyncio.ensure_future(stack.enter_async_context(opened))
        if not await shutdown.run_until_requested(opening):
            return
        node = opening.result()
        node.plane.in_use.follow(watch)
        service.door.node = node
        settle_garbage()
        service.status = "ok"
        await beat()
        log.info("ready")
        left = not await shutdown.run_until_requested(replaced(layout, config, watch))
        service.status = "draining" if left else "warming"  # told at once, so that nothing new is sent here
        await beat()
        if not left:
            log.warning("the model's workers have another KV layout than this node: it begins anew with theirs")
        await node.drain(shutdown.remaining_s())
        service.door.node = None
        log.info("drained")

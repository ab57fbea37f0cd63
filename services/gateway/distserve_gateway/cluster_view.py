"""The whole cluster's figures, gathered while somebody looks: GET /status and GET /metrics/cluster.

One gathering serves all who ask within a second, so that many viewers cost as much as one; while nobody asks, nothing
is gathered. What counters have grown by is the difference to earlier gatherings, which are kept for a minute.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import msgspec

import distserve
from distserve.bus.base import Bus, Watch
from distserve.errors import MalformedMessage
from distserve.messages import PassSpeed, ReportReply, TrafficClass
from distserve.status import ClusterStatus, GatewayStatus, Second, Trouble
from distserve.status_rules import warnings_of
from distserve_gateway import cluster_figures
from distserve_gateway.gathering import Shared, Told, gather, in_slices
from distserve_gateway.merged_metrics import MergedMetrics
from distserve_gateway.samples import Samples, Since
from distserve_gateway.service_figures import WANTED, Health, Observed, health_of, service_status

FRESH_S = 1.0  # so long everybody gets the same figures
WINDOW_S = 60.0  # for shares and means


class Own(Protocol):
    """What this gateway says of itself (own_status.py)."""

    def report(self) -> ReportReply: ...

    def status(self) -> GatewayStatus: ...

    def history(self) -> list[Second]: ...

    def troubles(self) -> list[Trouble]: ...


@dataclass(frozen=True, slots=True)
class Gathering:
    """`at`: time.monotonic()."""

    at: float
    at_unix_s: float
    told: list[Told]


class ClusterView:
    """`async with` it, so that nothing is left running. Belongs to the event loop."""

    def __init__(
        self, bus: Bus, watch: Watch, own: Own, *, gateway_id: str, model: str, dscp: Mapping[TrafficClass, int]
    ) -> None:
        self._bus = bus
        self._watch = watch
        self._own = own
        self._gateway_id = gateway_id
        self._model = model
        self._dscp = dscp
        self._earlier: dict[str, deque[Samples]] = {}  # by service, the oldest first
        self._times: deque[float] = deque()  # of gatherings that were looked into, the oldest first
        self._made: tuple[float, bytes] | None = None  # of the gathering of then
        self._speeds: dict[str, PassSpeed] = {}  # by prefill worker, the last known: one that is idle tells none
        self._gathered = Shared(self._gather, FRESH_S)
        self._status = Shared(self._make_status, FRESH_S)
        self._merged = Shared(self._merge, FRESH_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        await asyncio.gather(self._status.close(), self._merged.close(), self._gathered.close())

    async def status(self) -> bytes:
        """ClusterStatus as JSON."""
        return await self._status.get()

    async def exposition(self) -> bytes:
        """Every service's samples in Prometheus's text format."""
        return await self._merged.get()

    async def _gather(self) -> Gathering:
        at, at_unix_s = time.monotonic(), time.time()
        mine = [info for info in self._watch.snapshot.values() if info.model == self._model]
        return Gathering(at, at_unix_s, await gather(self._bus, mine, self._gateway_id, self._own.report))

    # ------------------------------------------------------------ GET /status

    async def _make_status(self) -> bytes:
        gathering = await self._gathered.get()
        if self._made is not None and self._made[0] == gathering.at:
            return self._made[1]  # it began later than the look that it was for: nothing can have grown since
        self._forget(gathering)
        services = [await self._observe(told) for told in gathering.told]
        speeds = self._prefill_speeds(services)
        last, oldest = (self._times[-1], self._times[0]) if self._times else (gathering.at, gathering.at)
        self._times.append(gathering.at)
        status = ClusterStatus(
            at_unix_s=gathering.at_unix_s,
            interval_s=gathering.at - last,
            window_s=gathering.at - oldest,
            model=self._model,
            version=distserve.__version__,
            gateway=self._own.status(),
            services=[service_status(of, speeds) for of in services],
            tiers=cluster_figures.tiers(services),
            flows=cluster_figures.flows(services, self._dscp),
            history=self._own.history(),
            troubles=self._own.troubles(),
        )
        made = msgspec.json.encode(msgspec.structs.replace(status, warnings=warnings_of(status)))
        self._made = gathering.at, made
        return made

    async def _observe(self, told: Told) -> Observed:
        now, health, error = Samples(told.at), None, told.error
        if told.report is not None:
            try:
                health = health_of(told.report.health)
                await in_slices(told.report.exposition, lambda lines: now.take(lines, WANTED))
            except MalformedMessage as e:
                error = e.message
        return self._compared(told, now, health, error)

    def _compared(self, told: Told, now: Samples, health: Health | None, error: str) -> Observed:
        earlier = self._earlier.setdefault(told.info.worker_id, deque())
        last, oldest = (earlier[-1], earlier[0]) if earlier and health is not None else (None, None)
        if health is not None:
            earlier.append(now)
        return Observed(
            info=told.info, health=health, now=now, last=Since(now, last), window=Since(now, oldest), error=error
        )

    def _prefill_speeds(self, services: Iterable[Observed]) -> list[PassSpeed]:
        for of in services:
            if of.info.role == "prefill" and of.info.load.speed.known:
                self._speeds[of.info.worker_id] = of.info.load.speed
        return list(self._speeds.values())

    def _forget(self, gathering: Gathering) -> None:
        """What is older than the window, but for one gathering: a difference to long ago is better than none. And all
        about services that have left."""
        present = {told.info.worker_id for told in gathering.told}
        self._earlier = {i: earlier for i, earlier in self._earlier.items() if i in present}
        self._speeds = {i: speed for i, speed in self._speeds.items() if i in present}
        for earlier in self._earlier.values():
            while len(earlier) > 1 and earlier[0].at < gathering.at - WINDOW_S:
                earlier.popleft()
        while len(self._times) > 1 and self._times[0] < gathering.at - WINDOW_S:
            self._times.popleft()

    # ------------------------------------------------------------ GET /metrics/cluster

    async def _merge(self) -> bytes:
        merged = MergedMetrics()
        told_by = (await self._gathered.get()).told
        for told in told_by:
            merged.begin(told.info.worker_id, told.info.role)
            if told.report is not None:
                await in_slices(told.report.exposition, merged.add)
        for told in told_by:
            merged.begin(told.info.worker_id, told.info.role)
            merged.add([*REACHED, f"distserve_service_reached {int(told.report is not None)}"])
        return merged.text().encode()


REACHED = (
    "# HELP distserve_service_reached 1 for a registered service that told its samples within a second.",
    "# TYPE distserve_service_reached gauge",
)

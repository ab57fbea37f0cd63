"""What a gateway says of itself, for its own GET /status and, over the bus, for that of others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from distserve.bus.base import Bus
from distserve.messages import ReportReply
from distserve.status import GatewayStatus, Second, Trouble
from distserve.worker import reporting

if TYPE_CHECKING:
    from distserve_gateway.gateway import Gateway


class OwnStatus:
    """Of an entered gateway."""

    def __init__(self, gateway: Gateway, bus: Bus) -> None:
        self._gateway = gateway
        self._bus = bus

    def report(self) -> ReportReply:
        """Its /metrics and /health, made to fit into a message."""
        _, health = self._gateway.health()
        exposition = self._gateway.metrics.exposition()
        return reporting.fitted(exposition, msgspec.json.encode(health), self._bus.max_payload_bytes)

    def status(self) -> GatewayStatus:
        _, health = self._gateway.health()
        stats, breaker = self._bus.stats, self._gateway.trials.breaker
        return self._gateway.windows.figures(
            GatewayStatus(
                id=self._gateway.options.gateway_id,
                status=health["status"],
                reasons=health["reasons"],
                needs_key=bool(self._gateway.keys),
                breaker=breaker.state if breaker.policy.active else "off",
                bus_connected=self._bus.connected,
                bus_reconnects=stats.reconnects,
                bus_drops=stats.slow_consumer_drops,
            )
        )

    def history(self) -> list[Second]:
        return self._gateway.windows.history()

    def troubles(self) -> list[Trouble]:
        return self._gateway.windows.troubles()

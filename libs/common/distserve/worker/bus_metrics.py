"""What every service shows, beside its own metrics: how its bus fares, and which version it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import distserve
from distserve.bus.base import Bus

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


def families(bus: Bus, labels: Mapping[str, str]) -> tuple[Metric, ...]:
    """`labels`: as the service's other metrics have them. Call it on the bus's event loop."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    stats, pending = bus.stats, bus.pending
    made: list[Metric] = []
    for name, text, level in (
        ("connected", "1 while there is a connection to NATS.", int(bus.connected)),
        ("pending_messages", "Messages that have come and wait for their turn, or wait to be sent.", pending.messages),
        ("pending_bytes", "Bytes of those.", pending.num_bytes),
    ):
        gauge = GaugeMetricFamily(f"distserve_bus_{name}", text, labels=list(labels))
        gauge.add_metric(list(labels.values()), level)
        made.append(gauge)
    for name, text, times in (
        ("reconnects", "Connections to NATS after the first.", stats.reconnects),
        ("dropped_messages", "Messages dropped since too many waited for their turn.", stats.slow_consumer_drops),
        ("permission_denials", "Publications and subscriptions that NATS refused.", stats.permission_denials),
        ("callback_errors", "Messages whose handling failed.", stats.callback_errors),
        ("errors", "Other errors that NATS or its client reported.", stats.errors),
    ):
        counter = CounterMetricFamily(f"distserve_bus_{name}", text, labels=list(labels))
        counter.add_metric(list(labels.values()), times)
        made.append(counter)
    return tuple(made)


def build_info(role: str) -> Metric:
    """Always 1: for joins by version."""
    from prometheus_client.core import GaugeMetricFamily

    info = GaugeMetricFamily("distserve_build_info", "1, by version and role.", labels=("version", "role"))
    info.add_metric((distserve.__version__, role), 1)
    return info

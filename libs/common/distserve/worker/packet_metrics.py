"""Packets of a worker's data plane, for its /metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distserve.transport.packets import PacketCounts

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


def families(packets: PacketCounts) -> tuple[Metric, ...]:
    """A transport of which nothing is known has none."""
    from prometheus_client.core import CounterMetricFamily

    sent = CounterMetricFamily(
        "distserve_transport_packets",
        "Packets sent: segments of the KV connections over tcp; over rdma all that the devices in use have sent.",
        labels=("transport",),
    )
    again = CounterMetricFamily(
        "distserve_transport_retransmitted_packets",
        "Of those, sent again: segments over tcp; over rdma the times that a device began to send again.",
        labels=("transport",),
    )
    for kind, of in packets.snapshot().items():
        if of.num_sent is not None:
            sent.add_metric((kind,), of.num_sent)
        if of.num_sent_again is not None:
            again.add_metric((kind,), of.num_sent_again)
    return sent, again

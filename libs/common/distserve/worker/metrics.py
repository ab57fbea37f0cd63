"""A worker's Prometheus metrics, made anew from a Report at each scrape: nothing is counted twice."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from distserve.worker import packet_metrics
from distserve.worker.report import Report

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_WORKER = ("role", "model")
_GPU = (*_WORKER, "device")
_FLOW = ("direction", "transport", "traffic_class", "peer")


def exposition(report: Report) -> bytes:
    """Everything in Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(_Reported(report))
    return generate_latest(registry)


class _Reported(Collector):
    def __init__(self, report: Report) -> None:
        self._report = report

    def collect(self) -> Iterable[Metric]:
        yield from self._load()
        yield from self._transfers()
        yield from self._gpu()
        if self._report.packets is not None:
            yield from packet_metrics.families(self._report.packets)
        yield from self._report.also

    def _load(self) -> Iterator[Metric]:
        info = self._report.info
        for name, text, value in (
            ("running_sequences", "Sequences that are being computed or handed over.", info.load.num_running),
            ("waiting_sequences", "Sequences that wait to be computed or for room.", info.load.num_waiting),
            ("waiting_tokens", "Tokens that are still to be computed for those.", info.load.num_waiting_tokens),
            ("free_blocks", "KV blocks that nobody holds.", info.load.free_blocks),
            ("total_blocks", "KV blocks in the pool.", info.load.total_blocks),
            ("degraded", "1 while /health gives reasons why another worker is better.", int(bool(info.reasons))),
        ):
            gauge = GaugeMetricFamily(f"distserve_worker_{name}", text, labels=_WORKER)
            gauge.add_metric((info.role, info.model), value)
            yield gauge

    def _transfers(self) -> Iterator[Metric]:
        num = CounterMetricFamily("distserve_transfers", "Leases that were committed.", labels=_FLOW)
        size = CounterMetricFamily("distserve_transfer_bytes", "KV bytes of those leases.", labels=_FLOW)
        seconds = CounterMetricFamily(
            "distserve_transfer_seconds",
            "Seconds of those leases, each from its opening (sent) or grant (received) to its commit.",
            labels=_FLOW,
        )
        for flow, tally in self._report.flows.items():
            labels = (flow.direction, flow.kind, flow.traffic_class, flow.peer)
            num.add_metric(labels, tally.num_leases)
            size.add_metric(labels, tally.num_bytes)
            seconds.add_metric(labels, tally.seconds)
        fallbacks = CounterMetricFamily(
            "distserve_transport_fallbacks",
            "Times that a transport could not reach a peer and another one was taken.",
            labels=("transport", "peer"),
        )
        for (peer, kind), times in self._report.num_fallbacks.items():
            fallbacks.add_metric((kind, peer), times)
        yield from (num, size, seconds, fallbacks)

    def _gpu(self) -> Iterator[Metric]:
        info, gpu = self._report.info, self._report.gpu_sample()
        if gpu is None:
            return
        for name, text, value in (
            ("utilization_ratio", "Share of the last moments in which the GPU computed, for anybody.", gpu.utilization),
            ("memory_used_bytes", "Memory of the GPU that is taken, by anybody.", gpu.memory_used_bytes),
        ):
            if value is not None:
                gauge = GaugeMetricFamily(f"distserve_worker_gpu_{name}", text, labels=_GPU)
                gauge.add_metric((info.role, info.model, gpu.device), value)
                yield gauge

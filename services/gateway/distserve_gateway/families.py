"""The names under which Prometheus sees what the gateway counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from distserve.worker.bus_metrics import build_info

if TYPE_CHECKING:
    from distserve.worker.histogram import Histogram
    from distserve_gateway.kv_index import KVIndex
    from distserve_gateway.metrics import Metrics

Series = Mapping[tuple[str, ...], float]  # by the values of the labels after the first


def histogram(name: str, text: str, model: tuple[str, str], one: Histogram) -> Metric:
    """`model`: the label that names it, and its value."""
    family = HistogramMetricFamily(name, text, labels=model[:1])
    family.add_metric(model[1:], one.buckets(), one.total)
    return family


def counter(name: str, text: str, model: tuple[str, str], series: Series, *labels: str) -> Metric:
    family = CounterMetricFamily(name, text, labels=(model[0], *labels))
    for values, value in series.items():
        family.add_metric((model[1], *values), value)
    return family


def gauge(name: str, text: str, model: tuple[str, str], series: Series, *labels: str) -> Metric:
    family = GaugeMetricFamily(name, text, labels=(model[0], *labels))
    for values, value in series.items():
        family.add_metric((model[1], *values), value)
    return family


def _by_one(counts: Mapping[str, float]) -> Series:
    return {(value,): count for value, count in counts.items()}


def gateway_families(metrics: Metrics) -> Iterator[Metric]:
    """Everything that every gateway counts, label `model` first."""
    model = ("model", metrics.model)
    yield build_info("gateway")
    yield from _times(metrics, model)
    yield from _requests(metrics, model)
    yield from _promises(metrics, model)


def _times(metrics: Metrics, model: tuple[str, str]) -> Iterator[Metric]:
    for name, text, one in (
        ("ttft", "Request received to an output's first token.", metrics.ttft),
        ("itl", "Gap between two tokens of an output.", metrics.itl),
        ("tpot", "Mean time of an output's tokens after its first.", metrics.tpot),
        ("e2e", "Request received to its end.", metrics.e2e),
    ):
        yield histogram(f"distserve_gateway_{name}_seconds", text, model, one)
    stages = HistogramMetricFamily(
        "distserve_gateway_stage_seconds",
        "Where the time of requests went: prefill's queue, computing the prompt, handing over the KV, decoding. Of "
        "several outputs the slowest of each.",
        labels=("model", "stage"),
    )
    for stage, one in metrics.stages.items():
        stages.add_metric((metrics.model, stage), one.buckets(), one.total)
    yield stages


def _requests(metrics: Metrics, model: tuple[str, str]) -> Iterator[Metric]:
    for name, text, value in (
        ("prompt_tokens", "Prompt tokens of requests that ended.", metrics.num_prompt_tokens),
        ("output_tokens", "Output tokens of requests that ended.", metrics.num_output_tokens),
        (
            "looked_up_tokens",
            "Of the prompt tokens those looked for in KV here: neither of requests turned away nor of those that the "
            "fallback server served.",
            metrics.num_looked_up_tokens,
        ),
        ("cached_tokens", "Of those looked up the ones found, and not computed.", metrics.num_cached_tokens),
    ):
        yield counter(f"distserve_gateway_{name}", text, model, {(): value})
    yield counter(
        "distserve_gateway_requests",
        "Requests that ended, by kind and outcome (ok, cancelled, or an error's code).",
        model,
        metrics.requests,
        "kind",
        "outcome",
    )
    yield counter(
        "distserve_gateway_routes",
        "Sequences taken: by a pair of workers, a decode worker that prefills itself since it holds most (local), "
        "since prefill is behind (spill) or there is none (alone), or a colocated one.",
        model,
        {(kind,): times for kind, times in metrics.routes.items()},
        "kind",
    )
    yield counter(
        "distserve_gateway_retries",
        "Times that a sequence was submitted again, by the code of the error that the try before ended with.",
        model,
        _by_one(metrics.retries),
        "reason",
    )
    yield gauge("distserve_gateway_live_sequences", "Sequences that run now.", model, {(): metrics.num_live()})


def _promises(metrics: Metrics, model: tuple[str, str]) -> Iterator[Metric]:
    classes = metrics.classes.items()
    yield counter(
        "distserve_gateway_slo_requests",
        "Requests that were let in and ended, by whether all that was promised was kept (yes, no): first token, mean "
        "time of a token after it, deadline. unpromised: nothing was, or the client left before it was known.",
        model,
        {
            (priority, attained): getattr(counts, attained)
            for priority, counts in classes
            for attained in ("yes", "no", "unpromised")
        },
        "priority",
        "attained",
    )
    yield counter(
        "distserve_gateway_good_requests",
        "Requests that ended well, within every promise: the goodput.",
        model,
        {(priority,): counts.good for priority, counts in classes},
        "priority",
    )
    yield counter(
        "distserve_gateway_refused_requests",
        "Requests that were answered 429 or 503, before anything was done for them.",
        model,
        {(priority,): counts.refused for priority, counts in classes},
        "priority",
    )
    yield counter(
        "distserve_gateway_slo_refusals",
        "Sequences refused since their first token would be late: by the gateway at once, or by all workers asked.",
        model,
        _by_one(metrics.late),
        "by",
    )


def index_families(model: str, index: KVIndex, num_snapshots: int) -> Iterator[Metric]:
    """What routing knows of the workers' blocks."""
    for name, text, value in (
        ("kv_hints", "Blocks of workers that routing knows of.", index.num_hints),
        ("kv_hints_dropped", "Blocks of workers that routing forgot for want of room.", index.num_dropped),
        ("kv_snapshots", "Lists of all that a worker holds, taken over.", num_snapshots),
    ):
        yield gauge(f"distserve_gateway_{name}", text, ("model", model), {(): value})

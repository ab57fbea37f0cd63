"""A worker's dealings with the store, for its /metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from distserve.messages import Tier
from distserve.worker.store.client import StoreClient

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily
    from prometheus_client.metrics_core import Metric


def families(client: StoreClient, role: str) -> tuple[Metric, ...]:
    """For Report.also."""
    from prometheus_client.core import GaugeMetricFamily

    c = client.counts
    held = GaugeMetricFamily("distserve_store_held_blocks", "Blocks of the pool under offer.", labels=("role",))
    held.add_metric((role,), client.num_held_blocks)
    return (
        held,
        _counter("lookups", "Lookups at store nodes and other workers.", role, c.num_lookups),
        _counter("silent", "Of those asked, who did not answer in time.", role, c.num_silent),
        _counter("sought_blocks", "Blocks looked up.", role, c.num_sought_blocks),
        _by("hit_blocks", "Of those, found, by the tier that they were in.", role, "tier", c.num_hit_blocks),
        _counter("fetches", "Fetches, of one source each.", role, c.num_fetches),
        _counter("fetched_blocks", "Blocks that were fetched.", role, c.num_fetched_blocks),
        _counter("fetched_bytes", "KV bytes of those.", role, c.num_fetched_bytes),
        _counter("fetch_seconds", "Seconds of those fetches.", role, c.fetch_seconds),
        _by("failed_fetches", "Fetches that failed, by error code.", role, "reason", c.num_failed_fetches),
        _counter("offered_blocks", "Blocks that nodes have taken.", role, c.num_offered_blocks),
        _counter("offered_bytes", "KV bytes of those.", role, c.num_offered_bytes),
        _counter("unwanted_blocks", "Blocks offered that nodes had.", role, c.num_unwanted_blocks),
        _by("dropped_blocks", "Blocks not offered, or in vain, by reason.", role, "reason", c.num_dropped_blocks),
        _counter("served_blocks", "Blocks of the pool that others have fetched.", role, c.num_served_blocks),
        _counter("served_bytes", "KV bytes of those.", role, c.num_served_bytes),
        _by("failed_serves", "Others' fetches that failed here, by error code.", role, "reason", c.num_failed_serves),
    )


def _counter(name: str, text: str, role: str, value: float) -> CounterMetricFamily:
    return _family(name, text, ("role",), [((role,), value)])


def _by(
    name: str, text: str, role: str, label: str, counts: Mapping[Tier, int] | Mapping[str, int]
) -> CounterMetricFamily:
    return _family(name, text, ("role", label), [((role, key), value) for key, value in counts.items()])


def _family(
    name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]
) -> CounterMetricFamily:
    from prometheus_client.core import CounterMetricFamily

    made = CounterMetricFamily(f"distserve_store_{name}", text, labels=labels)
    for of, value in values:
        made.add_metric(of, value)
    return made

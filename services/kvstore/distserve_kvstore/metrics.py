"""A store node's own Prometheus metrics, made anew at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from distserve_kvstore.node import Node

_TIER = ("tier",)


def families(node: Node) -> tuple[Metric, ...]:
    """Everything under `distserve_kvstore_`."""
    return (*_tiers(node), *_latency(node), *_node(node))


def _tiers(node: Node) -> Iterator[Metric]:
    block_bytes = node.holdings.arena.block_bytes
    size = GaugeMetricFamily("distserve_kvstore_bytes", "Blocks in a tier, in bytes.", labels=_TIER)
    capacity = GaugeMetricFamily("distserve_kvstore_capacity_bytes", "What a tier may hold; 0: no limit.", labels=_TIER)
    blocks = GaugeMetricFamily("distserve_kvstore_blocks", "Blocks in a tier.", labels=_TIER)
    hits = CounterMetricFamily(
        "distserve_kvstore_hit_blocks", "Blocks that lookups found and pinned, by the fastest tier.", labels=_TIER
    )
    read = CounterMetricFamily("distserve_kvstore_read_blocks", "Blocks read from a tier into memory.", labels=_TIER)
    written = CounterMetricFamily("distserve_kvstore_written_blocks", "Blocks written to a tier.", labels=_TIER)
    errors = CounterMetricFamily("distserve_kvstore_errors", "Operations and blocks that failed.", labels=_TIER)
    trouble = GaugeMetricFamily(
        "distserve_kvstore_tier_trouble", "1 while the store goes on without a tier, or with part of it.", labels=_TIER
    )
    evicted = CounterMetricFamily(
        "distserve_kvstore_evicted_blocks", "Blocks that left a tier, by reason.", labels=("tier", "reason")
    )
    for tier, state in node.states.items():
        num = node.holdings.num_blocks[tier]
        size.add_metric((tier,), num * block_bytes)
        blocks.add_metric((tier,), num)
        capacity.add_metric((tier,), state.capacity_bytes)
        hits.add_metric((tier,), state.num_hits)
        read.add_metric((tier,), state.num_read)
        written.add_metric((tier,), state.num_written)
        errors.add_metric((tier,), state.num_errors)
        trouble.add_metric((tier,), int(state.state != "ok"))
        for reason, times in state.num_evicted.items():
            evicted.add_metric((tier, reason), times)
    yield from (size, capacity, blocks, hits, read, written, errors, trouble, evicted)


def _latency(node: Node) -> Iterator[Metric]:
    seconds = HistogramMetricFamily(
        "distserve_kvstore_operation_seconds",
        "Reads and writes of a tier, a call each; lookups and fetches of the node.",
        labels=("tier", "operation"),
    )
    for tier, state in node.states.items():
        for operation, histogram in state.latency.items():
            seconds.add_metric((tier, operation), histogram.buckets(), histogram.total)
    for operation, histogram in (("lookup", node.lookups.latency), ("fetch", node.fetches.latency)):
        seconds.add_metric(("", operation), histogram.buckets(), histogram.total)
    yield seconds


def _node(node: Node) -> Iterator[Metric]:
    index, holdings = node.holdings.index, node.holdings
    for name, text, value in (
        ("index_blocks", "Blocks in the index, whatever their tier.", len(index)),
        ("index_bytes", "Memory of the index.", index.num_bytes),
        ("conversations", "Conversations that blocks are known to be of.", len(index.conversations)),
        ("vip_blocks", "Blocks of pinned conversations.", index.conversations.num_vip_blocks),
        ("leases", "Offers under way.", len(node.grants)),
        ("stale_slots", "Blocks of offers that broke, kept for the retry.", node.grants.num_stale),
        ("pins", "Pins of askers.", len(holdings.pins)),
        ("fetches", "Fetches under way.", len(node.fetches)),
        ("unwritten_blocks", "Blocks in memory and nowhere else.", node.num_dirty()),
        ("counted_segments", "Segments whose lookups are counted.", len(node.heat)),
        ("degraded", "1 while there is a reason in /health.", int(bool(node.reasons))),
    ):
        yield GaugeMetricFamily(f"distserve_kvstore_{name}", text, value=value)
    for name, text, value in (
        ("lookups", "Lookups answered.", node.lookups.num_lookups),
        ("looked_up_blocks", "Blocks that lookups asked for.", node.lookups.num_blocks),
        ("replicated_blocks", "Blocks copied to other nodes.", node.replication.num_copied),
    ):
        yield CounterMetricFamily(f"distserve_kvstore_{name}", text, value=value)
    failed = CounterMetricFamily("distserve_kvstore_failed_fetches", "Fetches that failed, by code.", labels=("code",))
    for code, times in node.fetches.num_failed.items():
        failed.add_metric((code,), times)
    yield failed

"""What is counted over all services: the tiers of KV, and what flows between them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from distserve.kv.layout import block_bytes
from distserve.messages import TrafficClass
from distserve.status import FlowStatus, TierStatus
from distserve_gateway.service_figures import Observed

TIERS = ("dram", "disk", "object")  # of store nodes, the fastest first
LEAST_PACKETS = 10_000  # fewer tell nothing of how many are lost; as the alert has it


def tiers(services: Sequence[Observed]) -> list[TierStatus]:
    """`hbm`, the workers' pools, if there is one, and the tiers of those store nodes that answered."""
    workers = [of for of in services if of.info.role in ("prefill", "decode")]
    nodes = [of for of in services if of.info.role == "kvstore"]
    return [*_pools(workers), *_store(nodes)]


def _pools(workers: Sequence[Observed]) -> list[TierStatus]:
    if not workers:
        return []
    num_blocks = num_bytes = capacity_bytes = 0
    found = looked_up = read = written = 0.0
    for of in workers:
        layout, load = of.info.layout, of.info.load
        size, tokens = (0, 0) if layout is None else (block_bytes(layout), layout.block_size)
        total = of.figure("distserve_worker_total_blocks", load.total_blocks)
        free = of.figure("distserve_worker_free_blocks", load.free_blocks)
        held = total - free + of.figure("distserve_worker_blocks", 0, state="cached")
        num_blocks += held
        num_bytes += held * size
        capacity_bytes += total * size
        looked_up += of.window.grown("distserve_prompt_tokens_total")
        # What was fetched is in the pool when the prompt's turn comes; it was found elsewhere.
        fetched = tokens * of.window.grown("distserve_store_fetched_blocks_total")
        found += max(0.0, of.window.grown("distserve_cached_prompt_tokens_total") - fetched)
        read += of.last.rate("distserve_store_served_bytes_total")
        written += of.last.rate("distserve_store_fetched_bytes_total")
        written += of.last.rate("distserve_transfer_bytes_total", direction="received")
    return [
        TierStatus(
            tier="hbm",
            num_blocks=num_blocks,
            num_bytes=num_bytes,
            capacity_bytes=capacity_bytes,
            hit_share=min(1.0, found / looked_up) if looked_up else None,
            read_bytes_per_s=read,
            written_bytes_per_s=written,
        )
    ]


def _store(nodes: Sequence[Observed]) -> list[TierStatus]:
    looked_up = sum(of.window.grown("distserve_kvstore_looked_up_blocks_total") for of in nodes)
    known = {has["tier"] for of in nodes for _, has, _ in of.now.series("distserve_kvstore_blocks") if "tier" in has}
    made = []
    for tier in (*TIERS, *sorted(known - set(TIERS))):
        if tier not in known:
            continue
        capacities = [of.now.total("distserve_kvstore_capacity_bytes", tier=tier) or 0.0 for of in nodes]
        hits = sum(of.window.grown("distserve_kvstore_hit_blocks_total", tier=tier) for of in nodes)
        made.append(
            TierStatus(
                tier=tier,
                num_blocks=int(sum(of.now.total("distserve_kvstore_blocks", tier=tier) or 0.0 for of in nodes)),
                num_bytes=int(sum(of.now.total("distserve_kvstore_bytes", tier=tier) or 0.0 for of in nodes)),
                capacity_bytes=int(sum(capacities)),
                hit_share=hits / looked_up if looked_up else None,
                read_bytes_per_s=_bytes_per_s(nodes, "distserve_kvstore_read_blocks_total", tier),
                written_bytes_per_s=_bytes_per_s(nodes, "distserve_kvstore_written_blocks_total", tier),
            )
        )
    return made


def _bytes_per_s(nodes: Sequence[Observed], name: str, tier: str) -> float:
    sized = ((of, block_bytes(of.info.layout)) for of in nodes if of.info.layout is not None)
    return sum(size * of.last.rate(name, tier=tier) for of, size in sized)


def flows(services: Sequence[Observed], dscp: Mapping[TrafficClass, int]) -> list[FlowStatus]:
    """What services have sent each other, by transport and class. `dscp`: the mark of each class, as this gateway's
    settings have it."""
    by = ("transport", "traffic_class")
    num_bytes: dict[tuple[str, ...], float] = {}
    bytes_per_s: dict[tuple[str, ...], float] = {}
    leases_per_s: dict[tuple[str, ...], float] = {}
    for of in services:
        for _, has, value in of.now.series("distserve_transfer_bytes_total", {"direction": "sent"}):
            _add(num_bytes, tuple(has.get(label, "") for label in by), value)
        for name, into in (
            ("distserve_transfer_bytes_total", bytes_per_s),
            ("distserve_transfers_total", leases_per_s),
        ):
            for key, grown in of.last.grown_by(name, *by, direction="sent").items():
                _add(into, key, grown / of.last.seconds if of.last.seconds else 0.0)
    retransmitted = _retransmitted(services)
    marks = {str(name): mark for name, mark in dscp.items()}
    return [
        FlowStatus(
            transport=transport,
            traffic_class=traffic_class,
            dscp=marks.get(traffic_class, 0),
            num_bytes=int(num_bytes[transport, traffic_class]),
            bytes_per_s=bytes_per_s.get((transport, traffic_class), 0.0),
            leases_per_s=leases_per_s.get((transport, traffic_class), 0.0),
            retransmitted_share=retransmitted.get(transport),
        )
        for transport, traffic_class in sorted(num_bytes)
    ]


def _retransmitted(services: Sequence[Observed]) -> dict[str, float]:
    """The share of each transport that has sent enough to tell."""
    sent: dict[tuple[str, ...], float] = {}
    again: dict[tuple[str, ...], float] = {}
    for name, into in (
        ("distserve_transport_packets_total", sent),
        ("distserve_transport_retransmitted_packets_total", again),
    ):
        for key, grown in chain.from_iterable(of.window.grown_by(name, "transport").items() for of in services):
            _add(into, key, grown)
    return {key[0]: again.get(key, 0.0) / num for key, num in sent.items() if num >= LEAST_PACKETS}


def _add(into: dict[tuple[str, ...], float], key: tuple[str, ...], value: float) -> None:
    into[key] = into.get(key, 0.0) + value

"""Where KV is, and how it moves: tiers of the store, transports by class."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from distserve.monitor.fitting import Want
from distserve.monitor.pane import BAD, GOOD, LEFT, Column, Pane, bar, grid, shown
from distserve.monitor.words import NONE, rate, share, size
from distserve.status import ClusterStatus, FlowStatus, TierStatus

_BAR = 10
_FULL = 0.95
_WIDE = 90
LOSSY = 0.001  # retransmitted share from which a network is worth a look


def tiers(status: ClusterStatus) -> Pane:
    def fill(t: TierStatus) -> Text:
        if not t.capacity_bytes:
            return Text("no limit")
        full = t.num_bytes / t.capacity_bytes
        return bar(_BAR, (full, "█", "green" if full < _FULL else "yellow")).append(f" {share(full):>6}")

    rows = [
        (
            t.tier,
            f"{t.num_blocks:,}",
            size(t.num_bytes),
            fill(t),
            Text(share(t.hit_share), GOOD if t.hit_share else ""),
            f"{size(t.read_bytes_per_s)}/s",
            f"{size(t.written_bytes_per_s)}/s",
            size(t.capacity_bytes) if t.capacity_bytes else NONE,
        )
        for t in status.tiers
    ]
    columns = [
        Column("KV TIER", LEFT),
        Column("blocks"),
        Column("size"),
        Column("full", LEFT),
        Column("hits"),
        Column("read"),
        Column("written"),
        Column("capacity"),  # where there is room for it
    ]

    def draw(lines: int, width: int) -> RenderableType:
        num = len(columns) - (width < _WIDE)
        return grid(columns[:num], [row[:num] for row in shown(rows, lines - 1, [True] * len(rows))])

    return Pane("tiers", _want(len(rows), 4), draw)


def flows(status: ClusterStatus) -> Pane:
    """The busiest first."""
    found = sorted(status.flows, key=lambda f: (-f.bytes_per_s, -f.num_bytes, f.transport, f.traffic_class))

    def lost(f: FlowStatus) -> Text:
        bad = f.retransmitted_share is not None and f.retransmitted_share >= LOSSY
        return Text(share(f.retransmitted_share), BAD if bad else "")

    rows = [
        (
            f.transport,
            f.traffic_class,
            f"{f.dscp}",
            Text(f"{size(f.bytes_per_s)}/s", "bold" if f.bytes_per_s else ""),
            size(f.num_bytes),
            rate(f.leases_per_s),
            lost(f),
        )
        for f in found
    ]
    columns = [
        Column("KV MOVED BY", LEFT),
        Column("class", LEFT),
        Column("DSCP"),
        Column("now"),
        Column("so far"),
        Column("leases/s"),
        Column("sent again"),
    ]
    matters = [bool(f.bytes_per_s) or (f.retransmitted_share or 0) >= LOSSY for f in found]

    def draw(lines: int, width: int) -> RenderableType:
        return grid(columns, shown(rows, lines - 1, matters))

    return Pane("flows", _want(len(rows), 5), draw)


def _want(num_rows: int, rank: int) -> Want:
    return Want(1 + min(num_rows, 3), 1 + num_rows, rank) if num_rows else Want(0, 0, rank)

"""Which blocks a full store keeps: hit rates of lfu and lru against the best possible, and what a VIP quota costs.

    python -m benchmarks.store_eviction [--requests 4000] [--seeds 1 2] [--json FILE] [--plot FILE]

Made-up traces (store_eviction_traces.py: shared prompts by Zipf's law, conversations of several turns, the same with
scans), played through the store's own index and policies, one tier, emptied to its size after each request. A hit is a
block of the request's unbroken beginning that is there when it comes. Nothing is left out: a block's first request,
which nobody can hit, counts as asked for, and so does the time in which the store fills.

The best possible is Belady's MIN: what is used again last goes first. It knows the future, so it is a bound, not an
aim; here it is the same whether any block may go or a chain is cut from its end (store_eviction_play.py says why).

VIP: every tenth conversation is pinned for 2,000 requests, unless that is over the quota of a quarter of the store;
those that are pinned may outgrow it, turn by turn. Shown: how many pinned blocks were evicted when all of them were
within the quota (aim: none) and when they were more, and the hit rates of VIPs and of all, with and without pins.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from benchmarks.store_eviction_play import Played, play, play_optimal
from benchmarks.store_eviction_traces import TRACES

SIZES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # of the blocks that a trace asks for
VIP_EVERY = 10
VIP_SIZE = 0.1


@dataclass(frozen=True, slots=True)
class Cell:
    """One trace at one size: hit rates by kind, one a seed; `us` for a block asked for, index and eviction included."""

    size: float
    num_blocks: int  # the mean's
    rates: dict[str, list[float]]
    us: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--sizes", type=float, nargs="*", default=list(SIZES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    cells = {name: list(_cells(name, args.requests, args.seeds, args.sizes)) for name in TRACES}
    if args.json:
        args.json.write_text(
            json.dumps({name: [asdict(cell) for cell in its] for name, its in cells.items()}, indent=1)
        )
    if args.plot:
        from benchmarks.store_plots import plot_eviction

        plot_eviction(cells, args.plot)
    report_vips(args.requests, args.seeds)


def _cells(name: str, num_requests: int, seeds: Sequence[int], sizes: Sequence[float]) -> Iterator[Cell]:
    traces = [TRACES[name](num_requests, seed) for seed in seeds]
    num_blocks = mean(len(trace.depths) for trace in traces)
    print(
        f"\n{name}: {num_requests:,} requests, {mean(t.num_accesses for t in traces):,.0f} blocks asked for, "
        f"{num_blocks:,.0f} different\n\n| store | lru | lfu | lfu - lru | best possible | us a block, lru, lfu |"
        "\n|---|---|---|---|---|---|"
    )
    for size in sizes:
        capacities = [round(size * len(trace.depths)) for trace in traces]
        pairs = list(zip(traces, capacities, strict=True))
        lru = [play(trace, "lru", capacity) for trace, capacity in pairs]
        lfu = [play(trace, "lfu", capacity) for trace, capacity in pairs]
        best = [play_optimal(trace, capacity) for trace, capacity in pairs]
        cell = Cell(
            size,
            round(mean(capacities)),
            {kind: [p.hit_rate for p in its] for kind, its in (("lru", lru), ("lfu", lfu), ("optimal", best))},
            {"lru": _us(lru), "lfu": _us(lfu)},
        )
        print(_row(cell), flush=True)
        yield cell


def _row(cell: Cell) -> str:
    lru, lfu, best = (cell.rates[kind] for kind in ("lru", "lfu", "optimal"))
    more = [100 * (a - b) for a, b in zip(lfu, lru, strict=True)]
    return (
        f"| {cell.size:.0%}, {cell.num_blocks:,} | {mean(lru):.3f} | {mean(lfu):.3f} "
        f"| {mean(more):+.1f} ({min(more):+.1f} to {max(more):+.1f}) | {mean(best):.3f} "
        f"| {cell.us['lru']:.0f}, {cell.us['lfu']:.0f} |"
    )


def _us(played: Sequence[Played]) -> float:
    return 1e6 * sum(p.seconds for p in played) / sum(p.num_asked for p in played)


def report_vips(num_requests: int, seeds: Sequence[int]) -> None:
    name = "conversations and scans"
    print(
        f"\nVIPs in {name}, store of {VIP_SIZE:.0%}: one conversation in {VIP_EVERY}, a quarter of the store\n\n"
        "| | pinned blocks evicted within the quota | beyond it | VIPs' hit rate, pinned | not pinned | all, pinned "
        "| not pinned |\n|---|---|---|---|---|---|---|"
    )
    traces = [TRACES[name](num_requests, seed) for seed in seeds]
    for kind in ("lru", "lfu"):
        played: Mapping[bool, list[Played]] = {
            pin: [play(t, kind, round(VIP_SIZE * len(t.depths)), vip_every=VIP_EVERY, pin=pin) for t in traces]
            for pin in (True, False)
        }
        print(
            f"| {kind} | {sum(p.num_vip_lost for p in played[True])} | {sum(p.num_vip_over for p in played[True])} "
            + "".join(f"| {mean(p.vip_hit_rate for p in played[pin]):.3f} " for pin in (True, False))
            + "".join(f"| {mean(p.hit_rate for p in played[pin]):.3f} " for pin in (True, False))
            + "|"
        )


if __name__ == "__main__":
    main()

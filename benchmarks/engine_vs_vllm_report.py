"""What engine_vs_vllm measured, as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.load import Case
from benchmarks.load_cells import Cell, Series
from benchmarks.load_stats import Spread

OURS = ("colocated", "apart", "before")
COMPARED = {"tokens/s": "tokens_per_s", "TTFT P50": "ttft_p50", "TPOT P50": "tpot_p50", "ITL P99": "itl_p99"}


def report(figures: dict[str, Any]) -> str:
    cells: list[Cell] = figures["cells"]
    sides: list[str] = figures["sides"]
    cases = list(dict.fromkeys(c.case for c in cells))
    parts = [_conditions(figures), _figures(cells, sides, cases)]
    for ours in (side for side in OURS if side in sides):
        peers = [side for side in sides if side not in OURS]
        if ours == "colocated" and "before" in sides:
            peers.append("before")
        if peers:
            parts.append(_ratios(cells, ours, peers, cases))
    parts.append(_floor(figures, cells, cases))
    return "\n\n".join(part for part in parts if part)


def _conditions(figures: dict[str, Any]) -> str:
    cells: list[Cell] = figures["cells"]
    again = sum(cell.tries > 1 for cell in cells)
    return (
        "Conditions: "
        + ", ".join(f"{name} {value}" for name, value in figures["conditions"].items() if value)
        + f". {len(cells)} cells, {again} of them measured again because others used the cores."
        + f" Cores used by others: median {Spread.of(c.other_cores for c in cells).text(2)};"
        + f" by the servers that waited: {Spread.of(c.idle_cores for c in cells).text(2)};"
        + f" by the client: {Spread.of(c.client_cores for c in cells).text(2)}."
    )


def _figures(cells: Sequence[Cell], sides: Sequence[str], cases: Sequence[Case]) -> str:
    lines = [
        "| in/out x streams | side | output tokens/s | TTFT P50 / P99 ms | TPOT P50 / P99 ms | ITL P99 ms | cores |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        for side in sides:
            s = Series.of(cells, side, case)
            mark = "" if s.quiet else " *"
            cores = Spread.of(c.server_cores for c in s.cells.values()).median
            lines.append(
                f"| {case} | {side}{mark} | {s.spread('tokens_per_s').text()} "
                f"| {s.spread('ttft_p50', 1e3).text(0)} / {_ms(s.pooled('ttfts_s', 99), 0)} "
                f"| {s.spread('tpot_p50', 1e3).text()} / {_ms(s.pooled('tpots_s', 99), 1)} "
                f"| {_ms(s.pooled('gaps_s', 99), 0)} | {cores:.2f} |"
            )
    note = "Medians of the rounds (lowest to highest); P99 over the requests of all rounds."
    if any(not Series.of(cells, side, case).quiet for side in sides for case in cases):
        note += " *: others used the cores in every round; the quietest is shown."
    return "\n".join([*lines, "", note])


def _ratios(cells: Sequence[Cell], ours: str, peers: Sequence[str], cases: Sequence[Case]) -> str:
    names = [f"{what}, / {peer}" for peer in peers for what in COMPARED]
    lines = [f"| {ours}: in/out x streams | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|"]
    for case in cases:
        mine = Series.of(cells, ours, case)
        found = []
        for theirs in (Series.of(cells, peer, case) for peer in peers):
            mark = "" if mine.quiet and theirs.quiet else " *"
            found += [mine.ratio(theirs, key).text(2) + mark for key in COMPARED.values()]
        lines.append(f"| {case} | " + " | ".join(found) + " |")
    note = "Ratios made within each round. tokens/s: above 1 ours is faster; the times: below 1 ours is."
    return "\n".join([*lines, "", note])


def _floor(figures: dict[str, Any], cells: Sequence[Cell], cases: Sequence[Case]) -> str:
    """TPOT at one stream over the floor of the cores that decode there. Of several measurements of the bandwidth the
    highest counts: whatever slowed the others did not raise the floor."""
    floor = figures["floor"]
    speeds: dict[str, float] = {cores: max(found) for cores, found in floor["bytes_per_s"].items()}
    lines = ["| in/out x streams | side | TPOT P50 ms | floor ms | ratio |", "|---|---|---|---|---|"]
    for case in (c for c in cases if c.streams == 1):
        for side in figures["sides"]:
            cores = "1" if side == "apart" else max(speeds, key=int)
            floor_s = floor["weight_bytes"] / speeds[cores]
            tpot = Series.of(cells, side, case).spread("tpot_p50")
            times = Spread(tpot.median / floor_s, tpot.low / floor_s, tpot.high / floor_s, tpot.num)
            lines.append(
                f"| {case} | {side} | {_ms(tpot.median, 1)} | {_ms(floor_s, 1)} ({cores} cores) | {times.text(2)} |"
            )
    if len(lines) == 2:
        return ""
    read = ", ".join(
        f"{Spread.of(v / 1e9 for v in found).text()} GB/s with {n}" for n, found in floor["bytes_per_s"].items()
    )
    note = f"{floor['weight_bytes'] / 1e6:.0f} MB of weights; cores read {read}, of which the highest makes the floor."
    return "\n".join([*lines, "", note])


def _ms(seconds: float, digits: int) -> str:
    return "-" if math.isnan(seconds) else f"{1e3 * seconds:,.{digits}f}"

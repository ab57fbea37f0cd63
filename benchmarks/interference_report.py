"""The tables of interference.py, from the rows of its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.load_cells import OTHERS_LIMIT
from benchmarks.load_stats import Spread, percentile, ratios

Row = dict[str, Any]


def report(rows: Sequence[Row]) -> str:
    """A table for each rate, the lowest first, then what follows of them."""
    parts = []
    for every_s in rates(rows):
        parts.append(f"A long prompt every {every_s:g} s:\n\n{table(rows, every_s)}")
    return "\n\n".join([*parts, *conclusions(rows)])


def rates(rows: Sequence[Row]) -> list[float]:
    return sorted({r["every_s"] for r in rows if r["every_s"] is not None}, reverse=True)


def sides(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(r["side"] for r in sorted(rows, key=lambda r: ORDER.index(r["side"]))))


ORDER = ("apart", "colocated", "vllm", "vllm-256")


def of(rows: Sequence[Row], side: str, every_s: float | None) -> dict[int, Row]:
    """By round."""
    return {r["round"]: r for r in rows if (r["side"], r["every_s"]) == (side, every_s)}


def table(rows: Sequence[Row], every_s: float) -> str:
    head = "| side | ITL P99 ms, alone -> with | ratio | steady tokens/s, alone -> with | long TTFT P50 / P99 s |"
    lines = [head, "|---" * 5 + "|"]
    for side in sides(rows):
        alone, loaded = of(rows, side, None), of(rows, side, every_s)
        if not loaded:
            continue
        waits = [s for r in loaded.values() for s in r["long_ttfts_s"]]
        marks = "!" * any(r["grows"] for r in loaded.values())
        marks += "*" * any(r["other_cores"] > OTHERS_LIMIT for r in (*alone.values(), *loaded.values()))
        lines.append(
            f"| {' '.join(filter(None, (side, marks)))} "
            f"| {gaps(alone).text()} -> {gaps(loaded).text()} | {ratio(alone, loaded).text(2)} "
            f"| {speeds(alone).text()} -> {speeds(loaded).text()} "
            f"| {percentile(waits, 50):.2f} / {percentile(waits, 99):.2f} |"
        )
    return "\n".join(lines)


def gaps(rows: dict[int, Row]) -> Spread:
    return Spread.of(1e3 * r["itl_p99_s"] for r in rows.values())


def speeds(rows: dict[int, Row]) -> Spread:
    return Spread.of(r["tokens_per_s"] for r in rows.values())


def ratio(alone: dict[int, Row], loaded: dict[int, Row]) -> Spread:
    """Of ITL P99, made in each round."""
    return ratios({n: r["itl_p99_s"] for n, r in loaded.items()}, {n: r["itl_p99_s"] for n, r in alone.items()})


def conclusions(rows: Sequence[Row]) -> list[str]:
    found = []
    sustained = [e for e in rates(rows) if not any(r["grows"] for r in rows if r["every_s"] == e)]
    if sustained:
        found.append(f"The highest rate that every side sustains: one every {min(sustained):g} s.")
    else:
        found.append("No rate of these is sustained by every side.")
    for other in [side for side in sides(rows) if side != "apart"]:
        if (pays := pays_from(rows, other)) is not None:
            found.append(f"`apart` has the lower ITL P99 than `{other}` from one every {pays:g} s on.")
        elif of(rows, "apart", rates(rows)[-1] if rates(rows) else None):
            found.append(f"`apart` does not keep the lower ITL P99 than `{other}` at the highest of these rates.")
    return found


def pays_from(rows: Sequence[Row], other: str) -> float | None:
    """The lowest rate from which on, at every higher one, apart's ITL P99 is below another side's."""
    found = None
    for every_s in reversed(rates(rows)):
        ours, theirs = of(rows, "apart", every_s), of(rows, other, every_s)
        if not ours or not theirs or gaps(ours).median >= gaps(theirs).median:
            break
        found = every_s
    return found

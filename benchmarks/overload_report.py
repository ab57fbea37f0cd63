"""The table of overload.py, from the rows of its JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.load_cells import OTHERS_LIMIT
from benchmarks.load_stats import Spread, percentile, ratios

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Judged:
    """Of one run. Parts of 1; refusals (429) in seconds, nan without any. `others`: answers with another status, and
    accepted ones that broke off."""

    accepted: float
    in_time: float  # of the accepted
    refusal_p50_s: float
    refusal_p99_s: float
    with_retry_after: float  # of the refused
    goodput_hz: float
    others: int


def judged(row: Row) -> Judged:
    answers, slo_s = row["answers"], row["plan"]["slo_s"]
    # Without an answer until the end: it was not refused.
    accepted = [a for a in answers if a["status"] in (0, 200)]
    refused = [a for a in answers if a["status"] == 429]
    in_time = [a for a in accepted if a["ttft_s"] <= slo_s and not a["broken"]]
    nan = float("nan")
    return Judged(
        accepted=len(accepted) / len(answers),
        in_time=len(in_time) / len(accepted) if accepted else nan,
        refusal_p50_s=percentile((a["done_s"] for a in refused), 50),
        refusal_p99_s=percentile((a["done_s"] for a in refused), 99),
        with_retry_after=sum(bool(a["retry_after"]) for a in refused) / len(refused) if refused else nan,
        goodput_hz=len(in_time) / row["plan"]["window_s"],
        others=len(answers) - len(accepted) - len(refused) + sum(bool(a["broken"]) for a in accepted),
    )


def report(rows: Sequence[Row]) -> str:
    plan = rows[0]["plan"]
    lines = [
        f"{plan['rate_hz']:.2f} requests/s offered ({plan['prompt']} in, {plan['output']} out), promised "
        f"{1e3 * plan['slo_s']:.0f} ms.",
        "",
        "| side | accepted % | of these in time % | refused in ms, P50 / P99 | Retry-After % | goodput/s | others |",
        "|---" * 7 + "|",
    ]
    for side in dict.fromkeys(r["side"] for r in rows):
        mine = [r for r in rows if r["side"] == side]
        mark = " *" * any(r["other_cores"] > OTHERS_LIMIT for r in mine)
        found = [judged(r) for r in mine]
        lines.append(
            f"| {side}{mark} | {Spread.of(100 * j.accepted for j in found).text()} "
            f"| {_text(100 * j.in_time for j in found)} "
            f"| {_text(1e3 * j.refusal_p50_s for j in found)} / {_text(1e3 * j.refusal_p99_s for j in found)} "
            f"| {_text(100 * j.with_retry_after for j in found)} "
            f"| {Spread.of(j.goodput_hz for j in found).text(2)} | {sum(j.others for j in found)} |"
        )
    goodput = {side: _by_round(rows, side) for side in ("admission", "fcfs")}
    if all(goodput.values()):
        lines += ["", f"Goodput, admission to fcfs: {_gain(goodput['admission'], goodput['fcfs'])}."]
    statuses = Counter(a["status"] for r in rows for a in r["answers"] if a["status"] not in (0, 200, 429))
    lines += [f"Other statuses: {dict(statuses)}."] if statuses else []
    broken = [a["broken"] for r in rows for a in r["answers"] if a["broken"]]
    lines += [f"Broken off: {len(broken)}, the first with: {broken[0]}"] if broken else []
    return "\n".join(lines)


def _by_round(rows: Sequence[Row], side: str) -> dict[int, float]:
    return {r["round"]: judged(r).goodput_hz for r in rows if r["side"] == side}


def _gain(ours: dict[int, float], theirs: dict[int, float]) -> str:
    if not any(theirs.values()):
        return "nothing came in time with fcfs"
    return f"{ratios(ours, theirs).text(2)} times"


def _text(values: Any) -> str:
    """Without those that are not a number."""
    return Spread.of(v for v in values if v == v).text()

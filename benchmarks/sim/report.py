"""The tables of a simulation."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.sim.decode import Steps
from benchmarks.sim.fairness import NAMES, WEIGHTS
from benchmarks.sim.figures import Figures
from benchmarks.sim.machines import BLOCK
from benchmarks.sim.prefill import Run
from distserve_prefill.shares import LAG_PASSES


def kept_table(found: Sequence[Figures]) -> str:
    """In time, of the promised."""
    heads = ("all", "vip", "normal", *NAMES, "of accepted", "refused %", "goodput %")
    lines = [f"| load | side | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    for f in found:
        parts = [f.kept, f.kept_by_class["vip"], f.kept_by_class["normal"], *f.kept_by_bucket.values()]
        cells = [percent(v) for v in (*parts, f.kept_of_accepted, f.refused, f.goodput)]
        lines.append(f"| {f.load:g} | {f.side} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ttft_table(found: Sequence[Figures]) -> str:
    """Of the promised, P50 / P99 / P99.9 by bucket, s."""
    lines = [f"| load | side | {' | '.join(NAMES)} |", "|---" * (2 + len(NAMES)) + "|"]
    for f in found:
        cells = [" / ".join(seconds(v) for v in values) for values in f.ttft_s.values()]
        lines.append(f"| {f.load:g} | {f.side} | {' | '.join(cells)} |")
    return "\n".join(lines)


def fairness_table(found: Sequence[Figures]) -> str:
    """The bound: what the scheduler's head says (shares.py), of the longest passes that there might be."""
    heads = (
        "longest wait s: vip",
        "normal",
        "batch",
        "promised nothing, TTFT P99 s: normal",
        "batch",
        "most behind its share, tokens",
        "bound",
        "Jain",
    )
    lines = [f"| load | side | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    for f in found:
        p99s = [f.unpromised_ttft_s[p][1] for p in ("normal", "batch")]
        waits = " | ".join(seconds(v) for v in (*f.longest_wait_s.values(), *p99s))
        bound = f"{bound_tokens(f.pass_tokens):,}" if f.side.startswith("slo") else ""
        lines.append(f"| {f.load:g} | {f.side} | {waits} | {f.worst_lag_tokens:,.0f} | {bound} | {f.jain:.3f} |")
    return "\n".join(lines)


def bound_tokens(pass_tokens: int) -> int:
    return (LAG_PASSES + 1) * pass_tokens + len(NAMES) * len(WEIGHTS) * BLOCK


def shares_table(found: Sequence[Run]) -> str:
    """Of runs in which every flow always had work: what each class had, and would have had by weight."""
    heads = [f"{p} %, of due" for p in WEIGHTS]
    lines = [f"| side | {' | '.join(heads)} | most behind, tokens | bound | Jain |", "|---" * (4 + len(heads)) + "|"]
    for run in found:
        had, due = run.shares.had, run.shares.due
        cells = []
        for priority in WEIGHTS:
            mine = [sum(n for flow, n in of.items() if flow[0] == priority) for of in (had, due)]
            cells.append(f"{percent(mine[0] / sum(had.values()))}, {percent(mine[1] / sum(due.values()))}")
        bound = f"{bound_tokens(run.pass_tokens):,}" if run.side.startswith("slo") else ""
        lag = f"{run.shares.worst_lag:,.0f}"
        lines.append(f"| {run.side} | {' | '.join(cells)} | {lag} | {bound} | {run.shares.jain:.3f} |")
    return "\n".join(lines)


def steps_table(found: Sequence[Steps]) -> str:
    """Decode: promises kept by class, and what they cost."""
    heads = ("kept %: all", "vip", "normal", "tokens/s", "TPOT P50 / P99 ms", "most steps missed in a row")
    lines = [f"| load | side | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    for f in found:
        kept = " | ".join(percent(v) for v in (f.kept, f.kept_by_class["vip"], f.kept_by_class["normal"]))
        pace = f"{1e3 * f.tpot_s[0]:.1f} / {1e3 * f.tpot_s[1]:.1f}"
        lines.append(f"| {f.load:g} | {f.side} | {kept} | {f.tokens_per_s:,.0f} | {pace} | {f.most_missed} |")
    return "\n".join(lines)


def percent(part: float) -> str:
    return "" if part != part else f"{100 * part:.1f}"


def seconds(value: float) -> str:
    """Three digits or so."""
    return "" if value != value else f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.0f}"

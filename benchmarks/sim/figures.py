"""What a run is judged by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.load_stats import percentile
from benchmarks.sim.fairness import NAMES, bucket_of
from benchmarks.sim.machines import Machine
from benchmarks.sim.prefill import Outcome, Run
from distserve.messages import Priority

PRIORITIES: tuple[Priority, ...] = "vip", "normal", "batch"
PERCENTS = (50, 99, 99.9)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of some runs, all prompts together. Parts of 1 and seconds; nan of nothing. `kept`: of the promised (refused ones
    are not kept), by class and by bucket. `goodput`: of the machine's capacity, work of prompts that were promised
    something and had it, or were promised nothing and were computed. TTFTs are P50, P99, P99.9 of those that were not
    refused; `worst_lag_tokens` and `jain` are the worst run's."""

    side: str
    load: float
    kept: float
    kept_by_class: dict[str, float]
    kept_by_bucket: dict[str, float]
    kept_of_accepted: float
    refused: float  # of the promised
    goodput: float
    ttft_s: dict[str, list[float]]  # of the promised, by bucket
    unpromised_ttft_s: dict[str, list[float]]  # by class
    longest_wait_s: dict[str, float]  # until the first chunk, by class
    worst_lag_tokens: float
    pass_tokens: int  # the most that a pass might take
    jain: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def figures(runs: Sequence[Run], machine: Machine, load: float) -> Figures:
    """Of runs of one side."""
    outcomes = [o for run in runs for o in run.outcomes]
    promised = [o for o in outcomes if o.arrival.slo.ttft_s is not None]
    accepted = [o for o in promised if not o.refused]
    good = sum(machine.work_s(o.arrival.num_tokens) for o in outcomes if o.kept and not o.refused)
    buckets = {name: [o for o in outcomes if bucket_of(o.arrival.num_tokens) == i] for i, name in enumerate(NAMES)}
    classes = {p: [o for o in outcomes if o.arrival.slo.priority == p] for p in PRIORITIES}
    return Figures(
        side=runs[0].side,
        load=load,
        kept=part_kept(promised),
        kept_by_class={name: part_kept(mine) for name, mine in classes.items()},
        kept_by_bucket={name: part_kept(mine) for name, mine in buckets.items()},
        kept_of_accepted=part_kept(accepted),
        refused=1 - len(accepted) / len(promised) if promised else 0.0,
        goodput=good / ended_s if (ended_s := sum(run.ended_s for run in runs)) else float("nan"),
        ttft_s={name: ttfts(mine, promised=True) for name, mine in buckets.items()},
        unpromised_ttft_s={name: ttfts(mine, promised=False) for name, mine in classes.items()},
        longest_wait_s={name: longest_wait(mine) for name, mine in classes.items()},
        worst_lag_tokens=max(run.shares.worst_lag for run in runs),
        pass_tokens=max(run.pass_tokens for run in runs),
        jain=min(run.shares.jain for run in runs),
    )


def part_kept(outcomes: Iterable[Outcome]) -> float:
    """Of those that were promised something; nan if none was."""
    kept = [o.kept for o in outcomes if o.arrival.slo.ttft_s is not None]
    return sum(kept) / len(kept) if kept else float("nan")


def ttfts(outcomes: Iterable[Outcome], *, promised: bool) -> list[float]:
    found = [o.ttft_s for o in outcomes if not o.refused and (o.arrival.slo.ttft_s is not None) is promised]
    return [percentile(found, percent) for percent in PERCENTS]


def longest_wait(outcomes: Iterable[Outcome]) -> float:
    return max((o.wait_s for o in outcomes if not o.refused), default=0.0)

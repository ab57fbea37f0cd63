"""Arithmetic of measurements: percentiles, medians with spread, ratios made within rounds, rounds that don't count."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from distserve.bench.quantiles import percentile

__all__ = ["Kept", "Spread", "growth_exponent", "percentile", "quiet_rounds", "ratios"]


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the lowest and the highest of `num` values."""

    median: float
    low: float
    high: float
    num: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        found = list(values)
        if not found:
            return cls(math.nan, math.nan, math.nan, 0)
        return cls(statistics.median(found), min(found), max(found), len(found))

    def text(self, digits: int = 1) -> str:
        """`12.3 (11.8 to 13.0)`; of one value, or of none, no range."""
        if not self.num:
            return "-"
        middle = f"{self.median:,.{digits}f}"
        return middle if self.num == 1 else f"{middle} ({self.low:,.{digits}f} to {self.high:,.{digits}f})"


def ratios(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Spread:
    """ours / theirs, made in each round that both have, so that a slow minute of the machine does not count twice."""
    return Spread.of(ours[r] / theirs[r] for r in sorted(ours.keys() & theirs.keys()) if theirs[r])


@dataclass(frozen=True, slots=True)
class Kept:
    """Which rounds of a series count. `quiet`: others used less than the limit in all of them."""

    rounds: frozenset[int]
    quiet: bool


def quiet_rounds(others: Mapping[int, float], limit: float) -> Kept:
    """`others`: cores that other processes used, by round. Rounds above the limit are dropped; were none to be left,
    the quietest one is kept and the series is marked as not quiet."""
    kept = frozenset(r for r, cores in others.items() if cores <= limit)
    if kept or not others:
        return Kept(kept, quiet=True)
    return Kept(frozenset([min(others, key=lambda r: others[r])]), quiet=False)


def growth_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """p of cost ~ size^p, by least squares over logarithms. 1: in step with the size. Needs two sizes; costs > 0."""
    xs, ys = [math.log(s) for s in sizes], [math.log(c) for c in costs]
    return statistics.linear_regression(xs, ys).slope

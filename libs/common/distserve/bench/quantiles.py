"""Quantiles of samples, when there are too few to say, and how sure they are."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MIN_BEYOND = 10  # samples that must lie beyond a quantile, on its rarer side
MAX_BATCHES = 30
_Z = statistics.NormalDist().inv_cdf(0.975)


def percentile(values: Iterable[float], percent: float) -> float:
    """Between the two nearest values, by linear interpolation; nan of nothing."""
    return at(sorted(values), percent / 100)


def at(ordered: Sequence[float], q: float) -> float:
    """The quantile q, 0 to 1, of values in order; nan of nothing."""
    if not ordered:
        return math.nan
    place = (len(ordered) - 1) * min(1.0, max(0.0, q))
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def num_needed(q: float) -> int:
    """The fewest samples that a quantile is shown of: MIN_BEYOND of them beyond it."""
    return math.ceil(round(MIN_BEYOND / min(q, 1 - q), 6))


@dataclass(frozen=True, slots=True)
class Estimate:
    """`low` to `high`: covers the true quantile in 95 of 100 such measurements, as far as batches are independent."""

    value: float
    low: float
    high: float


def estimate(groups: Sequence[Sequence[float]], q: float) -> Estimate | None:
    """The quantile of all samples, and its interval; None of fewer than num_needed(q).

    `groups`: the samples of each request, in the order in which requests came. Tokens of one request are alike, and so
    are requests that stood in the same queue: neighbours are put into up to 30 batches, and the interval is made of how
    much the batches differ. It is Woodruff's: the share of samples below the quantile is estimated with its standard
    error (a ratio of sums over batches), and the interval's ends are the quantiles at the ends of that share's
    (Woodruff, Confidence intervals for medians and other position measures, JASA 47, 1952)."""
    ordered = sorted(v for group in groups for v in group)
    if len(ordered) < num_needed(q):
        return None
    value = at(ordered, q)
    batches = _batches([g for g in groups if g])
    num = len(batches)
    if num < 2:
        return Estimate(value, math.nan, math.nan)
    offs = [sum(v <= value for v in batch) - q * len(batch) for batch in batches]
    mean = sum(offs) / num
    error = math.sqrt(num / (num - 1) * sum((off - mean) ** 2 for off in offs)) / len(ordered)
    wide = student_t(num - 1) * error
    return Estimate(value, at(ordered, q - wide), at(ordered, q + wide))


def _batches(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    num = min(MAX_BATCHES, len(groups))
    bounds = [len(groups) * i // num for i in range(num + 1)] if num else [0]
    return [[v for group in groups[first:last] for v in group] for first, last in itertools.pairwise(bounds)]


def student_t(freedom: int) -> float:
    """Its 0.975 quantile, by the first terms of the Cornish-Fisher series; within 0.3 % from 4 degrees on."""
    if freedom < 4:
        return (math.inf, 12.706, 4.303, 3.182)[freedom]
    z, n = _Z, freedom
    first = (z**3 + z) / (4 * n)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return z + first + second + third

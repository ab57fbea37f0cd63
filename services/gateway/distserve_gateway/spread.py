"""A fine histogram of seconds: Prometheus sees a few of its bounds, quantiles of any stretch of time come from all.

GRID has GRID_PER_DECADE bounds in each decade from 0.1 ms to 1000 s, and those that Prometheus sees: a quantile read
from it is off by less than 1/20 of itself. One below the grid counts as its lowest bound, one above as its highest.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from distserve.worker.histogram import SECONDS, Histogram

GRID_PER_DECADE = 48
_DECADES = range(-4, 3)

SHORT_S = (*SECONDS[:-2], 40.0, 60.0)
TOKEN_S = tuple(sorted({*SHORT_S, 0.03, 0.075, 0.15, 0.3}))
REQUEST_S = tuple(sorted({*SHORT_S, 0.25, 2.5, 120.0, 300.0, 600.0}))
GRID = tuple(
    sorted(
        {10 ** (decade + step / GRID_PER_DECADE) for decade in _DECADES for step in range(GRID_PER_DECADE)}
        | {*TOKEN_S, *REQUEST_S, 1000.0}
    )
)


class Spread(Histogram):
    """`shown`: the bounds that Prometheus sees, each of them in GRID."""

    __slots__ = ("_shown",)

    def __init__(self, shown: Sequence[float] = REQUEST_S) -> None:
        super().__init__(GRID)
        self._shown = [(repr(bound), GRID.index(bound)) for bound in shown]

    def share(self, seconds: float, num: int) -> None:
        """`num` observations that share these seconds: each is of the mean."""
        self._counts[bisect_left(GRID, seconds / num)] += num
        self.total += seconds

    def buckets(self) -> list[tuple[str, float]]:
        below = list(accumulate(self._counts))
        return [*((name, float(below[i])) for name, i in self._shown), ("+Inf", float(below[-1]))]

    def counts(self) -> list[int]:
        """How many there were between two bounds of GRID, below the first and above the last, until now."""
        return self._counts.copy()


def quantile_of(counts: Sequence[int], share: float) -> float | None:
    """Of what `counts` holds, which is Spread.counts(), or the difference of two: the nearest rank's place among the
    values of its step, as if those lay evenly on a scale of ratios. None of nothing."""
    rank = math.ceil(share * sum(counts))
    if not rank:
        return None
    before = 0
    for i, num in enumerate(counts):
        if before + num >= rank:
            if i in (0, len(GRID)):
                return GRID[min(i, len(GRID) - 1)]
            low, high = GRID[i - 1], GRID[i]
            return float(low * (high / low) ** ((rank - before - 0.5) / num))
        before += num
    raise AssertionError("counts that are negative")


def nearest_rank(ordered: Sequence[float], share: float) -> float | None:
    """Of values in order, the smallest that at most 1 - share of them are over. None of none."""
    return ordered[max(1, math.ceil(share * len(ordered))) - 1] if ordered else None

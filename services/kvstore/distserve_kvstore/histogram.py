"""Durations counted into buckets, as Prometheus wants them."""

from __future__ import annotations

from bisect import bisect_left

BOUNDS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class Histogram:
    """Seconds."""

    __slots__ = ("_counts", "total_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    @property
    def num(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many up to it), the last with bound "+Inf"."""
        found, below = [], 0
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), self._counts, strict=True):
            below += count
            found.append((bound, float(below)))
        return found

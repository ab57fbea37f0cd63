"""Two servers under the same traffic: its slices, and the ratio of each figure with its interval."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from distserve.bench.answers import Result
from distserve.bench.document import Ratio, Side
from distserve.bench.drive import Limits
from distserve.bench.quantiles import at, num_needed
from distserve.bench.summary import QUANTILES, Samples, Window, arrivals
from distserve.bench.traffic import Traffic

MIN_PAIRS = 5  # slices for an interval
RESAMPLES = 400
_MOST_POINTS = 300  # of one slice, for one figure

_LATENCIES: dict[str, Samples] = {
    "ttft": lambda r: [r.ttft_s()],
    "itl": lambda r: r.gaps_s(),
    "tpot": lambda r: [r.tpot_s],
    "e2e": lambda r: [r.e2e_s],
}


def slices(traffic: Traffic, limits: Limits, num: int) -> Iterator[tuple[Traffic, Limits]]:
    """So many equal parts of it, without warm-up. Requests that don't divide are spread over the first ones."""
    for i, part in enumerate(traffic.parts(num)):
        requests = limits.num_requests
        own = None if requests is None else requests // num + (i < requests % num)
        duration_s = None if limits.duration_s is None else limits.duration_s / num
        yield part, replace(limits, num_requests=own, duration_s=duration_s, warm_requests=0, warm_s=0.0)


def ratios(sides: Sequence[Side], results: Sequence[Result]) -> list[Ratio]:
    """B over A, of throughput and of each quantile that there are enough samples for.

    Intervals are of a bootstrap over pairs of slices (the same traffic to both, one right after the other), percentiles
    of RESAMPLES draws; None of fewer than MIN_PAIRS pairs."""
    a, b = ([_in_slice(results, side.name, w) for w in side.windows] for side in sides)
    lengths = [[_length_s(results, side.name, w) for w in side.windows] for side in sides]
    found = [
        _rate("output tokens/s", lambda r: sum(n for _, n in arrivals(r)), a, b, lengths),
        _rate("requests/s", lambda r: 1.0, a, b, lengths),
    ]
    for name, samples in _LATENCIES.items():
        found += _quantiles(name, [_points(part, samples) for part in a], [_points(part, samples) for part in b])
    return found


def _sent_in(results: Sequence[Result], name: str, window: Window) -> list[Result]:
    begin, end = window
    return [r for r in results if r.server == name and begin <= r.due_s <= end]


def _in_slice(results: Sequence[Result], name: str, window: Window) -> list[Result]:
    return [r for r in _sent_in(results, name, window) if r.ok]


def _length_s(results: Sequence[Result], name: str, window: Window) -> float:
    """Until what was sent in it has ended, the failed too, which with a duration is later than the window's end."""
    begin, end = window
    return max((r.done_s for r in _sent_in(results, name, window)), default=end) - begin


def _rate(
    figure: str,
    amount: Callable[[Result], float],
    a: Sequence[Sequence[Result]],
    b: Sequence[Sequence[Result]],
    lengths: Sequence[Sequence[float]],
) -> Ratio:
    """Of all answers of a slice, over how long the slice took until its last answer."""
    sums = [[sum(map(amount, part)) for part in parts] for parts in (a, b)]

    def of(side: int, chosen: Sequence[int]) -> float:
        seconds = sum(lengths[side][i] for i in chosen)
        return sum(sums[side][i] for i in chosen) / seconds if seconds else math.nan

    return _ratio(figure, len(a), lambda chosen: (of(0, chosen), of(1, chosen)))


def _points(part: Sequence[Result], samples: Samples) -> list[float]:
    return sorted(v for r in part for v in samples(r) if v is not None)


def _quantiles(name: str, a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> Iterator[Ratio]:
    sides = [_Weighed(a), _Weighed(b)]
    for label, q in QUANTILES.items():
        figure = f"{name} {label}"
        if min(side.num for side in sides) < num_needed(q):
            yield Ratio(figure=figure, a=None, b=None)
            continue
        exact = [at(sorted(v for part in parts for v in part), q) for parts in (a, b)]
        found = _ratio(figure, len(a), lambda chosen, q=q: (sides[0].at(chosen, q), sides[1].at(chosen, q)))  # type: ignore[misc]
        yield Ratio(
            figure=figure, a=exact[0], b=exact[1], ratio=_over(exact[1], exact[0]), low=found.low, high=found.high
        )


class _Weighed:
    """Samples of slices, thinned to points that stand for several each, for quantiles of many draws of slices."""

    def __init__(self, parts: Sequence[Sequence[float]]) -> None:
        self.num = sum(map(len, parts))
        points = []
        for i, part in enumerate(parts):
            num = min(_MOST_POINTS, len(part))
            points += [(at(part, (k + 0.5) / num), i, len(part) / num) for k in range(num)]
        self._points = sorted(points)
        self._weights = [len(part) for part in parts]

    def at(self, chosen: Sequence[int], q: float) -> float:
        times = [0] * len(self._weights)
        for i in chosen:
            times[i] += 1
        left = q * sum(n * weight for n, weight in zip(times, self._weights, strict=True))
        for value, i, weight in self._points:
            left -= times[i] * weight
            if left <= 0 and times[i]:
                return value
        return self._points[-1][0] if self._points else math.nan


def _ratio(figure: str, num: int, of: Callable[[Sequence[int]], tuple[float, float]]) -> Ratio:
    """`of`: both sides' figures over these of `num` pairs of slices."""
    a, b = of(range(num))
    low = high = None
    if num >= MIN_PAIRS:
        rng = random.Random(figure)
        drawn = sorted(r for _ in range(RESAMPLES) if (r := _drawn(rng, num, of)) is not None)
        if drawn:
            low, high = at(drawn, 0.025), at(drawn, 0.975)
    return Ratio(figure=figure, a=a, b=b, ratio=_over(b, a), low=low, high=high)


def _drawn(rng: random.Random, num: int, of: Callable[[Sequence[int]], tuple[float, float]]) -> float | None:
    a, b = of(rng.choices(range(num), k=num))
    return _over(b, a)


def _over(b: float, a: float) -> float | None:
    return b / a if a and math.isfinite(a) and math.isfinite(b) else None

"""Quantiles, when there are too few samples for one, and their intervals."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.bench.quantiles import Estimate, at, estimate, num_needed, percentile, student_t


@pytest.mark.parametrize(("q", "needed"), [(0.5, 20), (0.9, 100), (0.99, 1000), (0.999, 10_000), (0.1, 100)])
def test_ten_samples_must_lie_beyond_a_quantile(q: float, needed: int) -> None:
    assert num_needed(q) == needed
    assert estimate([[float(i)] for i in range(needed - 1)], q) is None
    assert estimate([[float(i)] for i in range(needed)], q) is not None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
def test_a_quantile_lies_within_the_values_and_grows_with_q(values: list[float], q: float) -> None:
    ordered = sorted(values)
    assert ordered[0] <= at(ordered, q) <= ordered[-1]
    assert at(ordered, q / 2) <= at(ordered, q) + 1e-6
    assert percentile(values, 0) == ordered[0]
    assert percentile(values, 100) == ordered[-1]


def test_quantiles_of_nothing_are_nan() -> None:
    assert math.isnan(percentile([], 50))
    assert estimate([], 0.5) is None


@given(st.lists(st.lists(st.floats(0, 1000), max_size=5), min_size=30, max_size=60))
def test_the_interval_holds_the_value(groups: list[list[float]]) -> None:
    found = estimate(groups, 0.5)
    if found is not None and not math.isnan(found.low):
        assert found.low <= found.value + 1e-9
        assert found.value <= found.high + 1e-9


def covered(draw: str, q: float, truth: float, runs: int = 400) -> float:
    """The share of runs whose interval holds the true quantile."""
    rng, hits = random.Random(5), 0
    for _ in range(runs):
        found = estimate(GROUPS[draw](rng), q)
        assert isinstance(found, Estimate)
        hits += found.low <= truth <= found.high
    return hits / runs


def independent(rng: random.Random) -> list[list[float]]:
    return [[rng.expovariate(1.0)] for _ in range(300)]


def clustered(rng: random.Random) -> list[list[float]]:
    """Requests whose 20 tokens are nearly all alike: far fewer samples than there are values."""
    groups = []
    for _ in range(90):
        own = rng.expovariate(1.0)
        groups.append([own * rng.uniform(0.99, 1.01) for _ in range(20)])
    return groups


GROUPS = {"independent": independent, "clustered": clustered}


@pytest.mark.parametrize("draw", ["independent", "clustered"])
def test_intervals_cover_the_true_median_as_often_as_they_say(draw: str) -> None:
    assert 0.91 <= covered(draw, 0.5, math.log(2)) <= 0.99


def test_intervals_cover_a_true_p90() -> None:
    assert 0.89 <= covered("independent", 0.9, math.log(10)) <= 0.99


def test_tokens_taken_as_independent_would_be_far_too_sure() -> None:
    """What the test above would catch: the same values, each a group of its own, in any order."""
    rng, hits = random.Random(5), 0
    for _ in range(200):
        values = [v for group in clustered(rng) for v in group]
        rng.shuffle(values)
        found = estimate([[v] for v in values], 0.5)
        assert found is not None
        hits += found.low <= math.log(2) <= found.high
    assert hits / 200 < 0.6


@pytest.mark.parametrize(
    ("freedom", "value"), [(1, 12.706), (3, 3.182), (4, 2.776), (9, 2.262), (19, 2.093), (29, 2.045), (999, 1.962)]
)
def test_students_t(freedom: int, value: float) -> None:
    assert student_t(freedom) == pytest.approx(value, rel=0.004)

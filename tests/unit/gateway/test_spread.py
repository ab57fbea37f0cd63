"""A fine histogram: its quantiles are nearly exact, and Prometheus sees what the client library would show."""

import math

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from distserve_gateway.families import histogram
from distserve_gateway.metrics import Metrics
from distserve_gateway.spread import GRID, REQUEST_S, TOKEN_S, Spread, nearest_rank, quantile_of

VALUES = st.one_of(st.sampled_from(REQUEST_S), st.floats(0.0001, 900.0))
BEFORE = {  # bounds that dashboards may ask for by name
    "ttft": (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60),
    "itl": (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5),
    "e2e": (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600),
}


@given(st.lists(VALUES, min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_quantile_is_off_by_less_than_a_twentieth(values: list[float], share: float) -> None:
    spread = Spread()
    for value in values:
        spread.observe(value)
    exact, read = nearest_rank(sorted(values), share), quantile_of(spread.counts(), share)
    assert exact is not None
    assert read == pytest.approx(exact, rel=0.05)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=50), st.floats(0.001, 1.0))
def test_the_nearest_rank_leaves_no_more_above_it_than_it_may(values: list[float], share: float) -> None:
    found = nearest_rank(sorted(values), share)
    assert found in values
    assert sum(value > found for value in values) <= (1 - share) * len(values) + 1e-9
    smaller = [value for value in values if value < found]
    assert all(sum(value > less for value in values) > (1 - share) * len(values) - 1e-9 for less in smaller)


def test_of_nothing_there_is_no_quantile_and_beyond_the_grid_its_ends() -> None:
    spread = Spread()
    assert (quantile_of(spread.counts(), 0.5), nearest_rank([], 0.5)) == (None, None)
    spread.observe(1e-9)
    assert quantile_of(spread.counts(), 0.5) == GRID[0]
    spread.observe(1e9, 9)
    assert quantile_of(spread.counts(), 0.5) == GRID[-1]


@given(st.lists(st.tuples(st.one_of(VALUES, st.floats(0, 5000)), st.integers(1, 5)), max_size=30))
def test_it_is_exposed_like_the_librarys(observations: list[tuple[float, int]]) -> None:
    registry = CollectorRegistry()
    other = prometheus_client.Histogram("d_seconds", "text", ["model"], buckets=TOKEN_S, registry=registry)
    bound = other.labels(model="m")
    mine = Spread(TOKEN_S)
    for value, num in observations:
        mine.observe(value, num)
        for _ in range(num):
            bound.observe(value)
    shown = histogram("d_seconds", "text", ("model", "m"), mine).samples
    found = {(sample.name, sample.labels.get("le")): sample.value for sample in shown}
    text = generate_latest(registry).decode()
    for (name, le), value in found.items():
        labels = f'{{le="{le}",model="m"}}' if le else '{model="m"}'
        wanted = next(line for line in text.splitlines() if line.startswith(name + labels))
        assert math.isclose(float(wanted.rpartition(" ")[2]), value, abs_tol=1e-9), wanted
    assert len(found) == len(TOKEN_S) + 3


def test_bounds_reach_from_a_millisecond_to_a_minute_and_none_of_before_is_gone() -> None:
    metrics = Metrics("tiny", lambda: 0)
    shown = {
        family.name.removeprefix("distserve_gateway_").removesuffix("_seconds"): [
            float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")
        ]
        for family in metrics.registry.collect()
        if family.type == "histogram"
    }
    for name in ("ttft", "itl", "tpot", "e2e", "stage"):
        bounds = set(shown[name])
        assert {float(f"{digit}e{power}") for power in (-3, -2, -1, 0) for digit in (1, 2, 5)} <= bounds
        assert {10.0, 20.0, 60.0, math.inf} <= bounds
        assert set(BEFORE.get(name, ())) <= bounds

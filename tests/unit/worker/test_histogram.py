"""Our own histogram says what the client library's says."""

import itertools
import math

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from distserve.worker.histogram import SECONDS, Histogram, Histograms, bounds_between, doublings

BOUNDS = (0.005, 0.1, 1.0, 20.0)
VALUES = st.one_of(st.sampled_from(BOUNDS), st.floats(0, 100))


def lines(registry: CollectorRegistry) -> dict[str, float]:
    text = generate_latest(registry).decode()
    rows = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in rows if "_created" not in name}


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), VALUES, st.integers(1, 5)), max_size=30))
def test_series_are_exposed_like_the_librarys(observations: list[tuple[str, float, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = Histograms("d_seconds", "text", ("model", "phase"), BOUNDS)
    ours.register(mine)
    other = prometheus_client.Histogram("d_seconds", "text", ["model", "phase"], buckets=BOUNDS, registry=theirs)
    for phase, value, num in observations:
        mine.of("m", phase).observe(value, num)
        for _ in range(num):
            other.labels("m", phase).observe(value)
    found, wanted = lines(ours), lines(theirs)
    assert found.keys() == wanted.keys()
    assert all(math.isclose(found[name], wanted[name], abs_tol=1e-9) for name in wanted)


def test_one_counts_up_to_each_bound() -> None:
    histogram = Histogram((0.001, 0.1))
    for seconds in (0.00005, 0.001, 0.002, 20.0):
        histogram.observe(seconds)
    assert histogram.buckets() == [("0.001", 2), ("0.1", 3), ("+Inf", 4)]
    assert histogram.num == 4
    assert math.isclose(histogram.total, 20.00305)


def test_the_series_of_the_same_values_is_the_same() -> None:
    histograms = Histograms("d", "text", ("phase",), BOUNDS)
    assert histograms.of("a") is histograms.of("a") is not histograms.of("b")
    with pytest.raises(ValueError, match="'phase'"):
        histograms.of("a", "b")


@pytest.mark.parametrize(
    ("least", "most", "bounds"),
    [
        (0.001, 0.01, (0.001, 0.002, 0.005, 0.01)),
        (0.2, 6.0, (0.2, 0.5, 1.0, 2.0, 5.0, 6.0)),
        (5.0, 5.0, (5.0,)),
    ],
)
def test_bounds_are_round_and_end_where_they_should(least: float, most: float, bounds: tuple[float, ...]) -> None:
    assert bounds_between(least, most) == bounds


def test_bounds_for_seconds_go_from_a_millisecond_to_a_minute() -> None:
    assert (SECONDS[0], SECONDS[-1]) == (0.001, 60.0)
    assert all(1 < after / before <= 2.5 for before, after in itertools.pairwise(SECONDS))


def test_doublings_end_below_the_most() -> None:
    assert doublings(1, 8) == (1, 2, 4, 8)
    assert doublings(3, 20) == (3, 6, 12)

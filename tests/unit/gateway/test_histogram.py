"""The gateway's own histogram says what the client library's says."""

import math

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from distserve_gateway.histogram import Histogram

BOUNDS = (0.005, 0.1, 1.0, 20.0)
VALUES = st.one_of(st.sampled_from(BOUNDS), st.floats(0, 100))


def lines(registry: CollectorRegistry) -> dict[str, float]:
    text = generate_latest(registry).decode()
    rows = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in rows if "_created" not in name}


@given(st.lists(st.tuples(VALUES, st.integers(1, 5)), max_size=30))
def test_it_is_exposed_like_the_librarys(observations: list[tuple[float, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = Histogram("d_seconds", "text", {"model": "m"}, BOUNDS)
    ours.register(mine)
    other = prometheus_client.Histogram("d_seconds", "text", ["model"], buckets=BOUNDS, registry=theirs)
    bound = other.labels(model="m")
    for value, num in observations:
        mine.observe(value, num)
        for _ in range(num):
            bound.observe(value)
    found, wanted = lines(ours), lines(theirs)
    assert found.keys() == wanted.keys()
    assert all(math.isclose(found[name], wanted[name], abs_tol=1e-9) for name in wanted)

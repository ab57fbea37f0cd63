"""Reading an exposition, and what its counters have grown by."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from distserve_gateway.samples import Samples, Since

TEXT = """\
# HELP a_total Of something.
# TYPE a_total counter
a_total{kind="x",peer="p0"} 3.0
a_total{kind="x",peer="p1"} 4.0
a_total{kind="y",peer="p0"} 5.0
# TYPE b gauge
b 7
# TYPE unwanted counter
unwanted{kind="x"} 9
"""
WANTED = {"a_total", "b"}


def read(text: str, at: float = 0.0, wanted: set[str] = WANTED) -> Samples:
    samples = Samples(at)
    samples.take(text.split("\n"), wanted)
    return samples


def test_what_is_wanted_is_found_by_name_and_labels_and_the_rest_is_passed_over() -> None:
    samples = read(TEXT)
    assert samples.total("a_total") == 12
    assert samples.total("a_total", kind="x") == 7
    assert samples.total("a_total", kind="x", peer="p1") == 4
    assert samples.total("b") == 7
    assert samples.total("a_total", kind="z") is None
    assert samples.total("unwanted") is None


@pytest.mark.parametrize(
    "line", ["", "#", "b", "b ", "b x", "{", 'a_total{kind="x"', 'a_total{kind="x"} ', "# b 1", " b 1", "b{ 1 2 x"]
)
def test_what_is_no_sample_is_passed_over(line: str) -> None:
    samples = read(line)
    assert samples.total("b") is None
    assert samples.total("a_total") is None


@pytest.mark.parametrize("value", ["NaN", "nan", "+Inf", "-Inf", "inf", "1e999", "1e300", "-1e300"])
def test_what_no_count_can_be_is_no_sample(value: str) -> None:
    assert read(f"b {value}").total("b") is None


@given(st.lists(st.tuples(st.text(max_size=8), st.text(max_size=8)), unique=True, max_size=6))
def test_any_label_values_are_read_as_prometheus_reads_them(values: list[tuple[str, str]]) -> None:
    registry = CollectorRegistry()
    counter = Counter("a", "Of something.", ["kind", "peer"], registry=registry)
    for i, (kind, peer) in enumerate(values):
        counter.labels(kind, peer).inc(i + 0.25)
    text = generate_latest(registry).decode()
    expected = {
        (s.labels["kind"], s.labels["peer"]): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if s.name == "a_total"
    }
    found = {(has["kind"], has["peer"]): value for _, has, value in read(text).series("a_total")}
    assert found == expected


@pytest.mark.parametrize(
    ("before", "now", "grown"),
    [
        ("b 3", "b 10", 7.0),
        ("b 10", "b 10", 0.0),
        ("b 10", "b 4", 4.0),  # the service was started anew
        ("", "b 4", 4.0),  # the series is new
        ("b 4", "", 0.0),  # and gone
        ('a_total{kind="x"} 5\na_total{kind="y"} 5', 'a_total{kind="x"} 6\na_total{kind="y"} 1', 2.0),
    ],
)
def test_growth_is_the_difference_and_a_counter_that_fell_begins_at_0(before: str, now: str, grown: float) -> None:
    since = Since(read(now, at=12.0), read(before, at=10.0))
    assert since.grown("b") + since.grown("a_total") == grown
    assert since.rate("b") + since.rate("a_total") == grown / 2


def test_without_an_earlier_time_nothing_has_grown() -> None:
    since = Since(read(TEXT, at=12.0), None)
    assert (since.seconds, since.grown("a_total"), since.rate("a_total"), since.grown_by("a_total", "kind")) == (
        0.0,
        0.0,
        0.0,
        {},
    )


def test_growth_is_summed_by_labels() -> None:
    since = Since(read(TEXT, at=2.0), read('a_total{kind="x",peer="p0"} 1', at=1.0))
    assert since.grown_by("a_total", "kind") == {("x",): 6.0, ("y",): 5.0}
    assert since.grown_by("a_total", "kind", "nothing", peer="p0") == {("x", ""): 2.0, ("y", ""): 5.0}

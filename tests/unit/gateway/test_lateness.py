"""The P99 of times to first token, second by second."""

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.messages import Priority
from distserve_gateway.lateness import Lateness, Wait, p99

LIMIT_S = 0.3
PRIORITIES: tuple[Priority, ...] = get_args(Priority)


@given(st.lists(st.floats(0, 100) | st.just(math.inf), min_size=1, max_size=400))
def test_no_smaller_value_has_at_most_one_per_cent_above_it(values: list[float]) -> None:
    found = p99(values)
    assert found in values
    assert sum(v > found for v in values) <= 0.01 * len(values)
    smaller = [v for v in values if v < found]
    if smaller:
        assert sum(v > max(smaller) for v in values) > 0.01 * len(values)


@pytest.mark.parametrize(("num_late", "is_late"), [(0, False), (1, False), (2, True)])
def test_of_a_hundred_one_may_be_late(num_late: int, is_late: bool) -> None:
    lateness = Lateness(LIMIT_S)
    for i in range(100):
        lateness.end(lateness.begin(0.0, "normal"), 2.0 if i < num_late else 0.1)
    found = lateness.second(1.0)
    assert found is not None
    assert (found > LIMIT_S) is is_late


def test_a_second_without_requests_says_nothing() -> None:
    lateness = Lateness(LIMIT_S)
    assert lateness.second(1.0) is None
    lateness.begin(1.9, "vip")
    assert lateness.second(2.0) is None, "it has waited for less than the limit"


def test_who_waits_too_long_is_late_in_every_second_until_the_token_comes() -> None:
    lateness = Lateness(LIMIT_S)
    wait = lateness.begin(0.5, "normal")
    assert lateness.second(1.0) == pytest.approx(0.5)
    assert lateness.second(2.0) == pytest.approx(1.5)
    lateness.end(wait, 1.6)
    assert lateness.second(3.0) == pytest.approx(1.6)
    assert lateness.second(4.0) is None
    assert len(lateness) == 0


def test_a_client_that_leaves_says_nothing_more() -> None:
    lateness = Lateness(LIMIT_S)
    wait = lateness.begin(0.0, "normal")
    lateness.drop(wait)
    lateness.drop(wait)
    lateness.end(wait, 9.0)
    assert lateness.second(9.0) is None


def test_what_is_forgotten_is_not_counted_when_it_comes_after_all() -> None:
    lateness = Lateness(LIMIT_S)
    old = lateness.begin(0.0, "normal")
    lateness.end(lateness.begin(0.0, "normal"), 5.0)
    lateness.forget()
    new = lateness.begin(5.0, "normal")
    lateness.end(old, 6.0)
    lateness.end(new, 0.1)
    assert lateness.second(6.0) == pytest.approx(0.1)


def test_a_failure_is_a_token_that_never_comes() -> None:
    lateness = Lateness(LIMIT_S)
    lateness.end(lateness.begin(0.0, "normal"), math.inf)
    assert lateness.second(1.0) == math.inf


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("begin"), st.sampled_from(PRIORITIES)),
            st.tuples(st.just("end"), st.integers(0, 30)),
            st.tuples(st.just("drop"), st.integers(0, 30)),
            st.tuples(st.just("pass"), st.sampled_from([0.05, 0.2, 0.7])),
            st.tuples(st.just("second"), st.sets(st.sampled_from(PRIORITIES))),
        ),
        max_size=60,
    )
)
def test_each_wait_counts_once_when_it_ends_and_before_that_in_seconds_in_which_it_is_too_long(
    steps: list[tuple[str, object]],
) -> None:
    lateness = Lateness(LIMIT_S)
    now = 0.0
    begun: list[Wait] = []
    open_waits: list[Wait] = []
    ended: list[tuple[Priority, float]] = []
    for what, value in steps:
        if what == "begin":
            begun.append(lateness.begin(now, value))  # type: ignore[arg-type]
            open_waits.append(begun[-1])
        elif what == "pass":
            now += value  # type: ignore[operator]
        elif what == "second":
            values = [s for priority, s in ended if priority in value]  # type: ignore[operator]
            values += [
                now - w.began
                for w in open_waits
                if w.priority in value and now - w.began > LIMIT_S  # type: ignore[operator]
            ]
            assert lateness.second(now, value) == p99(values)  # type: ignore[arg-type]
            ended = []
        elif begun:
            wait = begun[value % len(begun)]  # type: ignore[operator]
            if what == "end":
                lateness.end(wait, now - wait.began)
                if wait in open_waits:
                    ended.append((wait.priority, now - wait.began))
            else:
                lateness.drop(wait)
            if wait in open_waits:
                open_waits.remove(wait)
        assert len(lateness) == len(open_waits)

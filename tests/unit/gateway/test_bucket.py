"""The bucket of a limit a minute: never more than it holds and regains, and what it says of waiting is true."""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve_gateway.bucket import SPAN_S, Bucket, Charge

STEPS = st.lists(
    st.tuples(
        st.floats(0, 90),  # time that passes, s
        st.floats(0, 1.1),  # then such a part of what it holds is asked for
        st.integers(0, 3),  # and so many of those that are open end
        st.randoms(use_true_random=False),
    ),
    max_size=40,
)


@dataclass
class Taken:
    at: float
    amount: int
    charge: Charge
    used: int | None = None

    @property
    def counted(self) -> int:
        return self.amount if self.used is None else self.used


@dataclass
class Played:
    """A bucket to which something has happened."""

    bucket: Bucket
    now: float = 1000.0
    taken: list[Taken] = field(default_factory=list)

    def play(self, steps: list) -> "Played":
        for passing, part, num_ends, random in steps:
            self.now += passing
            amount = round(part * part * self.bucket.per_minute)  # mostly small
            still_open = [one for one in self.taken if one.used is None]
            for one in random.sample(still_open, min(num_ends, len(still_open))):
                one.used = random.randint(0, one.amount)
                self.bucket.settle(one.charge, one.used)
            if self.bucket.wait_s(amount, self.now) == 0:
                self.taken.append(Taken(self.now, amount, self.bucket.take(amount, self.now)))
        return self


@given(st.integers(1, 300), STEPS)
def test_in_no_window_is_more_used_than_it_holds_and_regains(per_minute: int, steps: list) -> None:
    taken = Played(Bucket(per_minute)).play(steps).taken
    for i, first in enumerate(taken):
        used = 0
        for last in taken[i:]:
            used += last.counted
            assert used <= per_minute * (1 + (last.at - first.at) / 60) + 0.01


@given(st.integers(1, 300), STEPS)
def test_after_corrections_it_is_as_if_the_right_amount_had_been_taken_at_first(per_minute: int, steps: list) -> None:
    played = Played(Bucket(per_minute)).play(steps)
    for one in played.taken:
        if one.used is None:
            one.used = one.amount // 3
            played.bucket.settle(one.charge, one.used)
    honest = Bucket(per_minute)
    for one in played.taken:
        assert honest.wait_s(one.counted, one.at) < 1e-4
        honest.take(one.counted, one.at)
    for amount in (1, per_minute // 2, per_minute):
        assert played.bucket.wait_s(amount, played.now) == pytest.approx(honest.wait_s(amount, played.now), abs=1e-3)


@given(st.integers(1, 300), STEPS, st.integers(0, 400))
def test_what_it_says_is_there_then_is_there_then_and_not_before(per_minute: int, steps: list, amount: int) -> None:
    played = Played(Bucket(per_minute)).play(steps)
    wait_s = played.bucket.wait_s(amount, played.now)
    if amount > per_minute:
        assert wait_s == math.inf
        return
    assert 0 <= wait_s <= SPAN_S + 1e-3
    assert played.bucket.wait_s(amount, played.now + wait_s) == 0
    if wait_s > 0.01:
        assert played.bucket.wait_s(amount, played.now + wait_s - 0.001) > 0


def test_what_a_full_bucket_would_not_have_regained_is_not_given_back() -> None:
    bucket = Bucket(60)
    early = bucket.take(60, 0.0)
    bucket.take(60, 60.0)  # a minute later it is full again, and used up
    bucket.settle(early, 0)  # the first has used nothing: but a full bucket had nothing to gain in that minute
    assert bucket.wait_s(1, 60.0) == pytest.approx(1.0)


def test_what_was_not_used_is_back_at_once() -> None:
    bucket = Bucket(60)
    first, second = bucket.take(40, 0.0), bucket.take(20, 0.0)
    assert bucket.wait_s(30, 0.0) == pytest.approx(30.0)
    bucket.settle(first, 10)
    assert bucket.wait_s(30, 0.0) == 0
    assert bucket.wait_s(31, 0.0) == pytest.approx(1.0)
    bucket.settle(second, 20)
    assert bucket.wait_s(30, 0.0) == 0


def test_it_is_no_matter_in_which_order_they_end() -> None:
    bucket = Bucket(60)
    first, second, third = (bucket.take(20, 0.0) for _ in range(3))
    bucket.settle(second, 0)
    bucket.settle(first, 0)
    assert bucket.wait_s(40, 0.0) == 0
    assert bucket.wait_s(41, 0.0) == pytest.approx(1.0)
    bucket.settle(third, 0)
    assert bucket.wait_s(60, 0.0) == 0

"""Leaving out who fails: by a clock that a test moves."""

import math

import pytest

from distserve.worker.store.pauses import FIRST_S, MAX_S, Pauses


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def pauses(clock: Clock, try_s: float = 0.0) -> Pauses[str]:
    return Pauses(try_s=try_s, now=clock)


def test_each_failure_leaves_out_for_twice_as_long_up_to_a_limit(clock: Clock) -> None:
    p = pauses(clock)
    assert "n" not in p
    lasted = []
    for _ in range(8):
        p.failed("n")
        assert "n" in p
        lasted.append(p.next_end - clock.now)
        clock.now = p.next_end
        assert "n" not in p
        assert p.trying("n")
    assert lasted == [FIRST_S * 2**i for i in range(5)] + [MAX_S] * 3


def test_one_tries_again_and_the_others_go_on_without(clock: Clock) -> None:
    p = pauses(clock, try_s=5.0)
    assert not p.trying("n"), "nothing has failed"
    p.failed("n")
    assert not p.trying("n"), "too early"
    clock.now += FIRST_S
    assert p.trying("n")
    assert "n" in p
    assert not p.trying("n")
    clock.now += 4.9
    assert "n" in p, "a try may take its time"


def test_a_try_that_succeeds_ends_it(clock: Clock) -> None:
    p = pauses(clock)
    p.failed("n")
    clock.now += FIRST_S
    p.trying("n")
    assert p.succeeded("n")
    assert "n" not in p
    assert len(p) == 0
    p.failed("n")
    assert p.next_end == clock.now + FIRST_S, "as if it had never failed"


def test_a_try_of_which_nothing_is_heard_is_followed_by_another(clock: Clock) -> None:
    p = pauses(clock, try_s=5.0)
    p.failed("n")
    clock.now += FIRST_S
    assert p.trying("n")
    clock.now += 5.0
    assert "n" not in p
    assert p.trying("n")


def test_failures_of_what_was_begun_before_the_first_count_once(clock: Clock) -> None:
    p = pauses(clock)
    for _ in range(20):
        p.failed("n")
    assert p.next_end == clock.now + FIRST_S


def test_who_is_gone_is_forgotten(clock: Clock) -> None:
    p = pauses(clock)
    p.failed("a")
    p.failed("b")
    p.forget(lambda key: key == "a")
    assert ("a" in p, "b" in p, len(p)) == (False, True, 1)
    p.forget(lambda key: True)
    assert p.next_end == math.inf

"""Expected lengths: what has ended tells how long the others will be."""

import statistics

from hypothesis import given
from hypothesis import strategies as st

from distserve_decode.lengths import AT_FIRST, LEAST, WINDOW, Lengths, guess_tokens


def learnt(ends: list[int], guess: int = AT_FIRST) -> Lengths:
    lengths = Lengths(guess)
    for end in ends:
        lengths.note(end)
    return lengths


def test_until_enough_have_ended_each_is_thought_to_become_as_long_as_it_may() -> None:
    assert learnt([5] * (LEAST - 1)).expected(1, 400) == 400
    assert learnt([]).expected(1, 100_000) == AT_FIRST, "a chat that names no limit hardly ever fills the context"
    assert learnt([]).expected(900, 100_000) == 1800
    assert learnt([]).expected(900, 1200) == 1200
    assert learnt([5] * LEAST).expected(1, 400) == 5


def test_it_is_the_median_of_those_that_got_longer() -> None:
    lengths = learnt([10] * 20 + [100] * 10)
    assert [lengths.expected(n, 1000) for n in (1, 9, 10, 99)] == [10, 10, 100, 100]


def test_longer_than_any_it_goes_on_for_as_long_again() -> None:
    lengths = learnt([10] * 20)
    assert lengths.expected(10, 1000) == 20
    assert lengths.expected(30, 1000) == 60
    assert lengths.expected(30, 40) == 40, "but not for longer than it may"


def test_what_nobody_knows_is_a_part_of_the_pool_at_most() -> None:
    assert [guess_tokens(n, 16) for n in (4, 20, 128, 512, 10_000)] == [16, 32, 256, 1024, AT_FIRST]
    assert [learnt([], 256).expected(n, 9000) for n in (1, 200, 256, 3000)] == [256, 400, 512, 3256]
    assert [learnt([10] * 20, 256).expected(n, 9000) for n in (1, 100, 3000)] == [10, 200, 3256]
    assert learnt([5000] * 20, 256).expected(1, 9000) == 5000, "what is known is not cut"


def test_what_ended_long_ago_is_forgotten() -> None:
    assert learnt([1000] * WINDOW + [10] * WINDOW).expected(1, 5000) == 10


@given(st.lists(st.integers(1, 60), min_size=LEAST, max_size=2 * WINDOW), st.integers(0, 80), st.integers(81, 200))
def test_whatever_ended_the_expectation_lies_among_it(ends: list[int], num_so_far: int, most: int) -> None:
    expected = learnt(ends).expected(num_so_far, most)
    longer = [n for n in ends[-WINDOW:] if n > num_so_far]
    if longer:
        assert expected == statistics.median_high(longer)
    else:
        assert num_so_far <= expected <= most

"""The prompts' part of a pass: bounded by what the steps beside it take, measured, and never nothing for long."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve_decode.pace import Pace

BLOCK = 16
STRETCH = 3.0
CHUNK = 256

Machine = Callable[[int], float]  # tokens of a pass -> seconds


def cpu(num_tokens: int) -> float:
    """The weights are read in 12 ms, and each token is a millisecond of arithmetic."""
    return 0.012 + 0.001 * num_tokens


def gpu(num_tokens: int) -> float:
    """Hundreds of tokens hide behind the weights."""
    return max(0.010, 0.00001 * num_tokens)


def passes(pace: Pace, machine: Machine, num_steps: int, count: int) -> list[int]:
    """Prompts without end beside so many steps: the prompt tokens of each pass."""
    taken = []
    for _ in range(count):
        num = pace.prompt_tokens(num_steps)
        pace.note(num_steps, num, machine(num_steps + num))
        taken.append(num)
    return taken


def new_pace() -> Pace:
    return Pace(chunk_tokens=CHUNK, block_size=BLOCK, stretch=STRETCH)


def test_where_nobody_decodes_prompts_have_the_whole_pass() -> None:
    pace = new_pace()
    assert passes(pace, cpu, 0, 5) == [CHUNK] * 5
    passes(pace, cpu, 4, 50)
    assert pace.prompt_tokens(0) == CHUNK


@pytest.mark.parametrize("num_steps", [1, 4, 16, 60])
def test_beside_steps_a_pass_takes_about_stretch_times_as_long_as_without_prompts(num_steps: int) -> None:
    pace = new_pace()
    passes(pace, cpu, 0, 1)
    taken = passes(pace, cpu, num_steps, 100)
    half_a_block = BLOCK / 2 * 0.001
    for num in taken:
        assert num % BLOCK == 0
        assert cpu(num_steps + num) <= STRETCH * cpu(num_steps) + half_a_block
    assert cpu(num_steps + max(taken)) >= STRETCH * cpu(num_steps) - half_a_block


def test_where_prompt_tokens_cost_next_to_nothing_a_pass_takes_the_whole_chunk() -> None:
    pace = new_pace()
    pace.note(8, 0, gpu(8))
    taken = passes(pace, gpu, 8, 33)
    assert taken == [BLOCK] + [CHUNK] * 31 + [0]  # a first block to learn what it costs, a last pass to learn it anew


def test_steps_are_measured_alone_before_prompts_ride_with_them_and_again_now_and_then() -> None:
    pace = new_pace()
    passes(pace, cpu, 0, 1)
    taken = passes(pace, cpu, 4, 100)
    assert taken[0] == 0
    assert 2 <= taken.count(0) <= 4


def test_one_pass_that_the_machine_held_up_changes_nothing() -> None:
    pace = new_pace()
    passes(pace, cpu, 4, 20)
    before = pace.prompt_tokens(4)
    pace.note(4, before, 3.0)
    pace.note(4, 0, 2.0)
    assert pace.prompt_tokens(4) == before


def test_a_machine_that_has_become_slower_at_prompts_takes_less_of_them() -> None:
    pace = new_pace()
    before = passes(pace, cpu, 4, 20)[-1]
    after = passes(pace, lambda n: 0.012 + 0.003 * n, 4, 60)[-1]
    assert BLOCK <= after < before


def test_more_sequences_than_when_it_was_measured_let_more_of_a_prompt_through() -> None:
    pace = new_pace()
    passes(pace, cpu, 0, 1)
    pace.note(2, 0, cpu(2))
    few, many = pace.prompt_tokens(2), pace.prompt_tokens(30)
    assert (few, many) == (32, 80)


@given(
    st.lists(
        st.tuples(st.integers(0, 100), st.integers(0, 600), st.floats(0, 10)).filter(lambda x: x[0] + x[1] > 0),
        max_size=40,
    ),
    st.integers(1, 100),
)
def test_whatever_passes_took_prompts_go_on(noted: list[tuple[int, int, float]], num_steps: int) -> None:
    pace = new_pace()
    for each in noted:
        pace.note(*each)
    first = pace.prompt_tokens(num_steps)
    assert pace.prompt_tokens(num_steps) == first  # it decides by what it was told alone
    assert 0 <= first <= CHUNK
    pace.note(num_steps, first, 0.01)
    assert first or pace.prompt_tokens(num_steps) >= BLOCK


@pytest.mark.parametrize("limit_s", [0.030, 0.040, 0.060, 0.1])
def test_a_promise_bounds_the_pass_where_a_block_fits(limit_s: float) -> None:
    pace = new_pace()
    passes(pace, cpu, 0, 1)
    passes(pace, cpu, 4, 20)
    num = pace.prompt_tokens(4, limit_s)
    assert num % BLOCK == 0
    assert cpu(4 + num) <= min(limit_s, STRETCH * cpu(4) + BLOCK / 2 * 0.001) or num == 0
    assert (num >= BLOCK) == (limit_s >= cpu(4 + BLOCK))
    assert pace.usual_tokens(4, limit_s) == (num or BLOCK // 4)


def test_where_no_block_fits_one_goes_with_every_fourth_pass() -> None:
    pace = new_pace()
    passes(pace, cpu, 0, 1)
    passes(pace, cpu, 4, 20)
    taken = []
    for _ in range(12):
        num = pace.prompt_tokens(4, 0.020)
        pace.note(4, num, cpu(4 + num))
        taken.append(num)
    assert taken == [0, 0, 0, BLOCK] * 3

"""Due times, lengths and chunks: whose turn it is, and how much of it a pass takes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.engine.batching import chunk_tokens
from distserve.engine.sequence import Sequence
from distserve.messages import PassSpeed, SamplingParams, SequenceKey
from distserve.worker.due import stands_back_s
from distserve_prefill.order import Flow, Place, Rules, bucket_of, settle

RULES = Rules(fair=True, pass_tokens=256, chunk_tokens=64, block_size=16)
SPEED = PassSpeed(pass_s=0.1, token_s=0.01)


def place(*, due: float = 10.0, promised: bool = True, left: int = 64, at: float = 0.0) -> Place:
    return Place(Flow("normal", 0), due, due if promised else math.inf, (at, 0), left, 0)


@pytest.mark.parametrize(
    ("num_tokens", "bucket"), [(1, 0), (512, 0), (513, 1), (2048, 1), (2049, 2), (8192, 2), (8193, 3), (100_000, 3)]
)
def test_a_bucket_ends_with_its_longest_prompt(num_tokens: int, bucket: int) -> None:
    assert bucket_of(num_tokens) == bucket


def test_who_was_promised_nothing_stands_back_by_class_and_length() -> None:
    assert [stands_back_s(priority, 0.5) for priority in ("vip", "normal", "batch")] == [3.0, 6.0, 32.0]


def test_a_promise_that_can_be_kept_is_left_alone_and_it_is_told_how_long_it_can_be() -> None:
    first, second = place(due=10.0), place(due=20.0, left=128)
    assert settle([first, second], RULES, SPEED, now=5.0) == pytest.approx(10.0 - 0.74)
    assert (first.due, second.due) == (10.0, 20.0)


def test_one_that_is_late_is_due_as_if_it_had_come_just_now_and_no_later_than_that() -> None:
    late = place(due=10.0)
    settle([late], RULES, SPEED, now=9.5)  # 0.74 s are left to do
    assert late.due == pytest.approx(9.5 + 4 + 4 * 0.74)
    assert not late.keeps
    due = late.due
    settle([late], RULES, SPEED, now=12.0)
    assert late.due == due, "it is late only once: else it would never be its turn"


def test_who_was_promised_nothing_is_never_late() -> None:
    old = place(due=10.0, promised=False)
    assert settle([old], RULES, SPEED, now=500.0) == math.inf
    assert old.due == 10.0


def test_while_the_speed_is_not_known_one_is_late_when_it_is_due() -> None:
    waiting = place(due=10.0)
    settle([waiting], RULES, PassSpeed(), now=10.0)
    assert waiting.keeps
    settle([waiting], RULES, PassSpeed(), now=10.1)
    assert not waiting.keeps


@given(
    num_blocks_done=st.integers(0, 20),
    left=st.integers(1, 500),
    room=st.integers(1, 300),
    chunk=st.sampled_from([16, 32, 64, 512]),
)
def test_a_chunk_ends_where_the_engine_wants_it(num_blocks_done: int, left: int, room: int, chunk: int) -> None:
    rules = Rules(fair=True, pass_tokens=300, chunk_tokens=chunk, block_size=16)
    done = 16 * num_blocks_done
    sequence = Sequence(SequenceKey("a"), [1] * (done + left), done + left, SamplingParams(max_tokens=1), done)
    here = Place(Flow("vip", 0), 0.0, 0.0, (0.0, 0), left, done)
    assert rules.fits(here, room, alone=False) == chunk_tokens(sequence, min(room, chunk), 16)


@given(left=st.integers(1, 2000), pass_tokens=st.integers(16, 300), chunk=st.sampled_from([0, 16, 64, 512]))
def test_alone_it_takes_the_passes_that_its_chunks_need(left: int, pass_tokens: int, chunk: int) -> None:
    rules = Rules(fair=True, pass_tokens=pass_tokens, chunk_tokens=chunk, block_size=16)
    here, seconds = Place(Flow("vip", 0), 0.0, 0.0, (0.0, 0), left, 0), 0.0
    while here.left:
        num = rules.fits(here, pass_tokens, alone=True)
        seconds += SPEED.seconds(num)
        here.left, here.done = here.left - num, here.done + num
    assert rules.alone_s(SPEED, left, 0) == pytest.approx(seconds)

"""What a pass takes, learnt from those that were."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distserve.messages import PassSpeed, pairs
from distserve.worker.pass_model import MANY_PASSES, MOST_SPARE, PROBE_S, PassModel


def taught(speed: PassSpeed, num_passes: int = 60, *, noise: float = 0.0, seed: int = 1) -> PassModel:
    """By passes of many lengths, each off by up to `noise` of itself."""
    model, rng = PassModel(), random.Random(seed)
    for _ in range(num_passes):
        num_tokens, num_cached = rng.choice([16, 64, 200, 512, 2048]), rng.choice([0, 512, 4096])
        num_pairs = pairs(num_tokens, num_cached)
        model.note(num_tokens, num_pairs, speed.seconds(num_tokens, num_pairs) * rng.uniform(1 - noise, 1 + noise))
    return model


def test_it_knows_nothing_at_first() -> None:
    model = PassModel()
    assert not model.speed.known
    assert (model.num_passes, model.spare, model.efficient_tokens(0.95)) == (0, 0.0, 0)


def test_after_one_pass_it_takes_all_of_it_for_the_tokens() -> None:
    model = PassModel()
    model.note(100, 5000, 0.2)
    assert model.speed.seconds(100) == pytest.approx(0.2)
    assert model.speed.seconds(200) == pytest.approx(0.4)


@settings(deadline=None, max_examples=50)
@given(
    pass_s=st.floats(1e-4, 0.1),
    token_s=st.floats(1e-6, 5e-3),
    pair_s=st.floats(0, 1e-7),
    noise=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 1000),
)
def test_it_tells_how_long_passes_take_that_are_like_those_it_saw(
    pass_s: float, token_s: float, pair_s: float, noise: float, seed: int
) -> None:
    speed = PassSpeed(pass_s=pass_s, token_s=token_s, pair_s=pair_s)
    model = taught(speed, noise=noise, seed=seed)
    for num_tokens in (16, 64, 200, 512, 2048):
        for num_cached in (0, 512, 4096):
            num_pairs = pairs(num_tokens, num_cached)
            told = model.speed.seconds(num_tokens, num_pairs)
            assert told == pytest.approx(speed.seconds(num_tokens, num_pairs), rel=0.02 + 2 * noise)


@settings(deadline=None)
@given(
    passes=st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 10_000), st.floats(0, 10)), min_size=1, max_size=80)
)
def test_whatever_it_sees_nothing_takes_less_than_no_time(passes: list[tuple[int, int, float]]) -> None:
    model = PassModel()
    for num_tokens, num_cached, seconds in passes:
        model.note(num_tokens, pairs(num_tokens, num_cached), seconds)
        speed = model.speed
        assert min(speed.pass_s, speed.token_s, speed.pair_s) >= 0
        assert speed.seconds(4096, pairs(4096, 0)) < 1e9
        assert 0 <= model.spare <= MOST_SPARE
        assert 0 <= model.efficient_tokens(0.95) <= 1e9


def test_equal_passes_leave_it_as_it_is_for_as_long_as_they_go_on() -> None:
    speed = PassSpeed(pass_s=0.01, token_s=0.001)
    model, rng = taught(speed), random.Random(2)
    for _ in range(2000):
        model.note(256, 0, speed.seconds(256) * rng.uniform(0.95, 1.05))
    assert model.speed.seconds(256) == pytest.approx(speed.seconds(256), rel=0.03)
    assert 32 <= model.efficient_tokens(0.95) <= 1024, "190 is right"


def test_one_pass_that_was_held_up_changes_little() -> None:
    speed = PassSpeed(pass_s=0.01, token_s=0.001)
    model = taught(speed, noise=0.02)
    model.note(256, 0, 20 * speed.seconds(256))
    assert model.speed.seconds(256) == pytest.approx(speed.seconds(256), rel=0.05)


def test_a_machine_that_has_become_slower_is_soon_known_to_be() -> None:
    speed = PassSpeed(pass_s=0.01, token_s=0.001)
    model, rng = taught(speed, noise=0.02), random.Random(3)
    for _ in range(60):
        num_tokens = rng.choice([16, 64, 200, 512])
        model.note(num_tokens, 0, 2 * speed.seconds(num_tokens))
    assert model.speed.seconds(256) == pytest.approx(2 * speed.seconds(256), rel=0.1)


def test_the_efficient_pass_is_the_shortest_that_gets_its_part_of_the_tokens() -> None:
    speed = PassSpeed(pass_s=0.01, token_s=0.001)
    num = taught(speed).efficient_tokens(0.95)
    assert num == pytest.approx(190, abs=2)
    assert num / speed.seconds(num) == pytest.approx(0.95 / speed.token_s, rel=0.01)


def test_of_passes_that_cost_nothing_by_the_token_the_longest_is_the_best() -> None:
    assert taught(PassSpeed(pass_s=0.01)).efficient_tokens(0.95) > 1e6
    assert taught(PassSpeed(token_s=0.001)).efficient_tokens(0.95) <= 1


def test_what_is_spare_is_how_far_passes_are_usually_off() -> None:
    speed = PassSpeed(pass_s=0.01, token_s=0.001)
    assert taught(speed, 200).spare < 0.005
    assert 0.02 < taught(speed, 200, noise=0.1).spare < 0.1


def test_promises_hang_on_it_once_it_has_seen_eight_passes_of_differing_size() -> None:
    model = PassModel()
    for i in range(20):
        assert not model.advertised(0.0).known, "all alike"
        model.note(20 + i % 10, 0, 0.05)
    model.note(80, 0, 0.1)
    assert model.advertised(0.0) == model.speed
    model = PassModel()
    for i in range(8):
        assert not model.advertised(0.0).known, f"{i} passes"
        model.note(16 * (i + 1), 0, 0.01 * (i + 1))
    assert model.advertised(0.0) == model.speed


def test_of_passes_that_are_always_alike_many_are_enough() -> None:
    model = PassModel()
    for _ in range(MANY_PASSES):
        assert not model.steady
        model.note(512, 0, 0.5)
    assert model.steady


def test_after_a_while_without_a_pass_what_was_learnt_is_no_reason_to_refuse() -> None:
    model = taught(PassSpeed(pass_s=0.01, token_s=0.001))
    assert model.advertised(0.99 * PROBE_S) == model.speed
    assert not model.advertised(PROBE_S).known

"""Lengths of prompts and answers."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.bench.errors import BadOption
from distserve.bench.lengths import Fixed, PowerLaw, Uniform, parse_lengths, power_law


def test_the_three_forms() -> None:
    assert parse_lengths("--input", "512") == Fixed(512)
    assert parse_lengths("--input", "uniform:min=2,max=9") == Uniform(2, 9)
    law = parse_lengths("--input", "powerlaw:mean=512,max=4096")
    assert isinstance(law, PowerLaw)
    assert (law.mean, law.low, law.high) == (512, 1, 4096)
    assert str(law) == "powerlaw:mean=512,min=1,max=4096"
    assert parse_lengths("--input", str(law)) == law


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no whole number"),
        ("0", "below 1 token"),
        ("12.5", "no whole number"),
        ("uniform:min=9,max=2", "min is above max"),
        ("uniform:min=1", "it is a number, uniform:"),
        ("uniform:min=1,max=2,mean=3", "it is a number, uniform:"),
        ("powerlaw:mean=5000,max=4096", "lies between 1 and 2048.5"),
        ("powerlaw:mean=3000,max=4096", "lies between 1 and 2048.5"),
        ("powerlaw:mean=x,max=4096", "could not convert"),
        ("powerlaw:mean=5,min=7,max=7", "min is not below max"),
        ("normal:mean=5", "it is a number, uniform:"),
    ],
)
def test_a_bad_one_names_option_value_and_what_would_do(text: str, why: str) -> None:
    with pytest.raises(BadOption, match=why) as caught:
        parse_lengths("--output", text)
    assert caught.value.option == "--output"
    assert caught.value.value == text
    assert "powerlaw:mean=512,max=4096" in str(caught.value)


@given(st.integers(1, 64), st.integers(65, 8192), st.floats(0.05, 0.95), st.integers(0, 10_000))
def test_a_power_law_keeps_to_its_bounds_and_its_mean(low: int, high: int, part: float, seed: int) -> None:
    mean = low + part * ((low + high) / 2 - low)
    law = power_law(mean, low, high)
    rng = random.Random(seed)
    drawn = [law.draw(rng) for _ in range(400)]
    assert all(low <= n <= high for n in drawn)
    # The mean by the law itself, from the middles of 4000 equal shares.
    shares = [law.draw(Always((i + 0.5) / 4000)) for i in range(4000)]
    assert sum(shares) / len(shares) == pytest.approx(mean, rel=0.03, abs=0.6)


def test_a_power_law_has_many_short_and_few_long_ones() -> None:
    law = power_law(512, 1, 4096)
    drawn = sorted(law.draw(Always((i + 0.5) / 1000)) for i in range(1000))
    assert drawn[500] < 200 < 2000 < drawn[950]


class Always(random.Random):
    """Draws one number for ever."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def random(self) -> float:
        return self._value

"""finish_reason: which token ends a sequence, and why."""

from typing import Any

import pytest

from distserve.engine.stopping import finish_reason
from tests.unit.engine.sampling_cases import sequence

EOS = [2, 50]


def reason(token: int, num_output: int = 0, max_model_len: int = 10_000, **params: Any) -> str | None:
    return finish_reason(sequence(prompt=[1] * 10, output=[9] * num_output, **params), token, EOS, max_model_len)


def test_an_ordinary_token_goes_on() -> None:
    assert reason(7) is None


@pytest.mark.parametrize("token", EOS)
def test_eos_stops_unless_ignored(token: int) -> None:
    assert reason(token) == "stop"
    assert reason(token, ignore_eos=True) is None


def test_stop_token_ids_stop_with_ignore_eos_too() -> None:
    assert reason(7, stop_token_ids=(6, 7)) == "stop"
    assert reason(7, stop_token_ids=(6, 7), ignore_eos=True) == "stop"
    assert reason(2, stop_token_ids=(2,), ignore_eos=True) == "stop"


@pytest.mark.parametrize(("num_output", "expected"), [(0, None), (1, None), (2, "length"), (5, "length")])
def test_max_tokens_counts_the_new_token(num_output: int, expected: str | None) -> None:
    assert reason(7, num_output, max_tokens=3) == expected


@pytest.mark.parametrize(("num_output", "expected"), [(0, None), (3, None), (4, "length")])
def test_max_model_len_counts_prompt_and_output(num_output: int, expected: str | None) -> None:
    assert reason(7, num_output, max_model_len=15) == expected


def test_stop_comes_before_length() -> None:
    assert reason(2, max_tokens=1) == "stop"


@pytest.mark.parametrize(("num_output", "expected"), [(0, None), (2, None), (3, "stop"), (4, "stop")])
def test_nothing_stops_before_min_tokens(num_output: int, expected: str | None) -> None:
    """Three tokens are out when num_output is 3: the same edge as where the sampler lets eos be drawn."""
    assert reason(2, num_output, min_tokens=3) == expected
    assert reason(7, num_output, min_tokens=3, stop_token_ids=(7,)) == expected


def test_length_ends_before_min_tokens() -> None:
    assert reason(2, 2, min_tokens=9, max_tokens=3) == "length"


def test_a_resubmitted_sequence_counts_what_it_had() -> None:
    assert reason(7, num_output=19, max_tokens=20) == "length"


def test_no_token_is_an_error() -> None:
    assert reason(-1) == "error"

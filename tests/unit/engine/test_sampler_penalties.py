"""Penalties, bias and min_tokens against numbers worked out by hand, seen through the logprobs they lead to."""

import math

import pytest
import torch

from distserve.engine.penalties import adjust
from distserve.engine.sampler import Sampler
from distserve.engine.sequence import Sequence
from tests.unit.engine.sampling_cases import sequence

EOS = (4,)


def adjusted(logits: list[float], s: Sequence) -> list[float]:
    row = torch.tensor(logits)
    adjust(row, s, EOS)
    return row.tolist()


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_all_seen_tokens() -> None:
    s = sequence(prompt=[0, 0, 1], output=[2], repetition_penalty=2.0)
    assert adjusted([3.0, -3.0, 0.5, 5.0, -1.0], s) == [1.5, -6.0, 0.25, 5.0, -1.0]


def test_presence_penalty_counts_once_and_the_output_only() -> None:
    s = sequence(prompt=[0, 1], output=[2, 2, 2, 3], presence_penalty=0.5)
    assert adjusted([1.0] * 5, s) == [1.0, 1.0, 0.5, 0.5, 1.0]


def test_frequency_penalty_counts_each_and_the_output_only() -> None:
    s = sequence(prompt=[0, 1], output=[2, 2, 2, 3], frequency_penalty=0.25, presence_penalty=-1.0)
    assert adjusted([1.0] * 5, s) == [1.0, 1.0, 1.25, 1.75, 1.0]


def test_penalties_come_in_order_and_bias_last() -> None:
    s = sequence(prompt=[9], output=[1], repetition_penalty=2.0, presence_penalty=1.0, logit_bias={1: 10.0, 3: -2.0})
    assert adjusted([0.0, 4.0, 0.0, 1.0, 0.0], s) == [0.0, 11.0, 0.0, -1.0, 0.0]


def test_tokens_without_a_logit_are_left_out_of_penalties() -> None:
    s = sequence(prompt=[0, 700], output=[900, 1], repetition_penalty=2.0, frequency_penalty=1.0)
    assert adjusted([2.0, 2.0, 2.0], s) == [1.0, 0.0, 2.0]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_makes_eos_and_stop_ids_impossible_until_then(ignore_eos: bool) -> None:
    logits = torch.tensor([[0.0, 50.0, 1.0, 0.5, 60.0]])
    sampler = Sampler(5, EOS)
    for num_output in range(5):
        s = sequence(
            output=[0] * num_output, temperature=0.0, min_tokens=3, stop_token_ids=(1, 99), ignore_eos=ignore_eos
        )
        assert sampler.sample(logits, [s])[0][0] == (2 if num_output < 3 else 4)


def test_min_tokens_ends_at_its_number_when_other_changes_go_on() -> None:
    logits = [1.0, 1.0, 1.0, 1.0, 1.0]
    for num_output, eos in ((1, -math.inf), (2, 1.0)):
        s = sequence(output=[0] * num_output, min_tokens=2, logit_bias={1: 1.0})
        assert adjusted(logits, s) == [1.0, 2.0, 1.0, 1.0, eos]


def test_a_bias_of_minus_100_bans_and_of_100_forces() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(2)) * 3
    best = int(logits.argmax())
    sampler = Sampler(50, [])
    for seed in range(30):
        assert sampler.sample(logits, [sequence(seed=seed, logit_bias={best: -100.0})])[0][0] != best
        assert sampler.sample(logits, [sequence(seed=seed, logit_bias={7: 100.0})])[0][0] == 7


def test_greedy_sees_penalties() -> None:
    logits = torch.tensor([[2.0, 1.5, 0.0]])
    sampler = Sampler(3, [])
    assert sampler.sample(logits, [sequence(prompt=[1], output=[0], temperature=0.0)])[0][0] == 0
    assert sampler.sample(logits, [sequence(prompt=[1], output=[0], temperature=0.0, presence_penalty=1.0)])[0][0] == 1


def test_logprobs_are_taken_after_penalties_and_before_temperature() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    s = sequence(prompt=[0], temperature=0.1, top_k=1, logit_bias={0: 4.0}, logprobs=3)
    ((token, logprob),) = Sampler(3, []).sample(logits, [s])
    norm = math.log(math.exp(5) + math.exp(2) + math.exp(3))
    assert token == 0
    assert logprob is not None
    assert logprob.logprob == pytest.approx(5 - norm, abs=1e-6)
    assert [i for i, _ in logprob.top] == [0, 2, 1]
    assert [p for _, p in logprob.top] == pytest.approx([5 - norm, 3 - norm, 2 - norm], abs=1e-6)

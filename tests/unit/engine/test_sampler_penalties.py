"""Penalties, bias and min_tokens against numbers worked out by hand, seen through the logprobs they lead to."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distserve.engine.penalties import Penalties
from distserve.engine.sampler import Sampler
from distserve.engine.sequence import Sequence
from tests.unit.engine.sampling_cases import sequence

EOS = (4,)


def adjusted(logits: list[float], s: Sequence) -> list[float]:
    row = torch.tensor(logits)
    Penalties(EOS).adjust(row, s)
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


# ------------------------------------------------------------------ what is kept from step to step

EVERYTHING = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {1: 2.0, 77: -3.0, 5000: 1.0},
    "min_tokens": 40,
    "stop_token_ids": (6, 9000),
}


def both(kept: Penalties, s: Sequence, vocab: int = 100) -> tuple[torch.Tensor, torch.Tensor]:
    """A row after what `kept` remembers, and after a count from scratch."""
    x = torch.randn(vocab, generator=torch.Generator().manual_seed(len(s.token_ids))) * 3
    y = x.clone()
    kept.adjust(x, s)
    Penalties(EOS).adjust(y, s)
    return x, y


@given(
    prompt=st.lists(st.integers(0, 120), max_size=30),
    growth=st.lists(st.lists(st.integers(0, 120), max_size=90), max_size=8),
)
def test_growing_by_any_number_of_tokens_gives_what_a_fresh_count_gives(
    prompt: list[int], growth: list[list[int]]
) -> None:
    s, kept = sequence(prompt=prompt, **EVERYTHING), Penalties(EOS)
    for new in growth:
        s.token_ids += new
        assert torch.equal(*both(kept, s))


def test_a_sequence_that_changed_otherwise_is_counted_afresh() -> None:
    draw = random.Random(0)
    s, kept = sequence(prompt=[1, 2, 3], output=[4, 5, 6, 5], **EVERYTHING), Penalties(EOS)
    assert torch.equal(*both(kept, s))
    del s.token_ids[-2:]  # rolled back
    assert torch.equal(*both(kept, s))
    s.token_ids[-1] = 50  # and replaced
    assert torch.equal(*both(kept, s))
    s.token_ids = [draw.randrange(100) for _ in range(30)]
    assert torch.equal(*both(kept, s))
    s.num_prompt_tokens = 10
    assert torch.equal(*both(kept, s))
    s.sampling = sequence(frequency_penalty=1.0).sampling
    assert torch.equal(*both(kept, s))
    assert torch.equal(*both(kept, s, vocab=60))


def test_a_step_looks_at_new_tokens_only() -> None:
    class Watched(list[int]):
        def __getitem__(self, key: object) -> object:  # type: ignore[override]
            reads.append(key)
            return super().__getitem__(key)  # type: ignore[index]

        def __iter__(self) -> object:  # type: ignore[override]
            reads.append("all")
            return super().__iter__()

    reads: list[object] = []
    s, kept = sequence(prompt=list(range(90)) * 40, **EVERYTHING), Penalties(EOS)
    both(kept, s)
    s.token_ids = Watched(s.token_ids)
    s.token_ids.append(8)
    kept.adjust(torch.zeros(100), s)
    num_known = 90 * 40
    assert all(isinstance(key, int) or (isinstance(key, slice) and key.start == num_known) for key in reads), reads
    assert reads


def test_what_is_kept_goes_with_its_sequence() -> None:
    kept = Penalties(EOS)
    for _ in range(5):
        both(kept, sequence(**EVERYTHING))
    assert len(kept._kept) == 0

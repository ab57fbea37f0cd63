"""Log-probabilities of chosen and prompt tokens."""

import math

import pytest
import torch

from distserve.engine.sampler import Sampler
from tests.unit.engine.sampling_cases import sequence

VOCAB = 700
SAMPLER = Sampler(VOCAB, [2])


def logits(n: int) -> torch.Tensor:
    return torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(n)) * 4


def test_logprobs_of_the_whole_vocabulary_sum_to_one_and_hold_the_chosen_token() -> None:
    batch = [sequence(seed=i, logprobs=VOCAB) for i in range(6)]
    for token, logprob in SAMPLER.sample(logits(6), batch):
        assert logprob is not None
        assert logprob.token_id == token
        assert len(logprob.top) == VOCAB
        assert sum(math.exp(p) for _, p in logprob.top) == pytest.approx(1.0, abs=1e-5)
        assert dict(logprob.top)[token] == pytest.approx(logprob.logprob, abs=1e-6)


def test_each_row_gets_the_number_it_asked_for() -> None:
    asked = [None, 0, 1, 5, None, 20]
    x = logits(6)
    found = SAMPLER.sample(x, [sequence(seed=i, logprobs=n) for i, n in enumerate(asked)])
    assert [None if p is None else len(p.top) for _, p in found] == asked
    expected = x.double().log_softmax(dim=1)
    for i, (token, p) in enumerate(found):
        if p is not None:
            assert p.logprob == pytest.approx(float(expected[i, token]), abs=1e-5)
            assert [t for t, _ in p.top] == expected[i].argsort(descending=True)[: len(p.top)].tolist()


def test_asking_for_logprobs_does_not_change_the_token() -> None:
    x = logits(8)
    plain = SAMPLER.sample(x, [sequence(seed=i) for i in range(8)])
    asked = SAMPLER.sample(x, [sequence(seed=i, logprobs=4) for i in range(8)])
    assert [t for t, _ in plain] == [t for t, _ in asked]


def test_equal_logits_are_listed_by_id_and_impossible_tokens_not_at_all() -> None:
    x = torch.zeros(2, VOCAB)
    x[1, 3:] = -torch.inf
    first, second = SAMPLER.sample(x, [sequence(logprobs=5, temperature=0.0)] * 2)
    assert first[1] is not None
    assert [t for t, _ in first[1].top] == [0, 1, 2, 3, 4]
    assert second[1] is not None
    assert [t for t, _ in second[1].top] == [0, 1, 2]
    assert [p for _, p in second[1].top] == pytest.approx([-math.log(3)] * 3, abs=1e-6)


def test_prompt_logprobs_are_of_the_tokens_that_come_next() -> None:
    x, next_ids = logits(5), [3, 699, 0, 3, 41]
    found = SAMPLER.prompt_logprobs(x.bfloat16(), next_ids, 2)
    expected = x.bfloat16().double().log_softmax(dim=1)
    assert [p.token_id for p in found] == next_ids
    for i, p in enumerate(found):
        assert p.logprob == pytest.approx(float(expected[i, next_ids[i]]), abs=1e-5)
        assert [q for _, q in p.top] == pytest.approx(expected[i].topk(2).values.tolist(), abs=1e-5)
    assert all(p.top == () for p in SAMPLER.prompt_logprobs(x, next_ids, 0))
    assert SAMPLER.prompt_logprobs(x[:0], [], 3) == []

"""The sampler: what it draws, that nothing but logits and the sequence decides it, and what bad rows give."""

import math
import random

import pytest
import torch

from distserve.engine.sampler import NO_TOKEN, Sampler
from distserve.engine.sequence import Sequence
from distserve.errors import DistServeError, InvalidRequest
from tests.unit.engine.sampling_cases import at_position, noise_of, reference_token, sequence

VOCAB = 1000
SAMPLER = Sampler(VOCAB, [2])

MIXED = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 40},
    {"temperature": 0.9, "min_p": 0.05, "logprobs": 3},
    {"temperature": 0.8, "top_k": 100, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    {"temperature": 0.0, "logprobs": 2, "logit_bias": {5: 4.0}},
    {"temperature": 1.0, "min_tokens": 5, "stop_token_ids": (7, 8)},
]


def rows(n: int, vocab: int = VOCAB, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def ids(sampler: Sampler, logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    return [token for token, _ in sampler.sample(logits, sequences)]


def mixed_batch() -> list[Sequence]:
    return [sequence(output=[5, 6, 5], stream=i % 3, seed=i * 7919, **p) for i, p in enumerate(MIXED * 3)]


# ------------------------------------------------------------------ nothing else decides


def test_a_token_does_not_depend_on_the_batch() -> None:
    batch, logits = mixed_batch(), rows(len(MIXED) * 3)
    alone = [SAMPLER.sample(logits[i : i + 1], [s])[0] for i, s in enumerate(batch)]
    assert SAMPLER.sample(logits, batch) == alone
    order = list(range(len(batch)))
    random.Random(0).shuffle(order)
    shuffled = SAMPLER.sample(logits[order], [batch[i] for i in order])
    assert shuffled == [alone[i] for i in order]
    assert SAMPLER.sample(logits[3:8], batch[3:8]) == alone[3:8]


def test_logits_and_sequences_stay_as_they_were() -> None:
    batch, logits = mixed_batch(), rows(len(MIXED) * 3)
    before = logits.clone(), [(list(s.token_ids), s.sampling) for s in batch]
    SAMPLER.sample(logits, batch)
    assert torch.equal(logits, before[0])
    assert [(s.token_ids, s.sampling) for s in batch] == before[1]


def test_equal_logits_of_other_float_types_give_equal_tokens() -> None:
    batch = mixed_batch()
    logits = rows(len(batch)).bfloat16()
    tokens = ids(SAMPLER, logits, batch)
    assert ids(SAMPLER, logits.float(), batch) == tokens
    assert ids(SAMPLER, logits.double(), batch) == tokens


def test_padded_logits_are_never_drawn() -> None:
    batch, logits = mixed_batch(), rows(len(MIXED) * 3)
    padded = torch.cat((logits, torch.full((len(batch), 64), 1e4)), dim=1)
    assert SAMPLER.sample(padded, batch) == SAMPLER.sample(logits, batch)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63, 2**64 - 1])
def test_every_64_bit_seed_repeats_and_differs_from_others(seed: int) -> None:
    logits = rows(1, scale=1.0).expand(40, -1)
    batch = [at_position(i + 1, seed=seed) for i in range(40)]
    tokens = ids(SAMPLER, logits, batch)
    assert ids(SAMPLER, logits, batch) == tokens
    assert len(set(tokens)) > 20
    assert ids(SAMPLER, logits, [at_position(i + 1, seed=seed ^ 2**63) for i in range(40)]) != tokens


def test_outputs_of_one_request_differ() -> None:
    logits = rows(1, scale=1.0).expand(2, -1)
    for position in range(1, 20):
        prompt = list(range(position))
        a, b = ids(SAMPLER, logits, [sequence(prompt, stream=i, seed=42) for i in (0, 1)])
        if a != b:
            return
    pytest.fail("twenty positions gave the same token for both outputs")


# ------------------------------------------------------------------ the distribution


@pytest.mark.parametrize(
    "params",
    [{"temperature": 1.0}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 25}, {"temperature": 1.0, "top_p": 0.8}],
)
@pytest.mark.parametrize("seed", [0, 2**63])
def test_frequencies_over_positions_follow_the_softmax(params: dict[str, float], seed: int) -> None:
    """Chi-square over 20,000 positions. The critical value (probability 1e-6) is Wilson and Hilferty's."""
    n, vocab = 20_000, 150
    logits = rows(1, vocab, scale=1.5, seed=8)
    sampler = Sampler(vocab, [2])
    tokens = ids(sampler, logits.expand(n, -1), [at_position(i + 1, seed=seed, **params) for i in range(n)])
    p = (logits[0].double() / params["temperature"]).softmax(dim=0)
    order = p.argsort(descending=True)
    if "top_k" in params:
        p[order[int(params["top_k"]) :]] = 0.0
    if "top_p" in params:
        p[order[1:][p[order].cumsum(0)[:-1] >= params["top_p"]]] = 0.0
    expected = p / p.sum() * n
    counts = torch.bincount(torch.tensor(tokens), minlength=vocab).double()
    assert not counts[expected == 0].any()
    often = expected >= 5
    rest = (float(expected[~often].sum()), float(counts[~often].sum()))
    chi_square = float(((counts - expected)[often] ** 2 / expected[often]).sum())
    chi_square += (rest[1] - rest[0]) ** 2 / rest[0] if rest[0] else 0.0
    freedom = int(often.sum()) - (not rest[0])
    critical = freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < critical, f"chi-square {chi_square:.1f} with {freedom} degrees of freedom"


@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 500])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_the_search_by_blocks_finds_what_a_full_search_finds(vocab: int, scale: float) -> None:
    sampler, batch = Sampler(vocab, [0]), [at_position(i + 1, seed=i, temperature=0.8) for i in range(30)]
    logits = rows(30, vocab, scale, seed=vocab)
    assert ids(sampler, logits, batch) == [reference_token(x, s) for x, s in zip(logits.tolist(), batch, strict=True)]


def test_many_survivors_are_searched_by_blocks_with_the_same_result() -> None:
    vocab = 5000
    s = at_position(9, seed=3, temperature=1.0, top_p=0.999)
    logits = rows(1, vocab, scale=0.2)
    assert ids(Sampler(vocab, [0]), logits, [s]) == [reference_token(logits[0].tolist(), s)]


# ------------------------------------------------------------------ edges


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = rows(2)
    logits[0, [17, 400, 999]] = 50.0
    logits[1] = 0.0
    batch = [sequence(temperature=0.0), sequence(temperature=0.0)]
    assert ids(SAMPLER, logits, batch) == [17, 0]
    assert ids(SAMPLER, logits.bfloat16(), batch) == [17, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf, -math.inf])
def test_a_batch_of_nothing_but_largest_logits_gives_what_each_row_gives_beside_others(
    dtype: torch.dtype, bad: float
) -> None:
    logits = torch.randint(-3, 4, (20, VOCAB + 24), generator=torch.Generator().manual_seed(1)).to(dtype)  # many ties
    logits[::3, 5 if bad != -math.inf else slice(None)] = bad
    plain = [sequence(temperature=0.0, output=[3] * i) for i in range(20)]
    others = [sequence(temperature=1.0), sequence(temperature=0.0, logprobs=1)]
    mixed = SAMPLER.sample(torch.cat((logits, logits[:2])), plain + others)
    assert SAMPLER.sample(logits, plain) == mixed[:20]
    assert (SAMPLER.sample(logits, plain)[0] == (NO_TOKEN, None)) == (bad != 0.0)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-310])
@pytest.mark.parametrize("params", [{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}])
def test_tiny_temperatures_are_greedy_and_do_not_overflow(temperature: float, params: dict[str, float]) -> None:
    logits = rows(8, scale=20.0)
    batch = [sequence(seed=i, temperature=temperature, **params) for i in range(8)]
    assert ids(SAMPLER, logits, batch) == logits.argmax(dim=1).tolist()


def test_tokens_of_probability_zero_are_never_drawn() -> None:
    logits = torch.full((50, VOCAB), -torch.inf)
    logits[:, [3, 700]] = torch.tensor([1.0, 1.0])
    tokens = ids(SAMPLER, logits, [at_position(i + 1, seed=1, temperature=5.0) for i in range(50)])
    assert set(tokens) == {3, 700}
    filtered = [at_position(i + 1, seed=1, temperature=5.0, top_k=10) for i in range(50)]
    assert ids(SAMPLER, logits, filtered) == tokens


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_gives_no_token_and_spoils_no_other(bad: float) -> None:
    batch, logits = mixed_batch(), rows(len(MIXED) * 3)
    fine = SAMPLER.sample(logits, batch)
    for i in range(0, len(batch), 2):
        if bad == -math.inf:
            logits[i] = bad
        else:
            logits[i, 123 + i] = bad
    found = SAMPLER.sample(logits, batch)
    assert found[::2] == [(NO_TOKEN, None)] * len(found[::2])
    assert found[1::2] == fine[1::2]


def test_no_sequences_give_no_tokens() -> None:
    assert SAMPLER.sample(torch.empty(0, VOCAB), []) == []


def test_logits_of_another_shape_are_refused_with_both_shapes() -> None:
    with pytest.raises(DistServeError, match=r"\[2, 1000\], expected \[1, 1000 or more\]"):
        SAMPLER.sample(rows(2), [sequence()])
    with pytest.raises(DistServeError, match="999"):
        SAMPLER.sample(rows(1, 999), [sequence()])


def test_a_bias_for_an_unknown_id_is_refused_by_name_and_harmless_if_nobody_asked() -> None:
    bad = sequence(logit_bias={VOCAB: 1.0, -1: 100.0, 3: 2.0})
    with pytest.raises(InvalidRequest, match="logit_bias has the token id 1000, ids of this model are 0 to 999") as e:
        SAMPLER.validate(bad.sampling)
    assert e.value.param == "logit_bias"
    assert SAMPLER.sample(rows(1), [bad]) == SAMPLER.sample(rows(1), [sequence(logit_bias={3: 2.0})])
    with pytest.raises(InvalidRequest, match="seed"):
        SAMPLER.validate(sequence(seed=2**64).sampling)


def test_noise_is_that_of_the_position_about_to_be_drawn() -> None:
    s = sequence(prompt=[4] * 10, output=[5] * 3, seed=77)
    flat = torch.zeros(1, VOCAB)
    noise = noise_of(at_position(13, seed=77), VOCAB)
    assert ids(SAMPLER, flat, [s]) == [noise.index(max(noise))]

"""top_k, top_p and min_p against their definitions, written out slowly in sampling_cases.py."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distserve.engine import filters
from distserve.engine.filters import shortlists
from distserve.engine.sampler import Sampler
from distserve.messages import SamplingParams
from tests.unit.engine.sampling_cases import at_position, reference_token, sequence, survivors

# Quarters, so that equal logits are common, and some that are impossible.
LOGIT = st.one_of(st.integers(-40, 40).map(lambda q: q / 4), st.just(-math.inf))


@st.composite
def params(draw: st.DrawFn) -> dict[str, float]:
    return {
        "temperature": draw(st.floats(0.05, 3.0)),
        "top_k": draw(st.one_of(st.just(0), st.integers(1, 60))),
        "top_p": draw(st.one_of(st.just(1.0), st.floats(0.01, 0.9999))),
        "min_p": draw(st.one_of(st.just(0.0), st.floats(0.001, 1.0))),
    }


def kept_ids(logits: list[float], p: SamplingParams) -> list[int]:
    x, temperature = torch.tensor([logits]), torch.tensor([[p.temperature]], dtype=torch.float64)
    (short,) = shortlists(x, temperature, [p])
    return short.ids[0][short.scaled[0] > -math.inf].tolist()


@settings(max_examples=300, deadline=None)
@given(st.lists(LOGIT, min_size=1, max_size=50), params(), st.integers(0, 2**64 - 1))
def test_filters_keep_what_their_definitions_say(logits: list[float], p: dict[str, float], seed: int) -> None:
    assume(max(logits) > -math.inf)
    s = at_position(5, seed=seed, **p)
    expected, margin = survivors(logits, s.sampling)
    assume(margin > 1e-6)
    assert kept_ids(logits, s.sampling) == expected
    assert Sampler(len(logits), []).sample(torch.tensor([logits]), [s])[0][0] == reference_token(logits, s)


@pytest.mark.parametrize(
    ("p", "kept"),
    [
        ({"top_k": 2}, [1, 3]),  # of three equal ones at the edge the lower ids
        ({"top_k": 1}, [1]),
        ({"top_p": 0.5}, [1, 3]),  # the four largest have a quarter each
        ({"top_p": 0.5001}, [1, 3, 4]),
        ({"top_p": 1e-9}, [1]),
        ({"min_p": 1.0}, [1, 3, 4, 6]),
        ({"top_k": 3, "top_p": 0.6}, [1, 3]),  # mass is taken within what top_k left: a third each
    ],
)
def test_ties_at_an_edge_go_to_the_lower_id(p: dict[str, float], kept: list[int]) -> None:
    logits = [-90.0, 5.0, -90.0, 5.0, 5.0, -90.0, 5.0]
    assert kept_ids(logits, SamplingParams(max_tokens=1, **p)) == kept


@pytest.mark.parametrize(
    "p", [{"top_k": 5}, {"top_k": 300}, {"top_p": 0.3}, {"top_p": 0.97}, {"min_p": 0.02}, {"min_p": 0.5}]
)
@pytest.mark.parametrize("scale", [0.05, 1.0, 6.0])
def test_longer_lists_are_taken_where_the_short_one_does_not_decide(p: dict[str, float], scale: float) -> None:
    """A vocabulary larger than the first list, bfloat16 so that whole runs of logits tie at its end."""
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(6000, generator=generator) * scale).bfloat16().tolist()
    s = SamplingParams(max_tokens=1, **p)
    expected, margin = survivors(logits, s)
    assert margin > 1e-9
    assert kept_ids(logits, s) == expected


def test_rows_that_end_in_lists_of_different_length_stay_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "_LIST_LENGTHS", (4, 16))
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 100, generator=generator) * torch.linspace(0.01, 8.0, 40).unsqueeze(1)
    batch = [at_position(i + 1, seed=i, top_p=0.7, top_k=(0, 2, 12, 50)[i % 4]) for i in range(40)]
    tokens = [t for t, _ in Sampler(100, []).sample(logits, batch)]
    assert tokens == [reference_token(x, s) for x, s in zip(logits.tolist(), batch, strict=True)]


def test_top_k_beyond_the_vocabulary_changes_nothing() -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(30, [])
    plain, wide = (sampler.sample(logits, [sequence(seed=5, top_k=k)]) for k in (0, 10**6))
    assert plain == wide

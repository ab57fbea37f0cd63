"""Philox against Random123's published answers and against itself in plain Python."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distserve.engine.philox import exponential, key_words, philox4x32, uniform

WORD = st.integers(0, 2**32 - 1)

# philox4x32-10 lines of Random123's kat_vectors: counter, key, answer.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def tensors(words: list[int]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([w], dtype=torch.int64) for w in words)


def philox_in_plain_python(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_published_answers_come_out(counter: list[int], key: list[int], answer: list[int]) -> None:
    assert [int(w) for w in philox4x32(tensors(counter), tensors(key))] == answer


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(WORD, WORD, WORD, WORD), min_size=1, max_size=9), WORD, WORD)
def test_many_counters_at_once_equal_one_by_one(counters: list[tuple[int, ...]], k0: int, k1: int) -> None:
    words = philox4x32(tuple(torch.tensor(c) for c in zip(*counters, strict=True)), tensors([k0, k1]))
    together = torch.stack(words, dim=-1).tolist()
    assert together == [philox_in_plain_python(list(c), [k0, k1]) for c in counters]


def test_words_broadcast() -> None:
    rows, columns = torch.arange(3).unsqueeze(1), torch.arange(5).unsqueeze(0)
    one = torch.ones(1, 1, dtype=torch.int64)
    words = philox4x32((columns, rows, one, one), (rows, one))
    assert [w.shape for w in words] == [(3, 5)] * 4
    assert [int(w[2, 4]) for w in words] == philox_in_plain_python([4, 2, 1, 1], [2, 1])


def test_seeds_use_all_64_bits() -> None:
    seeds = [0, 1, 2**32, 2**63, 2**64 - 1]
    assert [key_words(s) for s in seeds] == [(0, 0), (1, 0), (0, 1), (0, 2**31), (2**32 - 1, 2**32 - 1)]


def test_extreme_words_give_finite_noise_inside_the_open_interval() -> None:
    words = torch.tensor([0, 1, 2**31, 2**32 - 1])
    u = uniform(words)
    assert u.dtype == torch.float64
    assert u.min() > 0.0
    assert u.max() < 1.0
    assert u.tolist() == [(w + 0.5) / 2**32 for w in words.tolist()]
    e = exponential(words)
    assert e.isfinite().all()
    assert (e > 0).all()
    assert math.isclose(float(e[0]), 33 * math.log(2), rel_tol=1e-12)

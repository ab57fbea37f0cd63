"""Triton's attention over the pool, beside the same in plain steps."""

from __future__ import annotations

import math
import random

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BLOCK_SIZE = 16
NUM_LAYERS = 2


def reference(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None, softcap: float | None
) -> torch.Tensor:
    """query [num_heads, d] over keys and values [n, num_kv_heads, d], in float64."""
    group = query.shape[0] // keys.shape[1]
    if window is not None:
        keys, values = keys[-window:], values[-window:]
    k, v = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("hd,nhd->hn", query.double(), k) / math.sqrt(query.shape[1])
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), v)


@pytest.mark.parametrize("splits", [1, 4, 32])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 64), (4, 4, 256), (16, 1, 32)]
)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (100, None), (None, 20.0)])
def test_decode_is_what_the_formula_says_at_every_length(
    splits: int, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None, softcap: float | None
) -> None:
    from distserve.engine.attention import kernels

    lengths = [1, 2, 15, 16, 17, 63, 64, 65, 100, 101, 1000, 2048, 4096, 8192]
    shuffled = random.Random(1)
    num_blocks = sum(-(-n // BLOCK_SIZE) for n in lengths) + 1
    torch.manual_seed(splits)
    # NaN everywhere but where sequences are: what is read behind their ends shows.
    shape = (num_blocks, NUM_LAYERS, 2, BLOCK_SIZE, num_kv_heads, head_dim)
    pool = torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda")
    free = list(range(1, num_blocks))
    shuffled.shuffle(free)
    table = torch.zeros(len(lengths) + 3, 8192 // BLOCK_SIZE, dtype=torch.int32)
    rows = [len(lengths) + 2 - i for i in range(len(lengths))]
    dense = []
    for row, n in zip(rows, lengths, strict=True):
        blocks = [free.pop() for _ in range(-(-n // BLOCK_SIZE))]
        table[row, : len(blocks)] = torch.tensor(blocks)
        both = torch.randn(2, n, num_kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
        at = torch.arange(n)
        where = (torch.tensor(blocks)[at // BLOCK_SIZE].cuda(), (at % BLOCK_SIZE).cuda())
        pool[:, 1, 0][where] = both[0]
        pool[:, 1, 1][where] = both[1]
        dense.append(both)
    query = torch.randn(len(lengths), num_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    out = kernels.decode(
        query,
        (pool[:, 1, 0], pool[:, 1, 1]),
        table.cuda(),
        torch.tensor(rows, dtype=torch.int32, device="cuda"),
        torch.tensor([n - 1 for n in lengths], dtype=torch.int32, device="cuda"),
        scale=head_dim**-0.5,
        splits=splits,
        window=window,
        softcap=softcap,
    )
    for i, both in enumerate(dense):
        wanted = reference(query[i], both[0], both[1], window, softcap)
        torch.testing.assert_close(out[i].double(), wanted, atol=0.02, rtol=0.02, msg=f"length {lengths[i]}")


def test_a_token_is_stored_in_its_own_slot_and_nowhere_else() -> None:
    from distserve.engine.attention import kernels

    pool = torch.zeros(6, NUM_LAYERS, 2, BLOCK_SIZE, 3, 64, device="cuda", dtype=torch.bfloat16)
    slots = torch.tensor([2 * BLOCK_SIZE + 1, 5 * BLOCK_SIZE + 3], device="cuda")
    # As a model hands them over: a view of what its projections gave.
    mixed = torch.randn(2, 3, 3, 64, device="cuda", dtype=torch.bfloat16)
    key, value = mixed[:, 0], mixed[:, 1]
    kernels.store(key, value, (pool[:, 1, 0], pool[:, 1, 1]), slots)
    wanted = torch.zeros_like(pool)
    wanted[2, 1, 0, 1], wanted[2, 1, 1, 1] = key[0], value[0]
    wanted[5, 1, 0, 3], wanted[5, 1, 1, 3] = key[1], value[1]
    assert torch.equal(pool, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 64), (4, 4, 256), (16, 1, 32)]
)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (100, None), (None, 20.0)])
def test_prefill_is_what_the_formula_says_with_and_without_a_prefix(
    num_heads: int, num_kv_heads: int, head_dim: int, window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    from distserve.engine.attention import kernels

    # (tokens before the chunk, tokens of the chunk); the last ones cross what kernels take at a time
    chunks = [(0, 2), (0, 129), (16, 40), (100, 300), (2000, 48), (4096, 100), (8064, 128), (0, 2048)]
    torch.manual_seed(3)
    needed = [-(-(start + num) // BLOCK_SIZE) for start, num in chunks]
    shape = (sum(needed) + 1, NUM_LAYERS, 2, BLOCK_SIZE, num_kv_heads, head_dim)
    pool = torch.full(shape, float("nan"), dtype=dtype, device="cuda")
    free = list(range(1, shape[0]))
    random.Random(5).shuffle(free)
    table = torch.zeros(len(chunks), max(needed), dtype=torch.int32)
    size = kernels.tile_queries(head_dim, dtype)
    tiles, dense, queries, first = [], [], [], 0
    for number, (start, num) in enumerate(chunks):
        blocks = [free.pop() for _ in range(needed[number])]
        table[number, : len(blocks)] = torch.tensor(blocks)
        both = torch.randn(2, start + num, num_kv_heads, head_dim, device="cuda", dtype=dtype)
        at = torch.arange(start + num)
        where = (torch.tensor(blocks)[at // BLOCK_SIZE].cuda(), (at % BLOCK_SIZE).cuda())
        pool[:, 1, 0][where], pool[:, 1, 1][where] = both[0], both[1]
        dense.append(both)
        queries.append(torch.randn(num, num_heads, head_dim, device="cuda", dtype=dtype))
        tiles += [(number, first + i, start + i, min(size, num - i)) for i in range(0, num, size)]
        first += num
    out = kernels.prefill(
        torch.cat(queries),
        (pool[:, 1, 0], pool[:, 1, 1]),
        table.cuda(),
        torch.tensor(tiles, dtype=torch.int32, device="cuda"),
        scale=head_dim**-0.5,
        window=window,
        softcap=softcap,
    )
    tolerance = 0.03 if dtype == torch.bfloat16 else 1e-4
    first = 0
    for (start, num), both, q in zip(chunks, dense, queries, strict=True):
        for i in {0, 1, num // 2, num - 1}:
            wanted = reference(q[i], both[0, : start + i + 1], both[1, : start + i + 1], window, softcap)
            torch.testing.assert_close(
                out[first + i].double(), wanted, atol=tolerance, rtol=tolerance, msg=f"token {i} of {start, num}"
            )
        first += num

"""Triton kernels over the paged pool: one token's keys and values into their slot, and decode attention.

Decode attention is split along the context (flash decoding: Dao, Haziza, Massa, Sizov, 2023): a program takes one
sequence, one KV head with all the query heads that share it, and one part of the context; a second kernel puts the
parts together. Nothing behind a sequence's last token is read, so what lies there may be anything.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton's language is not Python's: its types are the compiler's to check.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK_KEYS = 64  # keys a program looks at together
MAX_SPLITS = 32
_PROGRAMS_PER_CORE = 4  # that a step should have, so that no multiprocessor waits long for the last one


@triton.jit
def _store_kernel(
    key,
    value,
    pool_keys,
    pool_values,
    slots,
    key_stride,
    value_stride,
    block_stride,
    NUMBERS: tl.constexpr,  # num_kv_heads * head_dim
    PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    at = tl.arange(0, PADDED)
    mask = at < NUMBERS
    to = slot // BLOCK_SIZE * block_stride + (slot % BLOCK_SIZE) * NUMBERS + at
    tl.store(pool_keys + to, tl.load(key + token * key_stride + at, mask=mask), mask=mask)
    tl.store(pool_values + to, tl.load(value + token * value_stride + at, mask=mask), mask=mask)


@triton.jit
def _decode_kernel(
    query,
    pool_keys,
    pool_values,
    table,
    rows,
    positions,
    out,
    sums,
    maxima,
    scale,
    softcap,
    window,
    query_stride,
    table_stride,
    block_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    num_keys = tl.load(positions + sequence) + 1
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(0, num_keys - window) // BLOCK_KEYS * BLOCK_KEYS
    per_split = tl.cdiv(tl.cdiv(num_keys - first, NUM_SPLITS), BLOCK_KEYS) * BLOCK_KEYS
    begin = first + split * per_split
    end = tl.minimum(begin + per_split, num_keys)
    row = table + tl.load(rows + sequence).to(tl.int64) * table_stride
    group = tl.arange(0, PADDED_GROUP)
    dim = tl.arange(0, HEAD_DIM)
    in_group = group < GROUP
    q = tl.load(
        query + sequence * query_stride + (head * GROUP + group)[:, None] * HEAD_DIM + dim[None, :],
        mask=in_group[:, None],
        other=0.0,
    )
    maximum = tl.full([PADDED_GROUP], -1e30, tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    acc = tl.zeros([PADDED_GROUP, HEAD_DIM], tl.float32)
    for start in range(begin, end, BLOCK_KEYS):
        at = start + tl.arange(0, BLOCK_KEYS)
        there = at < end
        if HAS_WINDOW:
            there = there & (at >= num_keys - window)
        block = tl.load(row + at // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        offset = block * block_stride + (at % BLOCK_SIZE) * (NUM_KV_HEADS * HEAD_DIM) + head * HEAD_DIM
        k = tl.load(pool_keys + offset[:, None] + dim[None, :], mask=there[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_SOFTCAP:
            # tanh by way of exp, which does not overflow for what is squashed
            scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))
        scores = tl.where(there[None, :], scores, -1e30)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.where(there[None, :], tl.exp(scores - new_maximum[:, None]), 0.0)
        rescale = tl.exp(maximum - new_maximum)
        total = total * rescale + tl.sum(weights, 1)
        maximum = new_maximum
        v = tl.load(pool_values + offset[:, None] + dim[None, :], mask=there[:, None], other=0.0)
        acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    if NUM_SPLITS == 1:
        to = sequence * (NUM_KV_HEADS * GROUP) + head * GROUP + group
        result = acc / total[:, None]
        tl.store(out + to[:, None] * HEAD_DIM + dim[None, :], result.to(out.dtype.element_ty), mask=in_group[:, None])
    else:
        to = ((sequence * NUM_KV_HEADS + head) * NUM_SPLITS + split) * GROUP + group
        tl.store(sums + to[:, None] * HEAD_DIM + dim[None, :], acc, mask=in_group[:, None])
        tl.store(maxima + to * 2, maximum, mask=in_group)
        tl.store(maxima + to * 2 + 1, total, mask=in_group)


@triton.jit
def _join_kernel(
    sums,
    maxima,
    out,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    sequence = tl.program_id(0)
    query_head = tl.program_id(1)
    head = query_head // GROUP
    split = tl.arange(0, NUM_SPLITS)
    dim = tl.arange(0, HEAD_DIM)
    at = ((sequence * NUM_KV_HEADS + head) * NUM_SPLITS + split) * GROUP + query_head % GROUP
    maximum = tl.load(maxima + at * 2)
    total = tl.load(maxima + at * 2 + 1)
    weights = tl.exp(maximum - tl.max(maximum, 0))
    acc = tl.load(sums + at[:, None] * HEAD_DIM + dim[None, :])
    result = tl.sum(acc * weights[:, None], 0) / tl.sum(total * weights, 0)
    to = (sequence * (NUM_KV_HEADS * GROUP) + query_head) * HEAD_DIM + dim
    tl.store(out + to, result.to(out.dtype.element_ty))


@triton.jit
def _prefill_kernel(
    query,
    pool_keys,
    pool_values,
    table,
    tiles,
    out,
    scale,
    softcap,
    window,
    query_stride,
    table_stride,
    block_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Long tiles first: what is left to the end is short.
    tile = tiles + (tl.num_programs(1) - 1 - tl.program_id(1)) * 4
    query_head = tl.program_id(0)
    head = query_head // GROUP
    row = table + tl.load(tile).to(tl.int64) * table_stride
    first_row = tl.load(tile + 1).to(tl.int64)
    first_position = tl.load(tile + 2)
    num_queries = tl.load(tile + 3)
    at_query = tl.arange(0, BLOCK_QUERIES)
    dim = tl.arange(0, HEAD_DIM)
    in_tile = at_query < num_queries
    q_place = (first_row + at_query)[:, None] * query_stride + query_head * HEAD_DIM + dim[None, :]
    q = tl.load(query + q_place, mask=in_tile[:, None], other=0.0)
    position = first_position + at_query
    maximum = tl.full([BLOCK_QUERIES], -1e30, tl.float32)
    total = tl.zeros([BLOCK_QUERIES], tl.float32)
    acc = tl.zeros([BLOCK_QUERIES, HEAD_DIM], tl.float32)
    end = first_position + num_queries
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(0, first_position + 1 - window) // BLOCK_KEYS * BLOCK_KEYS
    # Tiles of keys that every query sees whole need no mask.
    clear = first_position // BLOCK_KEYS * BLOCK_KEYS
    if HAS_WINDOW:
        clear = begin
    at_key = tl.arange(0, BLOCK_KEYS)
    log2e: tl.constexpr = 1.4426950408889634
    for start in range(begin, clear, BLOCK_KEYS):
        at = start + at_key
        block = tl.load(row + at // BLOCK_SIZE).to(tl.int64)
        offset = block * block_stride + (at % BLOCK_SIZE) * (NUM_KV_HEADS * HEAD_DIM) + head * HEAD_DIM
        k = tl.load(pool_keys + offset[None, :] + dim[:, None])
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        if HAS_SOFTCAP:
            scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))
        scores = scores * log2e
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        rescale = tl.exp2(maximum - new_maximum)
        total = total * rescale + tl.sum(weights, 1)
        maximum = new_maximum
        acc = acc * rescale[:, None]
        v = tl.load(pool_values + offset[:, None] + dim[None, :])
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    for start in range(clear, end, BLOCK_KEYS):
        at = start + at_key
        there = at < end
        block = tl.load(row + at // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        offset = block * block_stride + (at % BLOCK_SIZE) * (NUM_KV_HEADS * HEAD_DIM) + head * HEAD_DIM
        k = tl.load(pool_keys + offset[None, :] + dim[:, None], mask=there[None, :], other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        if HAS_SOFTCAP:
            scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))
        seen = (at[None, :] <= position[:, None]) & there[None, :]
        if HAS_WINDOW:
            seen = seen & (at[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores * log2e, -1e30)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.where(seen, tl.exp2(scores - new_maximum[:, None]), 0.0)
        rescale = tl.exp2(maximum - new_maximum)
        total = total * rescale + tl.sum(weights, 1)
        maximum = new_maximum
        acc = acc * rescale[:, None]
        v = tl.load(pool_values + offset[:, None] + dim[None, :], mask=there[:, None], other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    result = acc / tl.where(in_tile, total, 1.0)[:, None]
    to = (first_row + at_query)[:, None] * (NUM_KV_HEADS * GROUP * HEAD_DIM) + query_head * HEAD_DIM + dim[None, :]
    tl.store(out + to, result.to(out.dtype.element_ty), mask=in_tile[:, None])


def can_serve(head_dim: int, block_size: int) -> bool:
    """Powers of two from 16 on: what the kernels' tiles are made of."""
    return head_dim >= 16 and not head_dim & (head_dim - 1) and not block_size & (block_size - 1)


def num_splits(num_sequences: int, num_kv_heads: int, num_cores: int) -> int:
    """Parts of a context: a power of two, the most that keeps a step within _PROGRAMS_PER_CORE programs a core."""
    most = max(1, _PROGRAMS_PER_CORE * num_cores // max(1, num_sequences * num_kv_heads))
    return min(MAX_SPLITS, 1 << (most.bit_length() - 1))


def store(
    key: torch.Tensor, value: torch.Tensor, layer: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor
) -> None:
    """key, value [n, num_kv_heads, head_dim] into slots [n] (block * block_size + offset) of PagedCache.layer()."""
    keys, values = layer
    numbers = keys.shape[2] * keys.shape[3]
    key, value = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (key, value))
    _store_kernel[(key.shape[0],)](
        key,
        value,
        keys,
        values,
        slots,
        key.stride(0),
        value.stride(0),
        keys.stride(0),
        numbers,
        triton.next_power_of_2(numbers),
        keys.shape[1],
        num_warps=4,
    )


def decode(
    query: torch.Tensor,
    layer: tuple[torch.Tensor, torch.Tensor],
    table: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    splits: int,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of one token of each of n sequences, at positions[i], over all up to it (of a window, the last that
    many). query [n, num_heads, head_dim], each token's numbers together; the rest as in store(). Returns [n, num_heads,
    head_dim]. splits: a power of two (num_splits())."""
    keys, values = layer
    n, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[2]
    group = num_heads // num_kv_heads
    out = torch.empty((n, num_heads, head_dim), dtype=query.dtype, device=query.device)
    sums: Any = out
    maxima: Any = out
    if splits > 1:
        sums = torch.empty((n, num_kv_heads, splits, group, head_dim), dtype=torch.float32, device=query.device)
        maxima = torch.empty((n, num_kv_heads, splits, group, 2), dtype=torch.float32, device=query.device)
    if query.stride()[1:] != (head_dim, 1):  # of a projection that makes keys and values too
        query = query.contiguous()
    _decode_kernel[(n, num_kv_heads, splits)](
        query,
        keys,
        values,
        table,
        rows,
        positions,
        out,
        sums,
        maxima,
        scale,
        softcap or 1.0,
        window or 0,
        query.stride(0),
        table.stride(0),
        keys.stride(0),
        num_kv_heads,
        head_dim,
        group,
        max(16, triton.next_power_of_2(group)),
        keys.shape[1],
        splits,
        BLOCK_KEYS,
        softcap is not None,
        window is not None,
        "ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=2 if query.dtype == torch.float32 else 3,
    )
    if splits > 1:
        _join_kernel[(n, num_heads)](sums, maxima, out, num_kv_heads, head_dim, group, splits, num_warps=4)
    return out


def tile_queries(head_dim: int, dtype: torch.dtype) -> int:
    """Queries of one sequence that a program of prefill() takes together."""
    return 64 if dtype == torch.float32 or head_dim > 128 else 128


def prefill(
    query: torch.Tensor,
    layer: tuple[torch.Tensor, torch.Tensor],
    table: torch.Tensor,
    tiles: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of chunks of sequences over all up to each token, which is in the pool by now. query [T,
    num_heads, head_dim]; tiles int32 [n, 4]: of each tile of at most tile_queries() consecutive tokens the row of its
    blocks in `table`, its first row in `query`, the position of that token, and how many they are. Returns [T,
    num_heads, head_dim]."""
    keys, values = layer
    _, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[2]
    if query.stride()[1:] != (head_dim, 1):
        query = query.contiguous()
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    wide = query.dtype == torch.float32 or head_dim > 128
    _prefill_kernel[(num_heads, len(tiles))](
        query,
        keys,
        values,
        table,
        tiles,
        out,
        scale,
        softcap or 1.0,
        window or 0,
        query.stride(0),
        table.stride(0),
        keys.stride(0),
        num_kv_heads,
        head_dim,
        num_heads // num_kv_heads,
        keys.shape[1],
        tile_queries(head_dim, query.dtype),
        32 if wide else 64,
        softcap is not None,
        window is not None,
        "ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=2 if wide else 3,
    )
    return out

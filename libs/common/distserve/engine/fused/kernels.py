"""What lies between the matrix products of a decoder layer, each in one kernel (Triton)."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton's language is not Python's: its types are the compiler's to check.

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _add_and_norm_kernel(
    residual, more, weight, out, eps, NUMBERS: tl.constexpr, PADDED: tl.constexpr, HAS_MORE: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    mask = at < NUMBERS
    x = tl.load(residual + token * NUMBERS + at, mask=mask, other=0.0)
    if HAS_MORE:
        x = (x.to(tl.float32) + tl.load(more + token * NUMBERS + at, mask=mask, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(residual + token * NUMBERS + at, x, mask=mask)
    wide = x.to(tl.float32)
    mean = tl.sum(wide * wide, 0) / NUMBERS
    # Rounded before the weight, as models do.
    normed = (wide * tl.rsqrt(mean + eps)).to(x.dtype)
    w = tl.load(weight + at, mask=mask, other=0.0)
    tl.store(out + token * NUMBERS + at, (normed.to(tl.float32) * w.to(tl.float32)).to(x.dtype), mask=mask)


@triton.jit
def _turned(low, high, cosine, sine, weight, eps, HALF: tl.constexpr, HAS_NORM: tl.constexpr):
    """Heads [n, HALF] twice, of which the halves are turned into one another; normed by head before."""
    dtype = low.dtype
    a = low.to(tl.float32)
    b = high.to(tl.float32)
    if HAS_NORM:
        at = tl.arange(0, HALF)
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        a = (a * scale).to(dtype).to(tl.float32) * tl.load(weight + at).to(tl.float32)[None, :]
        b = (b * scale).to(dtype).to(tl.float32) * tl.load(weight + HALF + at).to(tl.float32)[None, :]
        a = a.to(dtype).to(tl.float32)
        b = b.to(dtype).to(tl.float32)
    return (a * cosine - b * sine).to(dtype), (b * cosine + a * sine).to(dtype)


@triton.jit
def _turn_and_store_kernel(
    qkv,
    cos,
    sin,
    positions,
    slots,
    pool_keys,
    pool_values,
    query_norm,
    key_norm,
    eps,
    qkv_stride,
    block_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = HEAD_DIM // 2
    at = tl.arange(0, HALF)[None, :]
    position = tl.load(positions + token).to(tl.int64)
    cosine = tl.load(cos + position * HALF + at).to(tl.float32)
    sine = tl.load(sin + position * HALF + at).to(tl.float32)
    head = tl.arange(0, PADDED_HEADS)[:, None]
    place = qkv + token * qkv_stride + head * HEAD_DIM + at
    mask = head < NUM_HEADS
    low = tl.load(place, mask=mask, other=0.0)
    high = tl.load(place + HALF, mask=mask, other=0.0)
    low, high = _turned(low, high, cosine, sine, query_norm, eps, HALF, HAS_NORMS)
    tl.store(place, low, mask=mask)
    tl.store(place + HALF, high, mask=mask)

    slot = tl.load(slots + token).to(tl.int64)
    into = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * (NUM_KV_HEADS * HEAD_DIM)
    head = tl.arange(0, PADDED_KV_HEADS)[:, None]
    mask = head < NUM_KV_HEADS
    place = qkv + token * qkv_stride + (NUM_HEADS + head) * HEAD_DIM + at
    to = into + head * HEAD_DIM + at
    low = tl.load(place, mask=mask, other=0.0)
    high = tl.load(place + HALF, mask=mask, other=0.0)
    low, high = _turned(low, high, cosine, sine, key_norm, eps, HALF, HAS_NORMS)
    tl.store(place, low, mask=mask)
    tl.store(place + HALF, high, mask=mask)
    tl.store(pool_keys + to, low, mask=mask)
    tl.store(pool_keys + to + HALF, high, mask=mask)
    place += NUM_KV_HEADS * HEAD_DIM
    tl.store(pool_values + to, tl.load(place, mask=mask, other=0.0), mask=mask)
    tl.store(pool_values + to + HALF, tl.load(place + HALF, mask=mask, other=0.0), mask=mask)


@triton.jit
def _silu_and_multiply_kernel(gate_up, out, NUMBERS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < NUMBERS
    gate = tl.load(gate_up + token * 2 * NUMBERS + at, mask=mask, other=0.0)
    up = tl.load(gate_up + token * 2 * NUMBERS + NUMBERS + at, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + token * NUMBERS + at, (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=mask)


def add_and_norm(residual: torch.Tensor, more: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual [T, n] += more, and the root-mean-square norm of it by `weight` [n], which is returned."""
    out = torch.empty_like(residual)
    numbers = residual.shape[1]
    _add_and_norm_kernel[(len(residual),)](
        residual,
        residual if more is None else more,
        weight,
        out,
        eps,
        numbers,
        triton.next_power_of_2(numbers),
        more is not None,
        num_warps=8 if numbers >= 2048 else 4,
    )
    return out


def turn_and_store(
    qkv: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    slots: torch.Tensor,
    layer: tuple[torch.Tensor, torch.Tensor],
    num_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
) -> None:
    """Queries and keys in qkv [T, (num_heads + 2 num_kv_heads) * head_dim] are normed by head (`norms`: weights of
    queries and of keys), turned to their positions, and keys and values written to slots of the pool's layer. rope:
    cosines and sines [positions, head_dim / 2]; slots [T]: block * block_size + offset."""
    keys, values = layer
    num_kv_heads, head_dim = keys.shape[2:]
    query_norm, key_norm = norms or (qkv, qkv)
    _turn_and_store_kernel[(len(qkv),)](
        qkv,
        *rope,
        positions,
        slots,
        keys,
        values,
        query_norm,
        key_norm,
        eps,
        qkv.stride(0),
        keys.stride(0),
        num_heads,
        num_kv_heads,
        triton.next_power_of_2(num_heads),
        triton.next_power_of_2(num_kv_heads),
        head_dim,
        keys.shape[1],
        norms is not None,
        num_warps=4,
    )


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 n] -> silu(gate) * up, [T, n]."""
    numbers = gate_up.shape[1] // 2
    out = gate_up.new_empty(len(gate_up), numbers)
    block = min(1024, triton.next_power_of_2(numbers))
    _silu_and_multiply_kernel[(len(gate_up), triton.cdiv(numbers, block))](gate_up, out, numbers, block, num_warps=4)
    return out
